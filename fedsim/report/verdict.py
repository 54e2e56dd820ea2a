"""What the leaderboard says of each defense, in words, and how sure it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.report.control import REQUIRED_SPAN, Control
from fedsim.report.figures import (
    NO_DIFFERENTIAL_PRIVACY,
    format_bound,
    format_delta,
    format_epsilon,
    format_signed,
    format_summary,
)
from fedsim.report.leaderboard import EXPOSED_GAIN, REQUIRED_GAIN, LeaderboardRow
from fedsim.scoring import LEAST, Share, Summary
from fedsim.words import number_of

Level = Literal[
    "leak", "partial", "features", "labels", "membership", "unseen", "unknown", "failed", "invalid"
]

HEADLINES: dict[Level, str] = {
    "leak": "{Subject} leak",
    "partial": "Some leakage",
    "features": "Features leak",
    "labels": "Labels leak",
    "membership": "Membership leaks",
    "unseen": "No gain measured",
    "unknown": "{Subject} not attacked",
    "failed": "Attacks failed",
    "invalid": "No conclusion",
}


_WEAK_EPSILON = 10.0
"""From here on a finite ε is a guarantee by name only."""

_LABEL_GAIN = 0.1
"""Share of labels above guessing, and above another update's, from which on labels are said to
leak."""

_MEMBERSHIP_GAIN = 0.05
"""Area under the curve above a coin's, and above another update's, from which on membership is said
to leak."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One defense, judged by the attack that stands first against it.

    It was chosen among several, so intervals are Bonferroni's for so many.
    """

    strongest: LeaderboardRow
    """It is not called so where it is `blind`, or failed."""
    gain: Summary | None
    """Its gain over guessing, dB; of one that is blind what is due to this update. None of an
    attack on features or labels alone."""
    leaking: Share | None
    """In how many trials it gained `REQUIRED_GAIN` or more from this update."""
    level: Level
    sentence: str
    labels: str | None
    """What the labels leak; None if no attack inferred them."""
    membership: str | None
    """How well members are told from others; None if no attack tried."""
    accuracy: str
    privacy: str
    cautions: list[str]

    @property
    def headline(self) -> str:
        """The level in two or three words."""
        if self.level == "unseen" and self.leaking and self.leaking.count:
            return "Gain in some trials"
        return HEADLINES[self.level].format(Subject=self.strongest.subject.capitalize())


def verdicts(rows: Sequence[LeaderboardRow], control: Control) -> list[Verdict]:
    """One verdict per defense among the rows of one comparison, in their order."""
    undefended = next((row for row in rows if row.undefended), None)
    return [
        _verdict([row for row in rows if row.defense == name], control, undefended)
        for name in dict.fromkeys(row.defense for row in rows)
    ]


def _verdict(
    rows: Sequence[LeaderboardRow], control: Control, undefended: LeaderboardRow | None
) -> Verdict:
    strongest = max(rows, key=lambda row: row.standing)
    # A rare exact picture leaves a low mean, behind which it must not be forgotten.
    exposed = [row for row in rows if row.exposed]
    if exposed and _level(strongest, rows) == "unseen":
        strongest = max(exposed, key=lambda row: row.standing)
    # Undefended rows stand on their own: what leaks there leaks, whatever the control asks for.
    doubtful = control.status != "passed" and not strongest.undefended
    level = "invalid" if doubtful else _level(strongest, rows)
    if level in ("unseen", "unknown") and any(_leaks_labels(row, rows) for row in rows):
        level = "labels"
    if level in ("unseen", "unknown") and any(_tells_members(row, rows) for row in rows):
        level = "membership"
    gain = _chosen(strongest, rows, lambda r: r.own_gain if strongest.blind else r.gain)
    most = max(
        (row for row in rows if row.leaking),
        key=lambda row: row.leaking.count / row.leaking.n if row.leaking else 0.0,
        default=strongest,
    )
    leaking = most.leaking.best_of(_compared(rows, lambda r: r.gain)) if most.leaking else None
    return Verdict(
        strongest=strongest,
        gain=gain,
        leaking=leaking,
        level=level,
        sentence=_sentence(strongest, level, gain) + _rarely(most, leaking, level),
        labels=_labels(rows),
        membership=_membership(rows),
        accuracy=_accuracy(strongest, undefended),
        privacy=privacy_claim(strongest),
        cautions=_cautions(rows, strongest),
    )


_Measure = Callable[[LeaderboardRow], Summary | None]


def _compared(rows: Sequence[LeaderboardRow], measure: _Measure) -> int:
    """Of how many attacks the best by `measure` is chosen; at least 1."""
    return max(1, sum(row.n_ok > 0 and measure(row) is not None for row in rows))


def _chosen(
    row: LeaderboardRow, rows: Sequence[LeaderboardRow], measure: _Measure
) -> Summary | None:
    """`measure` of `row`, with an interval that allows for its choice among `rows`."""
    found = measure(row)
    return found and found.best_of(_compared(rows, measure))


def _level(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> Level:
    """By the lower end of the interval; a gain that the prior alone explains is no leak.

    `rows` are all that `row` was chosen among.
    """
    if row.n_ok == 0:
        return "failed"
    gain = _chosen(row, rows, lambda r: r.gain)
    if gain is None:
        span = _chosen(row, rows, lambda r: r.metrics["subspace_error"])
        if span is None:
            return "unknown"
        most = span.mean if span.high is None else span.high
        over = _chosen(row, rows, lambda r: r.span_over_other)
        blind = over is not None and over.certain <= 0
        return "features" if most <= REQUIRED_SPAN * row.guessed_span and not blind else "unseen"
    if row.own_gain is not None and row.own_gain.min >= EXPOSED_GAIN:
        return "leak"  # in every trial
    over = _chosen(row, rows, lambda r: r.over_other)
    certain = gain.certain if over is None else min(gain.certain, over.certain)
    # Of too few trials for an interval, half of all attacks that see nothing gain something, and
    # nothing allows for the choice of the best.
    several = gain.n >= LEAST
    if certain >= REQUIRED_GAIN and (several or gain.compared == 1):
        return "leak"
    return "partial" if (certain > 0 and several) or row.exposed else "unseen"


def _leaks_labels(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether labels were read off the update: more than guessed, and than off another update.

    Who answers the same whatever the update is right as often for another, and may beat the guess
    where a client's classes are not those of the public images.
    """
    gain = _chosen(row, rows, lambda r: r.label_gain)
    # Labels that the attacker was given are no leak.
    if row.knowledge.labels == "known" or gain is None or gain.n < LEAST or _same_labels(row):
        return False
    return gain.certain >= _LABEL_GAIN


