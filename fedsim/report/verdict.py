"""Judges each defense of the leaderboard: what leaks, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.report.control import Control
from fedsim.report.level import (
    Level,
    best_of_several,
    compared,
    leaks_labels,
    level_of,
    shows_pictures,
    tells_members,
)
from fedsim.report.row import LeaderboardRow
from fedsim.report.sentences import (
    cautions,
    certificate_sentence,
    label_sentence,
    main_sentence,
    membership_sentence,
    recognizable_times,
    success_sentence,
)
from fedsim.scoring import Share, Summary
from fedsim.words import in_trials

HEADLINES: dict[Level, str] = {
    "leak": "{Subject} leak",
    "partial": "Some leakage",
    "features": "Features leak",
    "labels": "Labels leak",
    "membership": "Membership leaks",
    "undecided": "Not told from a guess",
    "unseen": "No gain measured",
    "unknown": "{Subject} not attacked",
    "failed": "Attacks failed",
    "invalid": "No conclusion",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Judges one defense by the attack that ranks first against it.

    The attack was chosen among several, so intervals are Bonferroni's for that number.
    """

    strongest: LeaderboardRow
    """The attack that ranks first; it may be `blind`, or have failed."""
    gain: Summary | None
    """The attack's gain over guessing in dB; of a blind attack, the part that is due to this
    update. None if only features or labels were attacked."""
    leaking: Share | None
    """Share of trials that gained `REQUIRED_GAIN` or more from this update."""
    recognizable: str
    """In how many trials pictures are recognizable, in words, where some leak that do not leak on
    average; else empty."""
    level: Level
    sentence: str
    labels: str | None
    """How many labels leak, in words; None if no attack inferred any."""
    membership: str | None
    """How well members are told from others, in words; None if no attack tried."""
    certificates: str | None
    """Of how many images an attacker knows that its answer is right, in words; None if no attack
    says."""
    cautions: list[str]

    @property
    def headline(self) -> str:
        """Names the level in two or three words."""
        if not self.strongest.ended:
            return "Not shown"
        if self.level in ("undecided", "unseen") and self.leaking and self.leaking.count:
            return f"Gain {in_trials(self.leaking.count, self.leaking.n)}"
        if self.recognizable:
            subject = "pictures" if self.strongest.subject == "images" else "rows"
            return f"Recognizable {subject} {self.recognizable}"
        return HEADLINES[self.level].format(Subject=self.strongest.subject.capitalize())


def verdicts(rows: Sequence[LeaderboardRow], control: Control) -> list[Verdict]:
    """Returns one verdict per defense among the rows of one comparison, in their order."""
    return [
        _verdict([row for row in rows if row.defense == name], control)
        for name in dict.fromkeys(row.defense for row in rows)
    ]


_LEAKS: tuple[Level, ...] = ("undecided", "features", "partial", "leak")


def _strongest(rows: Sequence[LeaderboardRow]) -> LeaderboardRow:
    """Returns the row that a defense is judged by.

    It is the first in rank, unless that one shows no leak and another does: a rare exact picture
    leaves a low mean, and features none. Where none leaks it is one that tried pictures or rows of
    a whole update or a sum, if there is any: neither labels nor a mask's noise stand for those.
    """
    first = max(rows, key=lambda row: row.standing)
    if level_of(first, rows) not in ("undecided", "unseen", "unknown"):
        return first
    levels = [(level_of(row, rows), row) for row in rows]
    leaks = [(_LEAKS.index(level), row) for level, row in levels if level in _LEAKS]
    if leaks:
        return max(leaks, key=lambda entry: (entry[0], entry[1].standing))[1]
    tried = [row for row in rows if row.n_ok and row.gain]
    whole = [row for row in tried if not row.masked]
    return max(whole or tried, key=lambda row: row.standing, default=first)


def _verdict(rows: Sequence[LeaderboardRow], control: Control) -> Verdict:
    strongest = _strongest(rows)
    # Undefended rows stand on their own: what leaks there leaks, whatever the control asks for.
    doubtful = control.status != "passed" and not strongest.undefended
    level = "invalid" if doubtful or not control.ended else level_of(strongest, rows)
    quiet = ("undecided", "unseen", "unknown")
    if level in quiet and any(leaks_labels(row, rows) for row in rows):
        level = "labels"
    if level in quiet and any(tells_members(row, rows) for row in rows):
        level = "membership"
    gain = best_of_several(strongest, rows, lambda r: r.own_gain if strongest.blind else r.gain)
    leakiest = max(
        (row for row in rows if row.leaking and not row.ignores_update),
        key=lambda row: row.leaking.count / row.leaking.n if row.leaking else 0.0,
        default=strongest,
    )
    attacks = compared(rows, lambda r: r.gain)
    leaking = leakiest.leaking and leakiest.leaking.best_of(attacks)
    shown = level == "partial" and any(shows_pictures(row, rows) for row in rows)
    return Verdict(
        strongest=strongest,
        gain=gain,
        leaking=leaking,
        recognizable=recognizable_times(rows) if shown else "",
        level=level,
        sentence=main_sentence(strongest, level, gain)
        + success_sentence(leakiest, leaking, level, attacks),
        labels=label_sentence(rows),
        membership=membership_sentence(rows),
        certificates=certificate_sentence(rows),
        cautions=cautions(rows, strongest),
    )
