"""Says what the attackers of one defense get, in words, and by which figures that is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from fedsim.report.figures import format_signed
from fedsim.report.level import (
    Level,
    is_alike_on_average,
    leaks_features,
    leaks_labels,
    level_of,
    may_know,
    may_leak_labels,
    may_show,
    may_tell_members,
    shows_pictures,
    tells_members,
)
from fedsim.report.row import REQUIRED_GAIN, LeaderboardRow
from fedsim.report.sentences import (
    certificate_sentence,
    label_sentence,
    membership_sentence,
    recognizable_times,
)
from fedsim.report.verdict import Verdict
from fedsim.words import in_trials, number_of

Finding = Literal[
    "recognizable",
    "colors only",
    "features",
    "labels",
    "membership",
    "some trials",
    "undecided",
    "nothing",
    "failed",
    "unknown",
    "no answer",
]
"""What an attacker gets: the worst that the attacks on a defense achieved. `some trials`: nothing
that is certain, but `REQUIRED_GAIN` or more in a few, or labels or members on average. `undecided`:
something that nothing tells from what the attack knew. `no answer`:
the rows are INVALID, or some of them are still to come."""

LEAKS: tuple[Finding, ...] = ("recognizable", "colors only", "features", "labels", "membership")

_GETS: Mapping[Finding, str] = {
    "recognizable": "recognizable {subject}",
    "colors only": "{coarse}",
    "features": "features of the {subject}",
    "labels": "labels",
    "membership": "who took part",
    "some trials": "something {times}, and nothing for certain",
    "undecided": "something that it may have known beforehand",
    "nothing": "nothing beyond the guess",
}

_OF_LEVEL: Mapping[Level, Finding] = {
    "leak": "colors only",
    "partial": "colors only",
    "features": "features",
    "labels": "labels",
    "membership": "membership",
    "undecided": "undecided",
    "unseen": "nothing",
    "unknown": "unknown",
    "failed": "failed",
    "invalid": "no answer",
}


def finding_of(verdict: Verdict, rows: Sequence[LeaderboardRow]) -> Finding:
    """Returns the worst that the attacks of `rows`, on one defense, achieved."""
    if any(shows_pictures(row, rows) for row in rows):
        return "recognizable"
    if verdict.level in ("unseen", "unknown") and _at_times(verdict, rows):
        return "some trials"
    return _OF_LEVEL[verdict.level]


def _at_times(verdict: Verdict, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether something leaked that no interval makes certain."""
    if verdict.leaking and verdict.leaking.count:
        return True
    return any(
        may_leak_labels(row) or may_tell_members(row) or may_know(row) or may_show(row)
        for row in rows
    )


def gets_of(verdict: Verdict, rows: Sequence[LeaderboardRow], finding: Finding) -> str:
    """Words what the attacker gets."""
    row = verdict.strongest
    if finding == "failed":
        runs = number_of(sum(line.n for line in rows), "attack run")
        return f"was not measured, for all of {runs} failed, which is no protection"
    if finding in ("unknown", "no answer"):
        return f"was not measured, for no attack on {row.subject} ran"
    subject = "pictures" if row.subject == "images" else "rows"
    coarse = "colors" if row.subject == "images" else "coarse values"
    gets = _GETS[finding].format(subject=subject, coarse=coarse, times=_times(verdict, rows))
    if _is_seldom(rows, finding):
        gets += f" {recognizable_times(rows)}"
    if finding == "nothing" and not _is_bounded(verdict):
        gets = "nothing certain beyond the guess"
    if finding in LEAKS:
        *others, last = [gets, *_besides(rows, finding)]
        gets = f"{', '.join(others)} and {last}" if others else last
        if finding == "colors only" and not others:
            gets += " only"
    return f"gets {gets}"


def _times(verdict: Verdict, rows: Sequence[LeaderboardRow]) -> str:
    """Words in how many trials something leaked that no interval makes certain."""
    leaking = verdict.leaking
    if leaking and leaking.count:
        return in_trials(leaking.count, leaking.n)
    return "at times" if any(map(may_show, rows)) else "on average"


def _is_bounded(verdict: Verdict) -> bool:
    """Whether the interval of the gain excludes a leak."""
    gain = verdict.gain
    return gain is not None and gain.high is not None and gain.high < REQUIRED_GAIN