def _same_labels(row: LeaderboardRow) -> bool:
    """Whether it answers no better for its own update than for another, or nothing tells."""
    return row.label_over_other is None or row.label_over_other.mean < _LABEL_GAIN


def _tells_members(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    gain = _chosen(row, rows, lambda r: r.membership_gain)
    return gain is not None and gain.certain >= _MEMBERSHIP_GAIN and not _same_members(row)


def _same_members(row: LeaderboardRow) -> bool:
    """Whether it tells members of its own release no better than of another, as far as is known."""
    over = row.membership_over_other
    return over is not None and over.mean < _MEMBERSHIP_GAIN


def _membership(rows: Sequence[LeaderboardRow]) -> str | None:
    """The attack that told members from others best, beside what the claim allows."""
    tried = [row for row in rows if row.metrics["membership_auc"]]
    if not tried:
        return None
    best = max(tried, key=lambda row: (not _same_members(row), row.strength[-1]))
    area = format_summary(best.metrics["membership_auc"], 2)
    text = (
        f"members told from others with an AUC of {area} (coin: 0.50) by {best.attack}, batch size "
        f"{best.batch_size}"
    )
    if best.no_control:
        text += f" ({best.no_control})"
    elif _same_members(best):
        text += ", and no better than with another release"
    if best.membership_auc_limit is not None:
        text += f"; the privacy claim allows at most {best.membership_auc_limit:.2f}"
    return text


def _rarely(row: LeaderboardRow, leaking: Share | None, level: Level) -> str:
    """In how many trials the attack of `row` gained something, where the mean may hide it."""
    if leaking is None or level not in ("unseen", "partial", "labels", "membership"):
        return ""
    over = "guessing and over another update" if row.over_other else "guessing"
    return (
        f" In {leaking.count} of {number_of(leaking.n, 'trial')} {row.attack} gained "
        f"{REQUIRED_GAIN:g} dB or more over {over}; {leaking.confidence:.0%} interval of that "
        f"chance {100 * leaking.low:.0f} to {leaking.high:.0%}."
    )


def _sentence(row: LeaderboardRow, level: Level, gain: Summary | None) -> str:
    if level == "invalid":
        return "The positive control did not pass, so what these attacks achieve here says nothing."
    if level == "failed":
        return (
            "Every attack failed against this defense, which is no protection measured: "
            f"{'; '.join(row.failures)}."
        )
    where = f"at batch size {row.batch_size}, round {row.round}"
    if row.no_control:
        where += f" ({row.no_control})"
    if gain is None or row.gain is None:
        span = row.metrics["subspace_error"]
        if span is None:
            return f"No attack on {row.subject} was run against this defense."
        best = f", in the best trial {span.min:.3f}" if span.min < span.mean / 2 else ""
        text = (
            f"{row.attack} leaves a span error of {span.mean:.3f} of the features {where}{best} "
            f"(0: all of their span is recovered; {row.guessed_span:.3g}: what guessing leaves)"
        )
        other = row.span_over_other
        if other is None or other.certain > 0:
            return f"{text}."
        return f"{text}, and as little of them with another update: it may know them beforehand."
    if level in ("unseen", "labels", "membership"):
        no_proof = "This is what these attacks could not do, not a proof that none can."
        finding = "did not reliably beat guessing" if row.gain.mean > 0 else "did not beat guessing"
        if row.blind:
            if row.gain.certain > 0:
                over = row.over_other.mean if row.over_other else 0.0
                much = "as much so" if over < _UNTOLD else "not reliably more than"
                finding = f"beats guessing, but {much} with another client’s update"
            return (
                "No attack does reliably better on this update than on another: "
                f"{row.attack} {finding}, {where}. {no_proof}"
            )
        return (
            f"The strongest attack, {row.attack}, {finding}: {_gain(gain, signed=True)} "
            f"{where}. {no_proof}"
        )
    worst = row.worst["psnr"]
    if level == "partial" and row.own_gain and min(gain.certain, row.own_gain.certain) <= 0:
        return (
            f"{row.attack} reconstructs {row.subject} in some trials, the best by "
            f"{row.own_gain.max:.1f} dB, and not reliably: {_gain(gain, signed=True)} {where}."
        )
    tail = "" if worst is None else f" Worst case: {worst:.1f} dB PSNR."
    return (
        f"{row.attack} reconstructs {row.subject} better than guessing by {_gain(gain)} "
        f"{where}.{tail}"
    )


_UNTOLD = 0.05
"""dB that a figure of one decimal does not show."""


def _gain(gain: Summary, signed: bool = False) -> str:
    def number(value: float) -> str:
        return format_signed(value) if signed else f"{value:.1f}"

    if gain.low is None or gain.high is None:
        return f"{number(gain.mean)} dB"
    interval = f"{gain.confidence:.0%} interval {number(gain.low)} to {number(gain.high)}"
    allowed = f", allowing for the best of {gain.compared}" if gain.compared > 1 else ""
    return f"{number(gain.mean)} dB ({interval}{allowed})"


def _labels(rows: Sequence[LeaderboardRow]) -> str | None:
    """The attack that recovered most labels beyond guessing."""
    found = [
        (
            not _same_labels(row),
            row.label_gain.mean if row.label_gain else summary.mean,
            summary.mean,
            row,
        )
        for row in rows
        if row.n_ok
        and row.knowledge.labels != "known"
        and (summary := row.metrics["label_accuracy"])
    ]
    if not found:
        return None
    sees, _, share, best = max(found, key=lambda entry: entry[:3])
    guessed = best.baseline["label_accuracy"]
    guess = "" if guessed is None else f" (guessing: {guessed:.0%})"
    text = f"{share:.0%} of labels recovered{guess} by {best.attack}, batch size {best.batch_size}"
    if best.no_control:
        text += f" ({best.no_control})"
    elif not sees:
        text += ", and no more than with another client’s update"
    return text


def _accuracy(row: LeaderboardRow, undefended: LeaderboardRow | None) -> str:
    if row.test_accuracy is None and row.subject == "rows" and row.test_loss is not None:
        return f"test loss {row.test_loss:.3g}"
    if row.test_accuracy is None:
        return "test accuracy not measured"
    text = f"accuracy {row.accuracy}" if row.accuracy else f"{row.test_accuracy:.1%} test accuracy"
    if row.undefended or undefended is None or undefended.test_accuracy is None:
        return text
    points = 100 * (row.test_accuracy - undefended.test_accuracy)
    if abs(points) < 0.05:
        return f"{text}, the same as without defense"
    text += f", {abs(points):.1f} points {'above' if points > 0 else 'below'} no defense"
    if row.accuracy and undefended.accuracy and row.accuracy.overlaps(undefended.accuracy):
        text += f", which {number_of(row.accuracy.examples, 'test example')} cannot tell apart"
    return text


def privacy_claim(row: LeaderboardRow) -> str:
    """The stack's guarantee in words, with its unit, and what the audit found."""
    if row.epsilon is None:
        return "privacy not accounted"
    if math.isinf(row.epsilon):
        reason = f": {row.privacy_reason}" if row.privacy_reason else ""
        return f"no guarantee (ε = ∞{reason})"
    text = f"ε = {format_epsilon(row.epsilon)}"
    if row.delta is not None:
        text += f" at δ = {format_delta(row.delta)}"
    if row.unit:
        text += f" per {row.unit}"
    details = [row.relation.replace("_", " ") if row.relation else None, row.accountant]
    if row.relation in NO_DIFFERENTIAL_PRIVACY:
        details.append("no differential privacy")
    if row.privacy_covers:
        details.append(row.privacy_covers)
    known = ", ".join(f"{detail}" for detail in details if detail)
    text += f" ({known})" if known else ""
    if row.audited_epsilon is not None:
        text += f"; an audit found at least ε = {format_bound(row.audited_epsilon)}"
    return text


def _cautions(rows: Sequence[LeaderboardRow], strongest: LeaderboardRow) -> list[str]:
    problem = strongest.learning_problem
    found = [f"{problem[0].upper()}{problem[1:]}."] if problem else []
    if strongest.n == 1:
        found.append("One trial only: no interval can be given.")
    elif strongest.independent == strongest.n < LEAST:
        found.append(
            f"{number_of(strongest.n, 'trial')} only: no interval is given of fewer than {LEAST}."
        )
    elif strongest.gain and strongest.gain.n >= LEAST and strongest.gain.low is None:
        found.append(
            f"All of {number_of(strongest.gain.n, 'trial')} gained the same: no interval is given "
            "of equal values, which says nothing of what is rare."
        )
    if strongest.independent < strongest.n:
        found.append(
            f"Of {number_of(strongest.n, 'trial')} some share images: they count as "
            f"{number_of(strongest.independent, 'independent trial')}, and no interval is given "
            f"of fewer than {LEAST}."
        )
    failed = sum(row.n - row.n_ok for row in rows)
    if failed:
        total = sum(row.n for row in rows)
        found.append(
            f"{failed} of {number_of(total, 'attack run')} failed; each counts as guessing."
        )
    if strongest.diverged:
        found.append(
            f"In {strongest.diverged} of {number_of(strongest.n, 'recording')} local training "
            "more than doubles the loss of its own images: it diverges, and what it leaks says "
            "little of training that works. Lower the learning rate, or plant smaller weights."
        )
    if strongest.guess_problem:
        found.append(f"{strongest.guess_problem[0].upper()}{strongest.guess_problem[1:]}.")
    made = "pictures" if strongest.subject == "images" else "rows"
    if strongest.no_control:
        found.append(
            f"{strongest.no_control[0].upper()}{strongest.no_control[1:]}; what the attack knew "
            "beforehand is not told from what it read off the update."
        )
    if strongest.gain is not None and strongest.gain.mean > 0:
        other = strongest.over_other
        if other is not None and other.certain <= 0:
            found.append(
                f"Against another client’s update the same attack scores as well "
                f"({format_signed(other.mean)} dB): its {made} may be what it knew beforehand."
            )
    if strongest.epsilon is not None and _WEAK_EPSILON <= strongest.epsilon < math.inf:
        found.append(
            f"An ε of {format_epsilon(strongest.epsilon)} promises next to nothing: the odds of "
            "any conclusion may change by a factor of exp(ε)."
        )
    audited = strongest.audited_epsilon
    if audited is not None and strongest.epsilon is not None and audited > strongest.epsilon:
        found.append("The audit refutes the privacy claim: its lower bound is above the claimed ε.")
    return found
