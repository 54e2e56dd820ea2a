"""Releases of T steps with correlated noise, drawn under either neighbour, for every sampling."""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedsim.privacy.contract import Keys, Size
from fedsim.privacy.numerics.special import Array
from fedsim.words import number_of

_PATTERNS = 1024
"""Participation patterns that a likelihood ratio sums over, at most."""
_CHUNK = 1 << 20
"""Entries of an array of (draws, patterns)."""
_HELD = 1 << 27
"""Entries of an array of (draws, steps) or (patterns, steps), at most."""


class Releases(Keys):
    """Steps that release g_t + z_t - λ z_(t-1), of one example whose gradient has norm 1.

    Its gradient is +1 in every step whose batch it is in, and 0 under the neighbour (`zero_out`).
    All other examples' gradients are 0, but in batches of a fixed size they are -1: there a batch's
    sum tells whether the example has taken another's place, whatever its own gradient.
    """

    steps: Annotated[int, Field(ge=1, le=100_000)]
    sampling_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    correlation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    noise_multiplier: Size
    """Standard deviation of z_t over the clipping norm."""
    sampling: Literal["full", "single_epoch", "poisson", "balls_in_bins", "fixed_size"]
    variant: Literal["exact", "paper"] = "exact"
    """Whose claim is tried."""

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
        """Patterns of participation."""
        if self.sampling in ("full", "single_epoch"):
            return 1
        if self.sampling == "balls_in_bins":
            return round(1 / self.sampling_rate)
        return int(2**self.steps)

    def log_ratios(
        self, sigma: float, present: bool, draws: int, rng: np.random.Generator
    ) -> Array:
        """(draws,) log likelihood ratios of whole sequences of releases, noise being `sigma`."""
        masks, chances = self._participations()
        # relative to batches without the example, where that is public
        reach = (1.0, 2.0) if self.sampling == "fixed_size" else (0.0, 1.0)
        whitened = [factor * self._summed(masks) for factor in reach]
        chunk = max(1, min(_CHUNK // len(masks), _HELD // self.steps))
        found = []
        for start in range(0, draws, chunk):
            count = min(chunk, draws - start)
            gradients = reach[present] * masks[rng.choice(len(masks), count, p=chances)]
            noise = sigma * rng.standard_normal((count, self.steps))
            noise[:, 1:] -= self.correlation * noise[:, :-1].copy()
            seen = self._summed(gradients + noise)
            likely = [_log_density(seen, means, chances, sigma) for means in whitened]
            found.append(likely[1] - likely[0])
        return np.concatenate(found)

    def _participations(self) -> tuple[Array, Array]:
        """((M, T) zeros and ones, (M,) probabilities)."""
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

    def _summed(self, released: Array) -> Array:
        """C times each row: y_t = λ y_(t-1) + x_t, which makes the noise white again."""
        found = released.copy()
        for step in range(1, self.steps):
            found[:, step] += self.correlation * found[:, step - 1]
        return found


def _log_density(seen: Array, means: Array, chances: Array, sigma: float) -> Array:
    """(draws,) log Σ_m p_m N(seen; m, σ²), up to what does not depend on the means."""
    if not means.any():
        return np.zeros(len(seen))
    exponents = (seen @ means.T - (means**2).sum(1) / 2) / sigma**2
    most = exponents.max(1)
    exponents -= most[:, None]
    found: Array = most + np.log(np.exp(exponents, out=exponents) @ chances)
    return found
