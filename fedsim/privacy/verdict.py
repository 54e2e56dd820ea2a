"""A mechanism's claim beside what an attacker can show of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsim.privacy.audit import error_probability, gaussian_bound, threshold_bound
from fedsim.privacy.contract import Experiment
from fedsim.types import FedsimError


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was claimed, and what releases drawn under two neighbours say to it."""

    claim: float
    """ε at δ; infinite if nothing is claimed."""
    lower_bound: float
    """The best of the bounds below; both hold at once with `confidence`."""
    bounds: Mapping[str, float]
    """ε by method: `threshold`, and `gaussian_dp` where the trade-off curve is a Gaussian one."""
    delta: float
    confidence: float
    draws: int
    """Of each of the two worlds."""
    seed: int

    @property
    def holds(self) -> bool:
        """Whether the claim survived; that is no proof of it."""
        return self.lower_bound <= self.claim

    @property
    def text(self) -> str:
        """The verdict in words."""
        return "holds" if self.holds else "REFUTED: the mechanism leaks more than it claims"


def try_claim(
    experiment: Experiment,
    *,
    delta: float,
    draws: int = 1_000_000,
    confidence: float = 0.99,
    seed: int = 0,
) -> Verdict:
    """Draw releases of `experiment` under either neighbour and bound its ε from below.

    Args:
        experiment: the mechanism.
        delta: in (0, 1), at which ε is claimed.
        draws: releases of each world.
        confidence: in (0, 1), that a true claim is not refuted.
        seed: of the draws; the same seed, the same verdict.

    Raises:
        FedsimError: an argument is out of its range, or too few draws.
    """
    from fedsim import rng

    error = error_probability(delta, confidence)
    if draws < 1:
        raise FedsimError(f"draws: {draws} is too few; use 1000000 for a bound close to the truth")
    worlds = [
        experiment.scores(
            present, draws, np.random.default_rng(rng.derive(seed, "audit", int(present)))
        )
        for present in (False, True)
    ]
    methods = [threshold_bound, gaussian_bound] if experiment.gaussian_dp else [threshold_bound]
    found = [
        bound(worlds[0], worlds[1], delta=delta, confidence=1 - error / len(methods))
        for bound in methods
    ]
    return Verdict(
        claim=experiment.claim(delta),
        lower_bound=max(0.0, *(bound.epsilon for bound in found)),
        bounds={bound.method: bound.epsilon for bound in found},
        delta=delta,
        confidence=confidence,
        draws=draws,
        seed=seed,
    )
