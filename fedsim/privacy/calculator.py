"""The mechanisms that the privacy calculator knows, by name, and where each part of theirs is.

Nothing is imported before it is asked for. `least_squares` has a curve at given leverages, which no
noise belongs to; what is None cannot be asked.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Known:
    """Where the parts of a mechanism are: `module:Class`, or None."""

    curve: str | None = None
    calibration: str | None = None
    experiment: str | None = None


MECHANISMS: dict[str, Known] = {
    "correlated_gaussian": Known(
        curve="fedsim.privacy.correlated_gaussian:CorrelatedCurve",
        calibration="fedsim.privacy.correlated_gaussian:CorrelatedCalibration",
    ),
}
