"""Monte-Carlo of δ(ε) between P = Σ_z p(z) N(C z, σ² I) and Q = N(0, σ² I), C_ij = λ^(i-j).

The pair dominates Gaussian noise correlated by C^-1 whenever an example's participations z are
independent of the other examples' (Choquette-Choo et al., Near Exact Privacy Amplification for
Matrix Mechanisms, ICLR 2025): Poisson sampling, where the steps are independent, and balls-in-bins,
where an example draws one of B bins and takes part in every B-th step. Removal of the example is
(P, Q), its addition (Q, P).

Draws come from a mixture of tilted pairs that reach the tails, and are weighted back by the ratio
of the densities (importance sampling with the balance heuristic; one part of the mixture is the
pair itself, so that no weight exceeds the number of parts). Intervals are normal approximations:
they hold at their confidence as the number of draws grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.privacy.composition.correlated import Array, Grid, Rounding, accumulate, grid, grid_size
from fedsim.privacy.contract import Direction
from fedsim.privacy.numerics import work
from fedsim.types import FedsimError
from fedsim.words import number_of

CONFIDENCE = 0.99
"""Probability that an interval holds δ."""

_CHUNK = 2048
_CACHED = 1 << 15
"""Entries of an array of (levels, draws)."""
_TOLERANCE = 0.03
_FEWEST = 100
"""Draws in the tail below which no interval is stated."""
_WORST = 0.1
"""Relative standard error of δ above which the normal approximation is not trusted."""
_TILTS = (1.5, 3.0, 5.0)
"""Shifts of the mixture's parts, in standard deviations."""


class TooFewDraws(FedsimError):  # noqa: N818 - reads as what happened
    """Raised where the draws do not reach far enough into the tail for an interval."""


