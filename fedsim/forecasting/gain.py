"""The expected gain of the best matching attack, of three terms, none of which runs an attack.

Mean squared errors add up, in units of the guess's own:

    error = min over μ >= λ_2 / T² of Σ w_i (μ / (λ_i + μ))² + |(J'J + μ)^-1 J'e|² / |d|²
            + t_s²
    gain  = the mean of -10 log10(error) dB over batches

- The first sum is what T steps leave undone. λ_i and w_i are eigenvalues of J'J and the shares of
  the way d from truth to guess in them; J is the derivative of the update by the images. To stop an
  accelerated descent after T steps is to regularize with μ = λ / T², λ being the largest (Pagliana
  and Rosasco, Implicit regularization of accelerated methods, NeurIPS 2019), so that large
  batches, many local steps and deep models, whose λ_i fall off fast, stay near the guess. An
  outlier costs a conjugate method one step (Axelsson and Lindskog, On the rate of convergence of
  the preconditioned conjugate gradient method, 1986), and every classifier makes one, by the
  factor p - y of an image's whole gradient: so the largest that counts is λ_2.
- The second is what noise and pruning displace: e is Gaussian noise of the declared deviation, or
  what the stack makes of a real update. The attacker regularizes as is best for both sums (ridge
  regression; Hoerl and Kennard 1970).
- t_s is the share of the way at which descents stall (`slope_share`). In networks whose units
  switch, the gradient jumps; the slope of the objective shows no jump, and next to the truth jumps
  are most of the distance.

Clipping hides the update's length. Squared distances are then held to a wrong one, and what is left
is to match the direction by signs of slopes, which is not accelerated: μ >= λ_2 / T.

A closed form needs no descent: T is then infinite, and t_s is 0. So is t_s of the exact gradient of
one image in a dense first layer, each row of which is a multiple of the image, whichever units are
active.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim import rng
from fedsim.forecasting.closed_form import reads_in_closed_form, rows_are_the_image
from fedsim.forecasting.disturbance import Disturbance, disturbance
from fedsim.forecasting.plan import Plan
from fedsim.forecasting.sensitivity import (
    DISTANCES,
    Spectrum,
    UpdateMap,
    slope_share,
    spectrum,
)
from fedsim.models.victim import rebuild
from fedsim.types import Observation

DESCENT_STEPS = 80
"""T: accelerated steps that a matching attack makes before it ends. Set on the first ten
deployments of benchmarks/preflight.py."""
STALL_SHARE = 0.25
"""A descent stalls where the slope explains less than this share of the distance. Set as T."""
MOST_GAIN = 50.0
"""dB: what float32 gradients resolve of pixels."""
MOST_IMAGES = 32
"""Images of one update that are computed with; of more, the gain is at most that of so many."""
DRAWS = 4
"""Batches of stand-in images that are averaged over."""
_WORK = 2e7
"""Parameters times images of all draws together, above which there are fewer draws."""
_GRID = 4
"""Values of μ per decade."""
_NO_DESCENT = 1e-12
"""Least μ, in units of the eigenvalue that counts, of what needs no descent."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The expected gain of one plan, and what it is made of."""

    gain: float
    """Of attacks that match gradients, or read a closed form: dB over the guess, 0 to
    `MOST_GAIN`."""
    stall: float
    """t_s, 0 to 1."""
    unfinished: float | None
    """What noise, pruning and the limited steps leave of the squared error, 0 to 1; None where
    descents stall at the guess, so that nothing else was looked at."""
    ceiling: float | None
    """dB that noise leaves to an attack which needs no descent, where noise is all that lies
    between; None where something else does, or nothing."""
    closed_form: bool
    images: int
    """In the largest update that was computed."""
    draws: int


