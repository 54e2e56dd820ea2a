"""Judges how badly a defense leaks, by intervals that allow for the choice of the best attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from fedsim.report.control import REQUIRED_SPAN
from fedsim.report.row import (
    EXPOSED_GAIN,
    LIKENESS_GAIN,
    RECOGNIZABLE_LPIPS,
    RECOGNIZABLE_PSNR,
    RECOGNIZABLE_SSIM,
    REQUIRED_GAIN,
    LeaderboardRow,
)
from fedsim.scoring import LEAST, Summary

Level = Literal[
    "leak",
    "partial",
    "features",
    "labels",
    "membership",
    "undecided",
    "unseen",
    "unknown",
    "failed",
    "invalid",
]
"""How badly a defense leaks. `undecided`: an attack gains something, and no control tells whether
it read that off the update or knew it."""

_COSINE = 0.999
"""Guessed features of this mean cosine are as good as certified ones, which then say nothing."""

_FALSE = 0.05
"""A certificate says nothing if more than this share of them is false: luck makes some right."""

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
    """Judges `row` by the lower end of its interval, each target by itself.

    A gain that prior knowledge alone explains is no leak. `rows` are all that `row` was chosen
    among. Labels and membership have judgements of their own.
    """
    if row.n_ok == 0:
        return "failed"
    pictures = _level_of_pictures(row, rows)
    if pictures in ("leak", "partial"):
        return pictures
    if leaks_features(row, rows):
        return "features"
    if pictures is None and row.metrics["subspace_error"] is None:
        return "unknown"
    return pictures or "unseen"


def _level_of_pictures(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> Level | None:
    """Judges images, or rows of a table; None if the attack answers none."""
    if row.gain is None:
        return None
    if row.ignores_update:
        return "unseen"
    level = _by_gains(row, rows, controlled=row.no_control is None)
    if row.is_decided:
        return level
    whole = _by_gains(row, rows, controlled=False)
    if level != "unseen" and row.no_control is None:
        # Better even than another batch of the same client, which makes no leak a lesser one.
        return "leak" if "leak" in (level, whole) else level
    # Nothing tells what the attack read from what it knew.
    return "unseen" if whole == "unseen" else "undecided"


def _by_gains(
    row: LeaderboardRow, rows: Sequence[LeaderboardRow], *, controlled: bool
) -> Literal["leak", "partial", "unseen"]:
    """Judges what was gained over the guess and, if `controlled`, over another update."""
    gain = best_of_several(row, rows, lambda r: r.gain)
    assert gain is not None
    own = row.own_gain if controlled else row.gain
    if own is not None and own.min >= EXPOSED_GAIN:
        return "leak"  # in every trial
    if any(_is_alike_for_certain(row, rows, name, controlled) for name in row.likeness):
        return "leak"
    over = best_of_several(row, rows, lambda r: r.over_other) if controlled else None
    certain = gain.certain if over is None else min(gain.certain, over.certain)
    # Of too few trials for an interval, half of all attacks that see nothing gain something, and
    # nothing allows for the choice of the best.
    several = min(gain.n, gain.n if over is None else over.n) >= LEAST
    if certain >= REQUIRED_GAIN and (several or gain.compared == 1):
        return "leak"
    return "partial" if (certain > 0 and several) or row.exposed else "unseen"


def _is_alike_for_certain(
    row: LeaderboardRow, rows: Sequence[LeaderboardRow], name: str, controlled: bool
) -> bool:
    """Whether pictures leak by metric `name` of their likeness, whatever their pixels."""

    def measure(each: LeaderboardRow) -> Summary | None:
        likeness = each.likeness.get(name)
        if likeness is None:
            return None
        return likeness.own if controlled else likeness.over_guess

    gain = best_of_several(row, rows, measure)
    certain = gain is not None and gain.n >= LEAST and gain.certain >= LIKENESS_GAIN
    return certain and _is_alike_by(row, name)


def _is_alike_by(row: LeaderboardRow, name: str) -> bool:
    mean = row.metrics[name]
    if mean is None:
        return False
    return mean.mean <= RECOGNIZABLE_LPIPS if name == "lpips" else mean.mean >= RECOGNIZABLE_SSIM


def leaks_features(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether features were read off the update, or are known to be right by a certificate."""
    if row.n_ok == 0 or row.ignores_update or row.knowledge.features == "known":
        return False
    if _is_certified(row) and row.metrics["feature_cosine"] is not None:
        return True
    span = best_of_several(row, rows, lambda r: r.metrics["subspace_error"])
    if span is None:
        return False
    upper = span.mean if span.high is None else span.high
    over = best_of_several(row, rows, lambda r: r.span_over_other)
    blind = over is not None and over.certain <= 0 and row.control != "batch"
    return upper <= REQUIRED_SPAN * row.guessed_span and not blind


def _is_certified(row: LeaderboardRow) -> bool:
    """Whether an attacker knows of an answer that it is right, and it is, where guesses are not."""
    stated = row.certificates
    if stated is None or not stated.certified or stated.false is None:
        return False
    guessed = row.baseline["feature_cosine"]
    holds = stated.false <= _FALSE * stated.certified
    return holds and (guessed is None or guessed < _COSINE)


def may_show(row: LeaderboardRow) -> bool:
    """Whether a single trial or image is better than chance explains, though nothing is certain."""
    return row.may_expose and not row.ignores_update


def may_know(row: LeaderboardRow) -> bool:
    """Whether an attacker certifies what nobody has compared with the truth."""
    stated = row.certificates
    return stated is not None and bool(stated.certified) and stated.false is None


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
    structure, pixels = row.metrics["ssim"], row.metrics["psnr"]
    if any(_is_alike_by(row, name) for name in row.likeness):
        return True
    if structure is not None:
        return structure.mean >= RECOGNIZABLE_SSIM
    return pixels is not None and pixels.mean >= RECOGNIZABLE_PSNR


def leaks_labels(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether labels were inferred from the update, and not from knowledge or guessing.

    An attack that answers the same whatever the update is right as often for another. It may beat
    the guess where a client's classes differ from those of the public images.
    """
    gain = best_of_several(row, rows, lambda r: r.label_gain)
    # Labels that the attacker was given are no leak.
    if row.knowledge.labels == "known" or row.ignores_update or gain is None:
        return False
    if _is_certified(row) and gain.mean >= _LABEL_GAIN:
        return True
    if gain.n < LEAST or labels_fit_any_update(row):
        return False
    return gain.certain >= _LABEL_GAIN


def labels_fit_any_update(row: LeaderboardRow) -> bool:
    """Whether the attack infers labels no better from its own update than from another."""
    return row.label_over_other is None or row.label_over_other.mean < _LABEL_GAIN


def may_leak_labels(row: LeaderboardRow) -> bool:
    """Whether labels were inferred better than by guessing, on average, for all that is known."""
    gain, over = row.label_gain, row.label_over_other
    if row.knowledge.labels == "known" or row.ignores_update or row.n_ok == 0 or gain is None:
        return False
    same = over is not None and over.mean < _LABEL_GAIN
    # Another batch of the same client may have the same labels.
    return gain.mean >= _LABEL_GAIN and (not same or row.control == "batch")


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