@dataclass(frozen=True)
class Poisson:
    """Describes an example in each step's batch with probability `sampling_rate`, independently.

    `steps` is T, and `correlation` is λ of the noise z_t - λ z_(t-1) of step t.
    """

    steps: int
    sampling_rate: float
    correlation: float

    # Draws come from several laws of the participations z. Law 0 is the true one; in the others
    # the example participates more often, to reach the tails.
    _rounded = True
    """Whether means depend on the rounding."""

    @property
    def _laws(self) -> int:
        return len(self._rates)

    @cached_property
    def _rates(self) -> Array:
        q = self.sampling_rate
        # Shifted in standard deviations of the share of steps
        # that take the example, but never to 1.
        larger = q + np.array(_TILTS) * math.sqrt(q * (1 - q) / self.steps)
        return np.append(q, np.minimum(larger, (1 + q) / 2))

    def _means(self, law: NDArray[np.int64], rounding: Rounding, rng: np.random.Generator) -> Array:
        """Draws (count, T) values of C z on a grid, the row i by the law of number law[i]."""
        z = rng.random((len(law), self.steps)) < self._rates[law][:, None]
        along, at = self._grid(rounding), np.zeros(len(law), dtype=np.int64)
        y = np.empty(z.shape)
        for t in range(self.steps):
            at = np.where(z[:, t], along.present[at], along.absent[at])
            y[:, t] = along.levels[at]
        return y

    def _mean(self) -> Array:
        """Returns the (T,) mean of C z under the true law."""
        shares: Array = np.cumsum(self.correlation ** np.arange(self.steps))
        return self.sampling_rate * shares

    def _log_ratios(
        self, x: Array, sigma: float, stretch: float, laws: int, rounding: Rounding
    ) -> Array:
        """Computes (laws, count) logs at `x` of N(stretch C z, σ² I) over N(0, σ² I), by law."""
        along = self._grid(rounding)
        moves = [along.moves(1 - q, q) for q in self._rates[:laws]]
        levels = stretch * along.levels[:, None] / sigma
        # Arrays that stay in the processor's cache take a third of the time.
        block = max(16, _CACHED // len(levels))
        return np.concatenate(
            [_forward(x[i : i + block] / sigma, levels, moves) for i in range(0, len(x), block)],
            axis=1,
        )

    def work(self, draws: int) -> int:
        """Estimates how many numbers are computed for `draws` draws in both directions."""
        levels = round(grid_size(self.correlation, self._least, _TOLERANCE))
        return draws * self.steps * levels * (4 * self._laws + len(_TILTS) + 1)

    def _grid(self, rounding: Rounding) -> Grid:
        return grid(self.correlation, self._least, _TOLERANCE, rounding)

    @property
    def _least(self) -> float:
        # What stays at the least level would stand out against the mean q / (1 - λ).
        return min(_TOLERANCE * self.sampling_rate / (1 - self.correlation), 0.5)


def _forward(x: Array, levels: Array, moves: list[Any]) -> Array:
    """Returns (laws, count): log ratios at each x (count, T), levels and x in units of σ."""
    found = np.zeros((len(moves), len(x)))
    states = np.zeros((len(moves), len(levels), len(x)))
    states[:, 0] = 1.0
    squares = levels**2 / 2
    for t in range(x.shape[1]):
        # log N(x; y, 1) / N(x; 0, 1) = x y - y² / 2, less the largest so that exp cannot overflow.
        exponent = levels * x[:, t]
        exponent -= squares
        top = exponent.max(axis=0)
        exponent -= top
        likelihood = np.exp(exponent, out=exponent)
        for law, move in enumerate(moves):
            state = move @ states[law]
            state *= likelihood
            # States are scaled to a sum of 1 in each step, and the scales' logarithms added up.
            total = state.sum(axis=0)
            np.divide(state, total, out=states[law])
            found[law] += np.log(total) + top
    return found


@dataclass(frozen=True)
class BallsInBins:
    """Describes an example in every `bins`-th batch, from a uniform one of the first `bins` on.

    `steps`, which is T, need not be a multiple of `bins`; `correlation` is λ as of `Poisson`.
    """

    # The methods are those of `Poisson`, with vectors in coordinates of the span of all C z, one
    # law and no rounding.

    steps: int
    bins: int
    correlation: float

    _laws = 1
    _rounded = False

    def _means(self, law: NDArray[np.int64], rounding: Rounding, rng: np.random.Generator) -> Array:
        means: Array = self._modes[rng.integers(self.bins, size=len(law))]
        return means

    def _mean(self) -> Array:
        mean: Array = self._modes.mean(axis=0)
        return mean

    def _log_ratios(
        self, x: Array, sigma: float, stretch: float, laws: int, rounding: Rounding
    ) -> Array:
        modes = stretch * self._modes / sigma
        exponent = (x / sigma) @ modes.T
        # log N(x; m, 1) / N(x; 0, 1) = <x, m> - |m|² / 2 for every mode m.
        exponent -= (modes**2).sum(axis=1) / 2
        return _log_sum(exponent)[None] - math.log(self.bins)

    def work(self, draws: int) -> int:
        """Estimates how many numbers are computed for `draws` draws in both directions."""
        return draws * self.bins * min(self.bins, self.steps) * 8

    @cached_property
    def _modes(self) -> Array:
        """Returns (bins, at most `bins`): y of each bin, in coordinates of their span."""
        # What is asked of the bins' y is invariant under rotation, and noise across their span
        # tells nothing.
        present = np.arange(self.steps) % self.bins == np.arange(self.bins)[:, None]
        triangle: Array = np.linalg.qr(accumulate(present, self.correlation).T)[1]
        return triangle.T


Participations = Poisson | BallsInBins


@dataclass(frozen=True, kw_only=True)
class SampledDelta:
    """Holds an estimate of δ at an ε, with its interval (`low`, `high`) at a confidence of 99%.

    `direction` is the one with the larger upper end: `forward`, the example's removal, or
    `reverse`, its addition.
    """

    delta: float
    low: float
    high: float
    direction: Direction


@dataclass(frozen=True)
class _Draws:
    """Draws of one direction: log ratios, and weights towards the first of the pair."""

    weights: Array
    losses: Array

    def delta(self, epsilon: float) -> tuple[float, float, int]:
        """Returns (estimate of δ, its standard error, number of draws in the tail)."""
        tail = self.losses > epsilon
        part = np.zeros(len(tail))
        # δ = E_P[(1 - exp(ε - L))+]: losses up to ε add nothing.
        part[tail] = self.weights[tail] * -np.expm1(epsilon - self.losses[tail])
        return float(part.mean()), float(part.std() / math.sqrt(len(part))), int(tail.sum())


class PairCurve:
    """Estimates the curve δ(ε) of noisy steps on sampled batches; the same draws serve all ε.

    `Poisson` participations are rounded: up for estimates and upper ends, down for lower ends.
    """

    def __init__(
        self,
        participations: Participations,
        sigma: float,
        draws: int,
        seed: int,
        most: int = work.MOST,
    ) -> None:
        """Checks how much work the draws are, and makes them when they are first asked for.

        Args:
            participations: how an example takes part in the steps.
            sigma: standard deviation of z_t, in clipping norms.
            draws: number of draws of each direction.
            seed: seed of the draws.
            most: numbers that the draws may take; a TooMuchWork says that they take more.
        """
        numbers = participations.work(draws)
        if numbers > most:
            raise work.TooMuchWork(
                f"this takes about {numbers:.1e} numbers, and at most {most:.0e} are computed; use "
                "fewer steps or draws, less correlation, or sampling: fixed_size, whose bound "
                "needs no draws"
            )
        self._of, self._sigma, self._count, self._seed = participations, sigma, draws, seed
        self._draws_of = cache(self._make_draws)

    def _draws(self, direction: Direction, rounding: Rounding) -> _Draws:
        # Bins are not rounded, so that both ends share one set of draws.
        return self._draws_of(direction, rounding if self._of._rounded else "up")

    def at(self, epsilon: float) -> SampledDelta:
        """Estimates δ at `epsilon` >= 0, of the larger direction; or raises TooFewDraws."""
        forward = self._draws("forward", "down").delta(epsilon)
        reverse = self._draws("reverse", "down").delta(epsilon)
        # δ is the larger of both directions: either's lower end bounds it from below.
        lows = [delta - _QUANTILE * error for delta, error, _ in (forward, reverse)]
        delta, high, direction = self._upper(epsilon)
        return SampledDelta(delta=delta, low=max(0.0, *lows), high=high, direction=direction)

    def estimate(self, epsilon: float) -> float:
        """Estimates δ of an example's removal from however few draws; no interval, no claim."""
        return self._draws("forward", "up").delta(epsilon)[0]

    def upper(self, epsilon: float) -> tuple[float, Direction]:
        """Returns (upper end of δ's interval, for claims; its direction), or raises TooFewDraws."""
        return self._upper(epsilon)[1:]

    def _upper(self, epsilon: float) -> tuple[float, float, Direction]:
        delta, error, tail = self._draws("forward", "up").delta(epsilon)
        if tail < _FEWEST or error > _WORST * delta:
            raise TooFewDraws(
                f"only {tail} of {number_of(self._count, 'draw')} reach ε = {epsilon:g}, too few "
                "for an interval: raise draws, or ask for a smaller ε (a larger δ)"
            )
        high = delta + _QUANTILE * error
        reverse, reverse_error, tail = self._draws("reverse", "up").delta(epsilon)
        # Where hardly any draw gets there, although some are tilted that way by five standard
        # deviations, addition is far below removal.
        reverse_high = reverse + _QUANTILE * reverse_error if tail >= _FEWEST else 0.0
        direction: Direction = "reverse" if reverse_high > high else "forward"
        return max(delta, reverse), min(1.0, max(high, reverse_high)), direction

    def _make_draws(self, direction: Direction, rounding: Rounding) -> _Draws:
        # Both roundings draw from one seed, so that they differ by the rounding alone.
        rng = np.random.default_rng([self._seed, direction == "forward"])
        draw = _removal if direction == "forward" else _addition
        parts = []
        for start in range(0, self._count, _CHUNK):
            work.tell(self._of.work(start), self._of.work(self._count))
            parts.append(
                draw(self._of, self._sigma, rounding, min(_CHUNK, self._count - start), rng)
            )
        weights, losses = (np.concatenate(column) for column in zip(*parts, strict=True))
        return _Draws(weights, losses)


_QUANTILE = 2.807
"""Quantile of the standard normal at 1 - (1 - `CONFIDENCE`) / 4: two sides, two directions."""


def _removal(
    of: Participations, sigma: float, rounding: Rounding, count: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Draws (weights, log P/Q) for averages under P."""
    mean = of._mean()
    length = math.sqrt(float((mean**2).sum()))
    own = of._means(np.zeros(count, dtype=np.int64), rounding, rng)
    # Stretching C z by 1 + t σ / |C z| moves x by t standard deviations along it.
    typical = max(1.0, math.sqrt(float((own**2).sum() / count)))
    # A part is (law, stretch s, shift a): N(s C z + a, σ² I) with z of that law, the shift being
    # along the mean of P. Parts that take the same densities of x are listed together.
    laws = range(of._laws)
    groups: list[tuple[range, float, float]] = [
        (laws, 1.0, 0.0),
        *((laws, 1 + tilt * sigma / typical, 0.0) for tilt in _TILTS),
        *((range(1), 1.0, tilt * sigma) for tilt in _TILTS),
    ]
    parts = np.array([(law, s, a) for several, s, a in groups for law in several])
    law, stretch, shift = parts[rng.integers(len(parts), size=count)].T
    y = of._means(law.astype(np.int64), rounding, rng)
    unit = mean / length
    x = sigma * rng.standard_normal(y.shape) + stretch[:, None] * y + shift[:, None] * unit
    along = x @ unit
    logs = np.concatenate(
        [
            # N(x - a; ...) over N(x; 0), by way of N(x - a; 0)
            of._log_ratios(x - a * unit, sigma, s, len(several), rounding)
            + (2 * a * along - a**2) / (2 * sigma**2)
            for several, s, a in groups
        ]
    )
    # The first part is the pair itself: law 0, stretch 1, no
    # shift. Its density is divided by the mixture's.
    return np.exp(logs[0] - _log_mean(logs)), logs[0]


def _addition(
    of: Participations, sigma: float, rounding: Rounding, count: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Draws (weights, log Q/P) for averages under Q; parts are shifted against the mean of P."""
    mean = of._mean()
    unit = -mean / math.sqrt(float((mean**2).sum()))
    shifts = np.append(0.0, _TILTS)
    # In units of σ. Shifted normals have closed densities, so that only P's takes the forward pass.
    x = rng.standard_normal((count, len(unit)))
    x += shifts[rng.integers(len(shifts), size=count)][:, None] * unit
    logs = shifts[:, None] * (x @ unit) - shifts[:, None] ** 2 / 2
    return np.exp(-_log_mean(logs)), -of._log_ratios(sigma * x, sigma, 1.0, 1, rounding)[0]


def _log_mean(logs: Array) -> Array:
    return _log_sum(logs.T.copy()) - math.log(len(logs))


def _log_sum(logs: Array) -> Array:
    """Returns (k,) log of the sum of exp over each row of `logs`, which is written over."""
    # scipy.special.logsumexp takes several times the time, most of a claim's.
    top = logs.max(axis=1)
    logs -= top[:, None]
    np.exp(logs, out=logs)
    found: Array = np.log(logs.sum(axis=1)) + top
    return found
