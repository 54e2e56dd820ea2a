"""What a metric says when it cannot give a number."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.types import FedsimError


class ScoringError(FedsimError):
    """A reconstruction cannot be scored: the trial failed, and its row carries this reason."""


@dataclass(frozen=True)
class Unavailable:
    """A metric that has no value here, and why."""

    reason: str
