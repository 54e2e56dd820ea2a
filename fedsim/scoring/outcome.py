"""Defines what a metric returns instead of a number."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.types import FedsimError


class ScoringError(FedsimError):
    """A reconstruction cannot be scored: the trial fails, and its row states this reason."""


@dataclass(frozen=True)
class Unavailable:
    """States why a metric has no value here."""

    reason: str