def estimate(plan: Plan) -> Estimate:
    """Returns the expected gain of the best matching attack on the update of `plan`.

    A batch never gains more than a smaller one, nor a sum more than one client: whoever knew the
    other images would be left with that. So the gain is the least of those of one client and of
    all, at the powers of two up to the batch size; between two of them it is interpolated.
    """
    steps = plan.training.steps if plan.training.batches == "different" else 1
    clients = max(1, min(plan.first.num_clients, MOST_IMAGES // steps))
    largest = 2 ** int(math.log2(max(1, MOST_IMAGES // (steps * clients))))
    exponent = math.log2(min(plan.training.batch_size, largest))
    sizes = [2**k for k in range(math.ceil(exponent) + 1)]
    found: list[Estimate] = []
    for size in sizes:
        tried = [_at(plan.of_batches(size, count), sizes[-1]) for count in sorted({1, clients})]
        found.append(min([*tried, *found[-1:]], key=lambda each: each.gain))
        if found[-1].gain == 0:
            return found[-1]
    last = found[-1]
    if exponent == int(exponent):
        return last
    before = found[-2]
    share = exponent - int(exponent)
    gain = before.gain + share * (last.gain - before.gain)
    return replace(last, gain=gain, ceiling=before.ceiling)


def _mean_gain(errors: Sequence[float]) -> float:
    return sum(map(gain_of, errors)) / len(errors)


def gain_of(error: float) -> float:
    """Returns the gain, dB, that leaves `error` of the guess's squared error."""
    return min(MOST_GAIN, max(0.0, -10 * math.log10(min(1.0, max(error, 1e-12)))))


@dataclass(frozen=True)
class _Case:
    """One draw of stand-in images."""

    update_map: UpdateMap
    images: Tensor
    labels: Tensor
    way: Tensor
    disturbance: Disturbance


def _at(plan: Plan, largest: int) -> Estimate:
    """The estimate at exactly this batch size."""
    closed = reads_in_closed_form(plan)
    power = 1 if plan.first.effect.scaled or plan.first.effect.scaled_examples else 2
    floor = _NO_DESCENT if closed else DESCENT_STEPS**-power
    count = plan.first.num_images
    size = sum(value.numel() for value in plan.first.parameters.values())
    draws = max(1, min(DRAWS, int(_WORK / (size * count))))
    cases = [
        _case(plan, plan.observations[k % len(plan.observations)], k, largest)
        for k in range(max(draws, len(plan.observations)))
    ]
    stall = 0.0 if closed or rows_are_the_image(plan) else _stall(cases)
    noisy = all(case.disturbance.error is None and case.disturbance.std > 0 for case in cases)
    stuck = stall >= 1
    left = [] if stuck and not noisy else [_unfinished(case, floor) for case in cases]
    return Estimate(
        gain=0.0 if stuck else _mean_gain([each.descent + stall**2 for each in left]),
        stall=stall,
        unfinished=None if stuck else 10 ** (-_mean_gain([each.descent for each in left]) / 10),
        ceiling=_mean_gain([each.noise for each in left]) if noisy else None,
        closed_form=closed,
        images=count,
        draws=len(cases),
    )


def _case(plan: Plan, observation: Observation, draw: int, largest: int) -> _Case:
    images, labels, way = plan.drawn(draw, largest)
    model = rebuild(observation)
    names = tuple(observation.parameters)
    disturbed = disturbance(plan, observation, model, images, labels, names)
    update_map = UpdateMap(
        model,
        observation.parameters,
        observation.buffers,
        observation.training,
        observation.num_clients,
    )
    return _Case(update_map, images, labels, way, disturbed)


def _stall(cases: Sequence[_Case]) -> float:
    """Where the mean share that the slope explains falls below what a descent needs."""
    before = 1.0, math.inf
    for distance in DISTANCES:
        shares = [
            slope_share(
                case.update_map,
                case.images,
                case.labels,
                case.way,
                case.disturbance.error,
                distance,
            )
            for case in cases
        ]
        share = sum(shares) / len(shares)
        if share < STALL_SHARE:
            if math.isinf(before[1]):
                return 1.0
            part = (before[1] - STALL_SHARE) / (before[1] - share)
            return float(before[0] * (distance / before[0]) ** part)
        before = distance, share
    return 0.0


@dataclass(frozen=True)
class _Left:
    """What is left of the squared error, 0 to 1."""

    descent: float
    """By noise, pruning and the limited steps."""
    noise: float
    """By noise and pruning alone."""


def _unfinished(case: _Case, floor: float) -> _Left:
    """What noise, pruning and the limited steps leave of the squared error.

    `floor` is the least μ, in units of the largest eigenvalue that counts.
    """
    length = float(case.way.norm())
    if length == 0:
        return _Left(1.0, 1.0)
    own = spectrum(case.update_map, case.images, case.labels, case.way, length)
    displaced = _displaced(case, length)
    top = own.eigenvalues.sort(descending=True).values[:2]
    if float(top[0]) == 0:
        return _Left(1.0, 1.0)
    counts = float(top[-1]) or float(top[0])

    def best_above(floor: float) -> float:
        least = counts * floor
        decades = math.log10(float(top[0]) / least) + 6
        tried = (least * 10 ** (k / _GRID) for k in range(math.ceil(decades * _GRID)))
        return min([1.0, *(_error(own, displaced, mu, length) for mu in tried)])

    return _Left(best_above(floor), best_above(_NO_DESCENT))


def _error(own: Spectrum, displaced: Spectrum | None, mu: float, length: float) -> float:
    error = float((own.weights * (mu / (own.eigenvalues + mu)) ** 2).sum())
    if displaced is not None:
        filtered = float((displaced.weights / (displaced.eigenvalues + mu) ** 2).sum())
        error += displaced.square * filtered / length**2
    return error


def _displaced(case: _Case, length: float) -> Spectrum | None:
    """The spectrum as J'e sees it; None of an exact update."""
    error = case.disturbance.error
    if error is None:
        if case.disturbance.std == 0:
            return None
        entries = len(case.update_map(case.images, case.labels))
        drawn = torch.randn(entries, generator=rng.generator(0, "noise"), dtype=torch.float64)
        error = case.disturbance.std * drawn
    (start,) = case.update_map.pull_back(case.images, case.labels, [error])
    return spectrum(case.update_map, case.images, case.labels, start, length)
