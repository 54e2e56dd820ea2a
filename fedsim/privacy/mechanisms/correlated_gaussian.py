"""The calculator's mechanism `correlated_gaussian`: DP-CGD under each way of choosing batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self, final

import numpy as np
from pydantic import Field, model_validator

from fedsim.privacy import baselines
from fedsim.privacy.composition import correlated, poisson
from fedsim.privacy.composition.correlated import accumulate
from fedsim.privacy.composition.dominating_pair import (
    CONFIDENCE,
    BallsInBins,
    PairCurve,
    Participations,
    Poisson,
    TooFewDraws,
)
from fedsim.privacy.contract import (
    Answer,
    Calibration,
    Curve,
    Direction,
    Experiment,
    Keys,
    KnownMechanism,
    PositiveSize,
)
from fedsim.privacy.numerics import gaussian, work
from fedsim.privacy.numerics.special import Array, least
from fedsim.types import FedsimError
from fedsim.words import number_of

StepSampling = Literal["full", "single_epoch", "poisson", "balls_in_bins", "fixed_size"]

_PATTERNS = 1024
"""Participation patterns that a likelihood ratio sums over, at most."""
_CHUNK = 1 << 20
_HELD = 1 << 27
"""Entries of an array of (draws, steps) or (patterns, steps), at most."""


class _Steps(Keys):
    """Noisy steps: how many, on which batches, and by which claim."""

    steps: Annotated[int, Field(ge=1, le=100_000)]
    """T: number of noisy steps."""
    sampling_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """q: the probability of an example to be in a step's batch. Not used by `full` and
    `single_epoch`."""
    correlation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """λ: the share of the last step's noise that is taken back."""
    sampling: StepSampling
    """`full`: an example may be in every batch. `single_epoch`: in at most one. `poisson`: in each
    with probability q, independently. `balls_in_bins`: in every (1/q)-th, from a random one on.
    `fixed_size`: batches of the same size, uniform without replacement in each step."""
    variant: Literal["exact", "paper"] = "exact"
    """`paper`: Theorem F.12 of the KAN paper, for `fixed_size` and `poisson`. Above ε = 1
    its last step may fail, and the exact Gaussian mechanism stands in its place."""


_EXACT = "exact Gaussian"
_CONVEX = "exact Gaussian, averaged over the batches, by joint convexity"
_LARGEST = 1e9
"""Bound on ε, and on the noise multiplier, that are looked for."""
_SEARCH, _ATTEMPTS = 9, 8
"""Curves that calibration estimates of a few draws, and of all of them."""


