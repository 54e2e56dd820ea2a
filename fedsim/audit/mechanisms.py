"""A mechanism's claim beside what an attacker can show of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.audit.bounds import LowerBound, error_probability, one_run_bound, two_world_bounds
from fedsim.privacy import calculator
from fedsim.privacy.contract import Experiment
from fedsim.types import AuditMethod, FedsimError

DRAWS: dict[AuditMethod, int] = {"two_worlds": 1_000_000, "one_run": 10_000}
"""Default number of draws by method: of each world, or canaries of one run. In one run, more than
about 0.1 / δ canaries would show less."""

_MOST_DRAWS = 100_000_000
_MOST_WORK = 2_000_000_000
"""Numbers that are drawn or gone through in one world: minutes."""


@dataclass(frozen=True, kw_only=True)
class MechanismVerdict:
    """States a mechanism's claim, and a lower bound of ε from releases under two neighbours."""

    claim: float
    """ε at δ; infinite if nothing is claimed."""
    lower_bound: float
    """The largest ε among `bounds`; all of them hold at once with `confidence`."""
    bounds: Mapping[str, float]
    """ε by `LowerBound.method`: `threshold`, and `gaussian_dp` for a Gaussian trade-off curve; or
    `one_run`."""
    delta: float
    confidence: float
    draws: int
    """Draws of each of the two worlds; in one run, canaries of both together."""
    seed: int
    unit: str
    """The protected unit: a row, an example or a client."""
    neighbours: str
    """The difference between the two worlds, in words."""

    @property
    def holds(self) -> bool:
        """Whether the claim is not refuted; that is no proof of the claim."""
        return self.lower_bound <= self.claim

    @property
    def text(self) -> str:
        """The verdict in words: `holds`, or a text that begins with `REFUTED`."""
        return "holds" if self.holds else "REFUTED: the mechanism leaks more than it claims"


def audit(
    mechanism: str,
    keys: Mapping[str, Any],
    *,
    delta: float,
    draws: int | None = None,
    confidence: float = 0.99,
    seed: int = 0,
    method: AuditMethod = "two_worlds",
) -> MechanismVerdict:
    """Tries the ε that `mechanism` claims at δ against what an attacker can show of its releases.

    Args:
        mechanism: name of a mechanism of the privacy calculator that has an experiment.
        keys: values of its experiment's keys; `sabotage` multiplies the noise, unknown to the
            claim.
        delta: in (0, 1).
        draws: releases of each world, or canaries of `one_run`; None: those of `DRAWS`.
        confidence: probability with which a true claim is not refuted.
        seed: seed of all draws.
        method: `two_worlds`, or `one_run` of the mechanism on as many independent rows as draws.

    Raises:
        FedsimError: the mechanism or a key is unknown, a value is missing or out of its range,
            there are too few draws (below 100 of each world) or too many, or a figure is NaN.
        ValidationError: keys contradict each other in the curve that the experiment claims.
    """
    experiment = calculator.make(mechanism, "experiment", keys)
    assert isinstance(experiment, Experiment)
    # Refused before anything is drawn.
    calculator.probability(delta)
    error_probability(delta, confidence)
    if draws is None:
        draws = DRAWS[method]
    if draws < 1:
        raise FedsimError(f"draws: {draws} is too few; use {DRAWS[method]} for a useful bound")
    most = min(_MOST_DRAWS, _MOST_WORK // experiment.work())
    if draws > most:
        raise FedsimError(f"draws: {draws} is too many to draw; use at most {most}")
    claimed = experiment.curve()
    bound = _one_run if method == "one_run" else _two_worlds
    with calculator.numerics_errors():
        found = bound(experiment, delta, draws, confidence, seed)
        verdict = MechanismVerdict(
            claim=experiment.claim(delta),
            lower_bound=max(0.0, *(one.epsilon for one in found)),
            bounds={one.method: one.epsilon for one in found},
            delta=delta,
            confidence=confidence,
            draws=draws,
            seed=seed,
            unit=claimed.unit,
            neighbours=claimed.neighbours(),
        )
    return calculator.require_finite(verdict)


def _two_worlds(
    experiment: Experiment, delta: float, draws: int, confidence: float, seed: int
) -> list[LowerBound]:
    absent, present = (
        experiment.scores(world, draws, _stream(seed, int(world))) for world in (False, True)
    )
    gaussian = experiment.gaussian_dp
    return two_world_bounds(absent, present, delta=delta, confidence=confidence, gaussian=gaussian)


def _one_run(
    experiment: Experiment, delta: float, draws: int, confidence: float, seed: int
) -> list[LowerBound]:
    included = _stream(seed, "coins").random(draws) < 0.5
    scores = np.empty(draws)
    for world in (False, True):
        chosen = included == world
        # Every row is released by a draw of its own: the canaries are independent.
        scores[chosen] = experiment.scores(world, int(chosen.sum()), _stream(seed, int(world)))
    return [one_run_bound(scores, included, delta=delta, confidence=confidence)]


def _stream(seed: int, *path: str | int) -> np.random.Generator:
    from fedsim import rng

    return np.random.default_rng(rng.derive(seed, "audit", *path))