def _is_seldom(rows: Sequence[LeaderboardRow], finding: Finding) -> bool:
    """Whether pictures are recognizable in some trials only, and not on average."""
    usual = (level_of(row, rows) == "leak" and is_alike_on_average(row) for row in rows)
    every = (row.own_gain and row.exposed and level_of(row, rows) == "leak" for row in rows)
    return finding == "recognizable" and not any(usual) and not any(every)


def _besides(rows: Sequence[LeaderboardRow], finding: Finding) -> list[str]:
    """Words what leaks for certain besides `finding`."""
    tests: dict[str, tuple[str, Callable[[LeaderboardRow, Sequence[LeaderboardRow]], bool]]] = {
        "features": ("features", leaks_features),
        "labels": ("labels", leaks_labels),
        "membership": ("who took part", tells_members),
    }
    return [
        words
        for kind, (words, leaks) in tests.items()
        if kind != finding and any(leaks(row, rows) for row in rows)
    ]


def evidence_of(verdict: Verdict, rows: Sequence[LeaderboardRow], finding: Finding) -> str:
    """Words the figures behind a finding: of pictures, or of what else leaks where they do not."""
    row = verdict.strongest
    if finding in ("failed", "unknown", "no answer"):
        return ""
    parts = [f"{_figure(verdict)} by {row.attack_on} at batch size {row.batch_size}", _n(row)]
    leaking = verdict.leaking
    if leaking and leaking.count and (finding == "some trials" or _is_seldom(rows, finding)):
        parts.append(
            f"{leaking.count} of {leaking.n} with {REQUIRED_GAIN:g} dB or more (interval of that "
            f"share {100 * leaking.low:.0f} to {leaking.high:.0%} {row.population})"
        )
    best = max((line.exposed_image or 0.0 for line in rows), default=0.0)
    if best and _is_seldom(rows, finding):
        parts.append(f"the best image at {best:.1f} dB PSNR")
    attempts = verdict.gain.compared if verdict.gain else 1
    if attempts > 1:
        attacks = number_of(len({r.attack for r in rows if r.n_ok and r.gain}), "attack")
        parts.append(f"the best of {attempts} attempts with {attacks}")
    if row.no_control:
        parts.append(row.no_control)
    return ", ".join([*_others(rows, finding), *(parts if verdict.gain or _span(row) else [])])


def _others(rows: Sequence[LeaderboardRow], finding: Finding) -> list[str]:
    """Words labels and members first, where they are what leaks, or may leak."""
    labels = [label_sentence(rows)] if any(map(may_leak_labels, rows)) else []
    members = [membership_sentence(rows)] if any(map(may_tell_members, rows)) else []
    chosen = {
        "features": [_features(rows), certificate_sentence(rows)],
        "labels": labels,
        "membership": members,
        "some trials": [*labels, *members],
    }
    return [text for text in chosen.get(finding, []) if text]


def _features(rows: Sequence[LeaderboardRow]) -> str:
    """Words the least span error of features beside pictures; empty where nothing else ran."""
    leaking = [row for row in rows if row.gain and row.metrics["subspace_error"]]
    leaking = [row for row in leaking if leaks_features(row, rows)]
    best = min(leaking, key=lambda row: -row.strength[1], default=None)
    return f"{_span(best)} by {best.attack_on}" if best else ""


def _n(row: LeaderboardRow) -> str:
    """Words the trials; those that share an image count once."""
    count = f"n = {number_of(row.n, 'trial')}"
    return count if row.independent == row.n else f"{count}, {row.independent} independent"


def _span(row: LeaderboardRow) -> str:
    """Words the span error of recovered features; empty if none were."""
    span = row.metrics["subspace_error"]
    if span is None:
        return ""
    text = f"span error {span.mean:.2f}"
    if span.low is None or span.high is None:
        return f"{text} (no interval)"
    ends = f"{max(0.0, span.low):.2f} to {span.high:.2f}"
    return f"{text}, {span.confidence:.0%} interval {ends} {row.population}"


def _figure(verdict: Verdict) -> str:
    """Words the gain with its interval, or the span error where there is no gain."""
    row, gain = verdict.strongest, verdict.gain
    if gain is None:
        return _span(row)
    what = f"over guessing and {row.other}" if row.blind else "over guessing"
    text = f"{format_signed(gain.mean)} dB {what}"
    if gain.low is None or gain.high is None:
        return f"{text} (no interval)"
    ends = f"{format_signed(gain.low)} to {format_signed(gain.high)} dB"
    return f"{text}, {gain.confidence:.0%} interval {ends} {row.population}"