class _CorrelatedKeys(_Steps):
    unit: ClassVar[str] = "example"
    relation: Literal["zero_out", "add_or_remove", "replace_one"] = "zero_out"
    """Neighbours: an example's contribution is exchanged for zero, an example is there or not (the
    same, but only where sampling is independent between examples), or for any other."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the Monte-Carlo draws, where they are needed."""
    draws: Annotated[int, Field(ge=1000, le=100_000_000)] | None = None
    """Monte-Carlo draws per direction; default 8,192 for Poisson sampling, else 200,000."""

    def neighbours(self) -> str:
        return self.relation.replace("_", " ")

    @model_validator(mode="after")
    def _check_relation(self) -> Self:
        independent = self.sampling in ("poisson", "balls_in_bins")
        if self.variant == "paper" and self.sampling not in ("fixed_size", "poisson"):
            raise ValueError("variant: paper is about sampling: fixed_size (or poisson)")
        if self.relation == "replace_one" and (independent or self.variant == "paper"):
            raise ValueError(
                "relation: replace_one is accounted for sampling: full, single_epoch and "
                "fixed_size, variant: exact"
            )
        if self.relation == "add_or_remove" and not independent:
            raise ValueError(
                "relation: add_or_remove is accounted for sampling: poisson and balls_in_bins, "
                "where an example's being there changes nobody else's batch"
            )
        if self.sampling == "balls_in_bins" and abs(self._bins * self.sampling_rate - 1) > 1e-9:
            raise ValueError(
                f"balls_in_bins needs 1 / sampling_rate to be whole: use {1 / self._bins:.10g}"
            )
        return self

    @property
    def _shape(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "sampling_rate": self.sampling_rate,
            "correlation": self.correlation,
        }

    @property
    def _bins(self) -> int:
        return max(1, round(1 / self.sampling_rate))

    @property
    def _always(self) -> bool:
        return self.sampling == "full" or (
            self.sampling_rate == 1 and self.sampling != "single_epoch"
        )

    def _exact(self) -> Callable[[float, float], tuple[float, str]] | None:
        """Returns a function (noise, ε) -> (log δ, method); None where it takes draws."""
        replaced = self.relation == "replace_one"
        # No sampling is counted on: one Gaussian release at the
        # worst places of the example, which is exact.
        if self._always or self.sampling == "single_epoch":
            count = None if self._always else 1
            reach = correlated.sensitivity(self.steps, self.correlation, count) * (1 + replaced)
            return lambda noise, eps: (float(gaussian.log_delta(noise / reach, eps)), _EXACT)
        if self.sampling == "fixed_size" and replaced:
            return lambda noise, eps: (
                correlated.log_delta_replaced(noise, eps, **self._shape),
                _CONVEX,
            )
        if self.sampling == "fixed_size":
            return lambda noise, eps: (self._log_delta_revealed(noise, eps), poisson.REVEALED)
        # Without correlation the sampled steps are independent, and their curve needs no draws.
        if self.sampling == "poisson" and self.correlation == 0:
            return lambda noise, eps: poisson.least_bound(
                noise, eps, steps=self.steps, sampling_rate=self.sampling_rate
            )
        return None

    def _pair(self, noise: float, draws: int, seed: int, most: int = work.MOST) -> PairCurve:
        of: Participations
        if self.sampling == "poisson":
            of = Poisson(self.steps, self.sampling_rate, self.correlation)
        else:
            of = BallsInBins(self.steps, self._bins, self.correlation)
        return PairCurve(of, noise, draws, seed, most)

    def _log_delta_revealed(self, noise: float, epsilon: float) -> float:
        if self.sampling == "balls_in_bins":
            return correlated.log_delta_known_bin(
                noise, epsilon, steps=self.steps, bins=self._bins, correlation=self.correlation
            )
        return correlated.log_delta_revealed(noise, epsilon, **self._shape)

    def _answer(
        self, epsilon: float, delta: float, noise: float, method: str, **told: Any
    ) -> Answer:
        # A δ that underflows comes with its logarithm.
        told = {"log_delta": math.log(delta), **told} if delta else told
        return Answer(epsilon=epsilon, delta=delta, noise_multiplier=noise, method=method, **told)

    @property
    def _draws(self) -> int:
        return self.draws or (8192 if self.sampling == "poisson" else 200_000)

    @property
    def _draw_method(self) -> str:
        return f"Monte-Carlo of the dominating pair, {number_of(self._draws, 'draw')}"


