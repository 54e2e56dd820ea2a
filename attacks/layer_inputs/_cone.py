"""Inputs that are never negative, as the extreme rays of a cone.

A layer's inputs after ReLU are points of the row space of its gradient without a negative entry.
All such points are a cone. An input whose zeros leave no other direction is one of its extreme
rays: the least value of any linear function, over the points of the cone whose entries sum to 1, is
taken at one of them. An extreme ray that is no input has zeros by coincidence; an input has more
zeros than are needed (unique: Donoho and Stodden, When Does Non-Negative Matrix Factorization Give
a Correct Decomposition into Parts?, NeurIPS 2003).

Where ReLU follows the layer, too, an input tells at which neurons its own error signal is 0, and
with it the combination q of the gradient's columns that this signal is. All other inputs are
combinations of rows orthogonal to q: each input found leaves a cone of one dimension less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedsim_attacks.layer_inputs._layers import Signal

_ESSENTIAL = 0.99  # leverage from which a zero does not follow from the others
_NARROWER, _LAST = 0.3, 6  # factor by which the weights' width shrinks, and iterations at its least
_ZERO = 4.0  # distance from 0, in standard deviations of its error, up to which an entry may be 0


def sharpen(
    start: Tensor, vectors: Tensor, deviation: float, surely: int
) -> tuple[Tensor, Tensor] | None:
    """Fits a combination (r,) of vectors such that as many entries as possible are 0.

    Args:
        start: (r,), a combination near the fitted one.
        vectors: (r, e), the vectors that are combined.
        deviation: standard deviation of the error of an entry, above 0.
        surely: number of the smallest entries that are 0 in any case.

    Returns:
        The combination, of unit length, and a mask (e,) of its zeros; None if these may be chance.
    """
    combination = start / start.norm()
    at = combination @ vectors
    # The weights begin as wide as the entries are that are surely 0.
    width = float(at.abs().sort()[0][min(surely, len(at) - 1)])
    width = max(width, deviation)
    for _ in range(_LAST + math.ceil(math.log(width / deviation) / -math.log(_NARROWER))):
        width = max(_NARROWER * width, deviation)
        # Reweighted least squares: Σ at² / (at² + width²) counts entries that are not 0.
        weighted = vectors / (at.square() + width**2).sqrt()
        combination = torch.linalg.svd(weighted, full_matrices=False)[0][:, -1]
        at = combination @ vectors
    zeros = at.abs() < _ZERO * deviation
    # Fewer than r zeros hold for some combination by construction, and prove nothing.
    if int(zeros.sum()) < len(vectors):
        return None
    left, _, right = torch.linalg.svd(vectors[:, zeros], full_matrices=False)
    # Leverage 1: without that zero the combination would not be one, so it may be chance.
    if float(right[:-1].square().sum(0).max()) > _ESSENTIAL:
        return None
    return left[:, -1], zeros


_NEGATIVE = 30.0  # distance below 0, in deviations of its error, down to which an entry may be
_FEWEST = 0.05  # least share of zeros in an input, besides those that any extreme ray has
_FRUITLESS = 12  # linear programs without a new input, at each slack, after which the search ends
_REWEIGHTED = 3  # number of times that a linear program is tried again with other weights
_NEAR = 0.1  # share of the mean entry below which all entries weigh alike
_SLACK, _SLACKS = 1e-8, 4
"""Distance below 0 to which solvers round, and bounds from that to the noise, tried in turn."""
_SAME, _SURELY = 1e-3, 6.0
"""Distance up to which two rays are the same: relative, and in standard deviations of errors."""
_BETTER = 0.5  # error of a ray over that of a like one, up to which it takes the other's place
_VAGUE = 0.1  # relative error of a ray above which it is not taken for one

SignalOf = Callable[[Tensor, float], Signal | None]
"""Function from a combined row (n,) and its relative error to its signal; None refuses it."""


@dataclass(frozen=True)
class Rays:
    """Holds inputs as combinations of the rows of a row space."""

    combinations: Tensor  # (k, r), of unit length
    spread: Tensor  # (k,): root of the summed variances by noise of an input's entries
    tried: int  # linear programs that were solved


def find_rays(
    entries: Tensor,
    rows: Tensor,
    deviation: float,
    generator: torch.Generator,
    signal_of: SignalOf | None = None,
) -> Rays:
    """Finds combinations of rows whose entries are non-negative, many of them 0: r at most.

    Args:
        entries: (r, e) of the r rows, whose combinations must not be negative.
        rows: (r, n) orthogonal.
        deviation: standard deviation of the error of an entry of either.
        generator: stream on the CPU, which draws linear functions.
        signal_of: tells an input's error signal; inputs for which it returns None are dropped.
    """
    rank = len(entries)
    if rank == 1:  # the only ray, whether it has zeros or not
        error = deviation * rows.shape[1] ** 0.5
        return Rays(entries.sum(1, keepdim=True).sign(), rows.new_tensor([error]), 0)
    # Entries that are 0 in all inputs, but for errors, bound nothing.
    alive = entries.norm(dim=0) > 10 * deviation * rank**0.5
    search = _Search(entries[:, alive].cpu(), rows.cpu(), deviation)
    rays: list[_Ray] = []
    widths = search.slacks()
    fruitless = 0
    while len(rays) < rank and fruitless < _FRUITLESS * len(widths):
        fruitless += 1
        ray = search.sparse_ray(rays, widths[search.aims % len(widths)], fruitless > 1, generator)
        if ray is None:
            continue
        if signal_of is not None:
            signal = signal_of(ray.values, ray.error)
            if signal is None:
                continue
            ray = replace(ray, signal=signal)
        same = [place for place, other in enumerate(rays) if other.is_like(ray)]
        if not same:
            rays.append(ray)
            fruitless = 0
        # One that is like two others is no better version of either.
        elif len(same) == 1 and ray.error < _BETTER * rays[same[0]].error:
            rays[same[0]] = ray
    last = search.last(rays)
    if last is not None and signal_of is not None:
        signal = signal_of(last.values, last.error)
        if signal is not None and signal.combination is not None:
            rays.append(last)
    combinations = [ray.combination for ray in rays]
    return Rays(
        torch.stack(combinations).to(rows) if rays else rows.new_zeros(0, rank),
        rows.new_tensor([ray.error * float(ray.values.norm()) for ray in rays]),
        search.programs,
    )


@dataclass(frozen=True)
class _Ray:
    combination: Tensor  # (r,), of unit length
    values: Tensor  # (n,): the input that it is
    error: float  # root of the summed variances of all values, over their norm
    signal: Signal | None = None  # error signal of its image; None if nothing tells it

    @property
    def bound(self) -> Tensor | None:
        """Combination (r,) to which those of all other inputs are orthogonal; None if unknown."""
        return None if self.signal is None else self.signal.combination

    def is_like(self, other: _Ray) -> bool:
        """Says whether two rays are the same but for their errors."""
        first, second = self.values, other.values
        apart = float((first / first.norm() - second / second.norm()).norm())
        return apart < max(_SAME, _SURELY * max(self.error, other.error))


@dataclass
class _Search:
    """Linear programs over the points of a cone whose entries sum to 1."""

    cone: Tensor  # (r, e): entries whose combinations must not be negative
    rows: Tensor  # (r, n), by whose lengths variables are scaled
    deviation: float
    aims: int = 0
    programs: int = 0

    def slacks(self) -> list[float]:
        """Lists how far below 0 entries may be, from rounding up to noise."""
        weakest = float(self.rows.norm(dim=1).min())
        noise = 3 * self.deviation / weakest / self.cone.shape[1] ** 0.5
        if noise < 3 * _SLACK:
            return [_SLACK]
        return torch.logspace(math.log10(_SLACK), math.log10(noise), _SLACKS).tolist()

    def sparse_ray(
        self, rays: list[_Ray], slack: float, above: bool, generator: torch.Generator
    ) -> _Ray | None:
        """Searches a ray at which a random function is least, 0 at other `rays`, or `above`."""
        from scipy.optimize import linprog  # which takes half a second

        self.aims += 1
        lengths = self.rows.norm(dim=1)
        bounds = [ray.bound for ray in rays if ray.bound is not None]
        basis = torch.eye(len(lengths), dtype=lengths.dtype)
        if bounds:
            basis = torch.linalg.svd(torch.stack(bounds))[2][len(bounds) :]
        # Variables are in units of the rows' lengths, so that weak directions count as much.
        scaled = basis @ (self.cone / lengths[:, None])
        aim = torch.randn(len(basis), generator=generator, dtype=torch.float64)
        others = [basis @ (ray.combination * lengths) for ray in rays if ray.bound is None]
        if others:
            known = torch.nn.functional.normalize(torch.stack(others))
            dual = torch.linalg.pinv(known)
            # A function that is 0 at all known rays has its least value at another.
            aim -= dual @ (known @ aim)
            rising = dual @ torch.rand(len(known), generator=generator, dtype=torch.float64)
            aim = aim / aim.norm() + float(above) * rising / rising.norm()
        for _ in range(_REWEIGHTED + 1):
            self.programs += 1
            solved = linprog(
                (aim / aim.norm()).numpy(),
                A_ub=-scaled.T.numpy(),
                b_ub=np.full(scaled.shape[1], slack),
                A_eq=scaled.sum(1)[None].numpy(),
                b_eq=[1.0],
                bounds=(None, None),
                method="highs",
            )
            if solved.x is None:
                return None
            solution = torch.from_numpy(solved.x)
            ray = self._polish((solution @ basis) / lengths)
            if ray is not None:
                return ray
            at = (solution @ scaled).clamp_min(0)
            # Entries nearly 0 weigh most, and are driven there (Candès, Wakin and Boyd, Enhancing
            # Sparsity by Reweighted l1 Minimization, 2008).
            aim = scaled @ (1 / (at + _NEAR * at.mean()))
        return None

    def last(self, rays: list[_Ray]) -> _Ray | None:
        """Returns the one missing ray if all others are known and determine it; else None."""
        bounds = [ray.bound for ray in rays if ray.bound is not None]
        # Only r - 1 known signals leave a single direction orthogonal to all.
        if len(bounds) != len(rays) or len(rays) != len(self.rows) - 1:
            return None
        lengths = self.rows.norm(dim=1)
        across = torch.stack(bounds)
        direction = torch.linalg.svd(across)[2][-1]
        combination = torch.nn.functional.normalize(direction / lengths, dim=0)
        combination = combination * (combination @ self.cone).sum().sign()
        if float((combination @ self.cone).min()) < -_NEGATIVE * self.deviation:
            return None
        values, along = combination @ self.rows, combination * lengths
        errors = [ray.signal.errors for ray in rays if ray.signal is not None]
        turned = [along @ each for each in errors if each is not None]
        moved = torch.linalg.pinv(across) * torch.stack(turned).norm(dim=1)
        variance = float(moved.square().sum()) + self.deviation**2 * len(values)
        error = variance**0.5 / float(values.norm())
        return None if error > _VAGUE else _Ray(combination, values, error)

    def _polish(self, start: Tensor) -> _Ray | None:
        """Makes a combination (r,) precise by all of its zeros; None if it is no ray."""
        cone, deviation = self.cone, self.deviation
        # r - 1 zeros make any extreme ray; an input has some more.
        surely = len(cone) - 1 + int(_FEWEST * cone.shape[1])
        precise = sharpen(start, cone, deviation, surely)
        if precise is None:
            return None
        combination, zeros = precise[0], cone[:, precise[1]]
        combination = combination * (combination @ cone).sum().sign()
        values = combination @ self.rows
        # Errors of zeros move it along the directions that they hold least. Its scale stays open.
        left, held, _ = torch.linalg.svd(zeros, full_matrices=False)
        lengths = self.rows.norm(dim=1)
        along = torch.nn.functional.normalize(lengths * combination, dim=0)
        moved = lengths[:, None] * left[:, :-1] / held[:-1]
        # A change of length alone is no error.
        moved -= along[:, None] * (along @ moved)
        variance = float(moved.square().sum()) + len(values)
        error = deviation * variance**0.5 / float(values.norm())
        if error > _VAGUE or float((combination @ cone).min()) < -_NEGATIVE * deviation:
            return None
        return _Ray(combination, values, error)
