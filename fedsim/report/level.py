"""Judges how badly a defense leaks, by intervals that allow for the choice of the best attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from fedsim.report.control import REQUIRED_SPAN
from fedsim.report.row import (
    EXPOSED_GAIN,
    RECOGNIZABLE_PSNR,
    RECOGNIZABLE_SSIM,
    REQUIRED_GAIN,
    LeaderboardRow,
)
from fedsim.scoring import LEAST, Summary

Level = Literal[
    "leak", "partial", "features", "labels", "membership", "unseen", "unknown", "failed", "invalid"
]

_LABEL_GAIN = 0.1
"""Labels leak from this share above guessing, and above what another update gives."""

_MEMBERSHIP_GAIN = 0.05
"""Membership leaks from this area under the curve above a coin's and above another update's."""


_Measure = Callable[[LeaderboardRow], Summary | None]


def compared(rows: Sequence[LeaderboardRow], measure: _Measure) -> int:
    """Returns the number of attacks among which the best by `measure` is chosen; at least 1."""
    return max(1, sum(row.n_ok > 0 and measure(row) is not None for row in rows))


def best_of_several(
    row: LeaderboardRow, rows: Sequence[LeaderboardRow], measure: _Measure
) -> Summary | None:
    """Returns `measure` of `row`, with an interval that allows for its choice among `rows`."""
    summary = measure(row)
    return summary and summary.best_of(compared(rows, measure))


def level_of(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> Level:
    """Judges `row` by the lower end of its interval.

    A gain that prior knowledge alone explains is no leak. `rows` are all that `row` was chosen
    among.
    """
    if row.n_ok == 0:
        return "failed"
    gain = best_of_several(row, rows, lambda r: r.gain)
    if gain is None:
        span = best_of_several(row, rows, lambda r: r.metrics["subspace_error"])
        if span is None:
            return "unknown"
        upper = span.mean if span.high is None else span.high
        over = best_of_several(row, rows, lambda r: r.span_over_other)
        blind = over is not None and over.certain <= 0
        return "features" if upper <= REQUIRED_SPAN * row.guessed_span and not blind else "unseen"
    if row.own_gain is not None and row.own_gain.min >= EXPOSED_GAIN:
        return "leak"  # in every trial
    over = best_of_several(row, rows, lambda r: r.over_other)
    certain = gain.certain if over is None else min(gain.certain, over.certain)
    # Of too few trials for an interval, half of all attacks that see nothing gain something, and
    # nothing allows for the choice of the best.
    several = gain.n >= LEAST
    if certain >= REQUIRED_GAIN and (several or gain.compared == 1):
        return "leak"
    return "partial" if (certain > 0 and several) or row.exposed else "unseen"


def shows_pictures(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether `row` leaks recognizable pictures, on average or in one of its trials.

    A trial that no attack gains by chance shows what the attack can do, whatever the mean.
    """
    return row.exposed or _is_recognizable(row, rows)


def _is_recognizable(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether a leak is recognizable, on average or in one of its trials."""
    level = level_of(row, rows)
    return _is_alike(row) if level == "leak" else level == "partial" and row.recognizable > 0


def _is_alike(row: LeaderboardRow) -> bool:
    return row.recognizable > 0 or is_alike_on_average(row)


def is_alike_on_average(row: LeaderboardRow) -> bool:
    """Whether the mean likeness is that of recognizable pictures; of rows there is no SSIM."""
    likeness, pixels = row.metrics["ssim"], row.metrics["psnr"]
    if likeness is not None:
        return likeness.mean >= RECOGNIZABLE_SSIM
    return pixels is not None and pixels.mean >= RECOGNIZABLE_PSNR


def leaks_labels(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether labels were inferred from the update, and not from knowledge or guessing.

    An attack that answers the same whatever the update is right as often for another. It may beat
    the guess where a client's classes differ from those of the public images.
    """
    gain = best_of_several(row, rows, lambda r: r.label_gain)
    # Labels that the attacker was given are no leak.
    if (
        row.knowledge.labels == "known"
        or gain is None
        or gain.n < LEAST
        or labels_fit_any_update(row)
    ):
        return False
    return gain.certain >= _LABEL_GAIN


def labels_fit_any_update(row: LeaderboardRow) -> bool:
    """Whether the attack infers labels no better from its own update than from another."""
    return row.label_over_other is None or row.label_over_other.mean < _LABEL_GAIN


def may_leak_labels(row: LeaderboardRow) -> bool:
    """Whether labels were inferred better than by guessing, on average, for all that is known."""
    gain, over = row.label_gain, row.label_over_other
    if row.knowledge.labels == "known" or row.n_ok == 0 or gain is None:
        return False
    return gain.mean >= _LABEL_GAIN and (over is None or over.mean >= _LABEL_GAIN)


def may_tell_members(row: LeaderboardRow) -> bool:
    """Whether members were told from others better than by a coin, on average."""
    gain = row.membership_gain
    return gain is not None and gain.mean >= _MEMBERSHIP_GAIN and not members_fit_any_release(row)


def tells_members(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether an attack tells members from others, and better than it does for another release."""
    gain = best_of_several(row, rows, lambda r: r.membership_gain)
    return (
        gain is not None and gain.certain >= _MEMBERSHIP_GAIN and not members_fit_any_release(row)
    )


def members_fit_any_release(row: LeaderboardRow) -> bool:
    """Whether the attack tells members of its own release no better than of another's."""
    over = row.membership_over_other
    return over is not None and over.mean < _MEMBERSHIP_GAIN