@final
class CorrelatedCurve(_CorrelatedKeys, Curve):
    """Computes the curve δ(ε) of T correlated releases whose noise is given.

    Further keys are `steps` (T) and `sampling`, which are required, `sampling_rate` (q),
    `correlation` (λ), `variant`, `relation`, `seed` and `draws`: `fedsim privacy` describes them. A
    contradiction is a ValidationError. Of an estimate, the upper end of `interval` may be claimed.
    """

    noise_multiplier: Annotated[float, Field(gt=0, le=1e12)]
    """σ: standard deviation of z_t over the clipping norm (not of the correlated noise)."""

    def delta(self, epsilon: float) -> Answer:
        """Computes δ at ε >= 0; from draws, an estimate with an `interval`. Errors as `epsilon`."""
        if self.variant == "paper":
            return self._told(epsilon, self._paper_delta(epsilon), baselines.KAN_METHOD)
        if exact := self._exact():
            found, method = exact(self.noise_multiplier, epsilon)
            return self._told_exactly(epsilon, math.exp(found), method, log_delta=found)
        at = self._pair(self.noise_multiplier, self._draws, self.seed).at(epsilon)
        return self._estimate(epsilon, at.delta, (at.low, at.high), at.direction)

    def epsilon(self, delta: float) -> Answer:
        """Computes ε at δ in (0, 1); an answer by random draws is an estimate with an `interval`.

        A FedsimError says that Theorem F.12 does not apply, or that the draws do not reach so far;
        it is a TooMuchWork if they take too long.
        """
        noise = self.noise_multiplier
        if self.variant == "paper":
            found = baselines.kan_epsilon(noise, delta, **self._shape)
            return self._told(found, delta, baselines.KAN_METHOD)
        if exact := self._exact():
            found = _least(lambda eps: exact(noise, eps)[0] <= math.log(delta))
            # Asked again for the method: the one of several bounds that proves the least δ.
            return self._told_exactly(found, delta, exact(noise, min(found, _LARGEST))[1])
        curve = self._pair(noise, self._draws, self.seed)
        low = _least(lambda eps: _holds_or_unseen(lambda: curve.at(eps).low, delta))
        estimate = _least(lambda eps: _holds_or_unseen(lambda: curve.at(eps).delta, delta))
        high = _upper_end(curve, delta)
        direction = curve.at(high).direction  # raises if the draws did not reach it
        return self._estimate(estimate, delta, (low, high), direction)

    def claim(self, delta: float, most: int) -> tuple[float, str]:
        """Returns (ε that may be claimed at δ, method); for an estimate, its interval's upper end.

        Errors are those of `epsilon`, a TooMuchWork where draws take more than `most` numbers.
        """
        if self.variant == "paper" or self._exact():
            found = self.epsilon(delta)
            return found.epsilon, found.method
        curve = self._pair(self.noise_multiplier, self._draws, self.seed, most)
        high = _upper_end(curve, delta)
        curve.upper(high)  # raises if the draws did not reach it
        return high, f"{self._draw_method}, upper end at {CONFIDENCE:.0%}"

    def claim_revealed(self, delta: float) -> tuple[float, str]:
        """Returns (ε, method) at δ for an attacker who knows which batches an example was in.

        The contribution is exchanged for zero. The result bounds ε where batches are hidden, too;
        it is inf if none up to 2^29 is enough.
        """
        target, noise = math.log(delta), self.noise_multiplier
        found = _least(lambda eps: self._log_delta_revealed(noise, eps) <= target)
        return found, poisson.REVEALED

    def _paper_delta(self, epsilon: float) -> float:
        # A hair above, lest rounding lift η above 1.
        least = baselines.kan_least_delta(self.steps, self.sampling_rate) * (1 + 1e-12)

        def is_enough(by: float) -> bool:
            delta = min(least * math.exp(by), 1.0)
            return (
                delta >= 1
                or baselines.kan_noise(epsilon, delta, **self._shape) <= self.noise_multiplier
            )

        if least >= 1:
            baselines.kan_noise(epsilon, 0.5, **self._shape)  # says why it does not apply
        return min(1.0, least * math.exp(_least(is_enough)))

    def _told(self, epsilon: float, delta: float, method: str, **told: Any) -> Answer:
        return self._answer(epsilon, delta, self.noise_multiplier, method, **told)

    def _told_exactly(self, epsilon: float, delta: float, method: str, **told: float) -> Answer:
        way = None if method == poisson.PLD else "both"
        return self._told(epsilon, delta, method, direction=way, **told)

    def _estimate(
        self, epsilon: float, delta: float, interval: tuple[float, float], direction: Direction
    ) -> Answer:
        told = {"direction": direction, "interval": interval, "confidence": CONFIDENCE}
        return self._told(epsilon, delta, self._draw_method, **told)


@final
class CorrelatedCalibration(_CorrelatedKeys, Calibration):
    """Finds the least noise of T correlated releases; keys: as `CorrelatedCurve`, but its noise."""

    def calibrate(self, epsilon: float, delta: float) -> Answer:
        """Finds the least noise multiplier: the standard deviation of z_t over the clipping norm.

        The answer has it as `noise_multiplier` and as `sigma`. Where draws are needed, the upper
        end of δ's interval, of draws that the search has not seen, is at most `delta`. Errors are
        as of `CorrelatedCurve.epsilon`, and a FedsimError if no noise is found.
        """
        if self.variant == "paper":
            noise = baselines.kan_noise(epsilon, delta, **self._shape)
            return self._answer(epsilon, delta, noise, baselines.KAN_METHOD, sigma=noise)
        if exact := self._exact():
            noise = _least_noise(lambda at: exact(at, epsilon)[0] <= math.log(delta))
            return self._answer(epsilon, delta, noise, exact(noise, epsilon)[1], sigma=noise)
        return self._estimate(epsilon, delta)

    def _estimate(self, epsilon: float, delta: float) -> Answer:
        # Few draws find the place; all of them, with other seeds, confirm it.
        few, target = max(1000, self._draws // 8), math.log(delta)

        def excess(log_noise: float) -> float:
            found = self._pair(math.exp(log_noise), few, self.seed).estimate(epsilon)
            return math.log(max(found, 1e-300) / delta)

        # Enough noise, whoever knows the batches.
        enough = _least_noise(lambda at: self._log_delta_revealed(at, epsilon) <= target, 8)
        slope, noise = _search_noise(excess, enough)
        for attempt in range(1, _ATTEMPTS):
            curve = self._pair(noise, self._draws, self.seed + attempt)
            high, direction = curve.upper(epsilon)
            if high <= delta:
                told = {"direction": direction, "sigma": noise}
                return self._answer(epsilon, delta, noise, self._draw_method, **told)
            # As much more as the search has seen to be enough, and a little for the next draws.
            noise *= min(2.0, 1.002 * (high / delta) ** (1 / slope))
        raise FedsimError("correlated_gaussian: the estimates do not settle: raise draws")


def _holds_or_unseen(delta: Callable[[], float], target: float) -> bool:
    """Whether δ is below the target; where hardly a draw is left in the tail, it is taken to be."""
    try:
        return delta() <= target
    except TooFewDraws:
        return True


def _upper_end(curve: PairCurve, delta: float) -> float:
    """Finds the least ε at which the upper end of δ's interval is at most `delta`."""
    return _least(lambda eps: _holds_or_unseen(lambda: curve.upper(eps)[0], delta))


def _least(holds: Callable[[float], bool]) -> float:
    """Finds the least x >= 0 from which on `holds` is true, to a relative 1e-10."""
    return least(holds, most=_LARGEST, tolerance=1e-10)


def _search_noise(excess: Callable[[float], float], enough: float) -> tuple[float, float]:
    """Returns (how fast log δ falls with log noise, about the noise at which the excess is 0)."""
    # Regula falsi down from what is enough.
    high = math.log(enough)
    low, at_high = high - math.log(2), excess(high)
    at_low, spent = excess(low), 2
    while at_low <= 0 and spent < _SEARCH:
        high, at_high, low = low, at_low, low - math.log(2)
        at_low, spent = excess(low), spent + 1
    while spent < _SEARCH and high - low > 0.01 and at_low > 0 > at_high:
        share = at_low / (at_low - at_high)
        # Kept off the ends, where a noisy estimate could leave the bracket as it is.
        middle = low + (high - low) * min(max(share, 0.1), 0.9)
        found, spent = excess(middle), spent + 1
        if found > 0:
            low, at_low = middle, found
        else:
            high, at_high = middle, found
    # Estimates of few draws are noisy: their slope divides later, and is kept away from 0.
    return min(max((at_low - at_high) / (high - low), 0.5), 1e3), math.exp(high)


def _least_noise(holds: Callable[[float], bool], rounds: int = 40) -> float:
    """Finds the least noise that is enough, to 2^-`rounds` of its logarithm's bracket."""
    high = 1.0
    while not holds(high):
        high *= 2
        if high > _LARGEST:
            raise FedsimError("correlated_gaussian: no noise reaches this ε and δ: raise them")
    low = high / 2
    while holds(low):
        low, high = low / 2, low
    for _ in range(rounds):
        # Halves the bracket of the logarithm.
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


class _CorrelatedExperiment(_Steps, Experiment):
    """Steps that release g_t + z_t - λ z_(t-1), of one example whose gradient has norm 1.

    Its gradient is +1 in every step whose batch it is in, and 0 under the neighbour (`zero_out`).
    All other examples' gradients are 0, but in batches of a fixed size they are -1: there a batch's
    sum tells whether the example has taken another's place, whatever its own gradient.
    """

    claims = CorrelatedCurve
    noise_multiplier: PositiveSize
    """Standard deviation of z_t over the clipping norm."""

    @model_validator(mode="after")
    def _few_patterns(self) -> Self:
        if self.sampling in ("poisson", "fixed_size") and 2**self.steps > _PATTERNS:
            raise ValueError(
                f"sampling {self.sampling} is audited over at most "
                f"{number_of(int(math.log2(_PATTERNS)), 'step')}: the score sums over all "
                "patterns of participation"
            )
        if self.patterns * self.steps > _HELD:
            raise ValueError(
                f"steps: {self.steps} of {self.patterns} patterns of participation are too many to "
                "audit; use fewer, or a larger sampling_rate"
            )
        return self

    @property
    def patterns(self) -> int:
        """Number of patterns in which the example can take part in the steps."""
        if self.sampling in ("full", "single_epoch"):
            return 1
        if self.sampling == "balls_in_bins":
            return round(1 / self.sampling_rate)
        return int(2**self.steps)

    def work(self) -> int:
        return 4 * self.steps + self.patterns  # a step is whitened with a stride

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        sigma = self.sabotage * self.noise_multiplier
        masks, chances = self._participations()
        # relative to batches without the example, where that is public
        reach = (1.0, 2.0) if self.sampling == "fixed_size" else (0.0, 1.0)
        whitened = [factor * accumulate(masks, self.correlation) for factor in reach]
        chunk = max(1, min(_CHUNK // len(masks), _HELD // self.steps))
        found = []
        for start in range(0, draws, chunk):
            count = min(chunk, draws - start)
            gradients = reach[present] * masks[rng.choice(len(masks), count, p=chances)]
            noise = sigma * rng.standard_normal((count, self.steps))
            # The copy is z itself: in place, each step would be
            # taken off what is correlated already.
            noise[:, 1:] -= self.correlation * noise[:, :-1].copy()
            seen = accumulate(gradients + noise, self.correlation)  # C makes the noise white
            likely = [_log_density(seen, means, chances, sigma) for means in whitened]
            found.append(likely[1] - likely[0])
        return np.concatenate(found)

    def _participations(self) -> tuple[Array, Array]:
        """Returns the patterns of participation: (M, T) zeros and ones, and (M,) probabilities."""
        if self.sampling == "full":
            return np.ones((1, self.steps)), np.ones(1)
        if self.sampling == "single_epoch":  # the first batch: its noise is seen the longest
            return np.eye(1, self.steps), np.ones(1)
        if self.sampling == "balls_in_bins":
            bins = self.patterns
            turns = np.arange(self.steps) % bins
            masks = (turns == np.arange(bins)[:, None]).astype(float)
            return masks, np.full(bins, 1 / bins)
        masks = np.array(list(itertools.product((0.0, 1.0), repeat=self.steps)))
        rates = np.where(masks == 1, self.sampling_rate, 1 - self.sampling_rate)
        return masks, rates.prod(1)


def _log_density(seen: Array, means: Array, chances: Array, sigma: float) -> Array:
    """Returns (draws,) log Σ_m p_m N(seen; m, σ²), less a term that is free of the means."""
    # The probabilities sum to 1, and a density of mean 0 is the unit that others are stated in.
    if not means.any():
        return np.zeros(len(seen))
    exponents = (seen @ means.T - (means**2).sum(1) / 2) / sigma**2
    most = exponents.max(1)
    exponents -= most[:, None]
    found: Array = most + np.log(np.exp(exponents, out=exponents) @ chances)
    return found


class KnownCorrelatedGaussian(KnownMechanism):
    """Releases T steps with Gaussian noise that is correlated between them (DP-CGD)."""

    curve = CorrelatedCurve
    calibration = CorrelatedCalibration
    experiment = _CorrelatedExperiment


class _PoissonGaussianExperiment(Experiment):
    """Steps of DP-SGD on Poisson samples, of one example whose gradient has norm 1."""

    steps: Annotated[int, Field(ge=1, le=10_000)]
    sampling_rate: Annotated[float, Field(gt=0, le=1)]
    noise_multiplier: Annotated[float, Field(ge=0.1, le=1e12)]
    """Standard deviation of a step's noise over the bound of one row's contribution."""

    def curve(self) -> Curve:
        return CorrelatedCurve(
            steps=self.steps,
            sampling_rate=self.sampling_rate,
            sampling="poisson",
            noise_multiplier=self.noise_multiplier,
        )

    def work(self) -> int:
        return self.steps

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        sigma = self.sabotage * self.noise_multiplier
        total = np.zeros(draws)
        for _ in range(self.steps):
            seen = sigma * rng.standard_normal(draws)
            if present:
                seen += rng.random(draws) < self.sampling_rate
            # log(1 - q + q exp((x - 1/2) / σ²)), in the form that keeps its digits for small q.
            total += np.log1p(self.sampling_rate * np.expm1((seen - 0.5) / sigma**2))
        return total


class KnownPoissonGaussian(KnownMechanism):
    """Takes DP-SGD's steps on Poisson samples: a row is in each by chance, `sampling_rate`."""

    experiment = _PoissonGaussianExperiment
