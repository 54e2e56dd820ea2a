"""What the leaderboard says of each defense, in words, and how sure it can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.report.control import REQUIRED_GAIN, REQUIRED_SPAN, Control
from fedsim.report.figures import (
    NO_DIFFERENTIAL_PRIVACY,
    format_bound,
    format_delta,
    format_epsilon,
    format_signed,
    format_summary,
)
from fedsim.report.leaderboard import LeaderboardRow
from fedsim.scoring import LEAST, Summary

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
"""Share of labels above guessing from which on labels are said to leak."""

_MEMBERSHIP_GAIN = 0.05
"""Area under the curve above a coin's from which on membership is said to leak."""

_EXPOSED_GAIN = 10.0
"""dB above guessing, and above another update, that no attack gains by chance: one such trial is a
leak, though the interval of all reaches below 0."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One defense, judged by the attack that gained most against it."""

    strongest: LeaderboardRow
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
    # Undefended rows stand on their own: what leaks there leaks, whatever the control asks for.
    doubtful = control.status != "passed" and not strongest.undefended
    level = "invalid" if doubtful else _level(strongest)
    if level in ("unseen", "unknown") and any(_leaks_labels(row) for row in rows):
        level = "labels"
    if level in ("unseen", "unknown") and any(_tells_members(row) for row in rows):
        level = "membership"
    return Verdict(
        strongest=strongest,
        level=level,
        sentence=_sentence(strongest, level),
        labels=_labels(rows),
        membership=_membership(rows),
        accuracy=_accuracy(strongest, undefended),
        privacy=privacy_claim(strongest),
        cautions=_cautions(rows, strongest),
    )


def _level(row: LeaderboardRow) -> Level:
    """By the lower end of the interval; a gain that the prior alone explains is no leak."""
    if row.n_ok == 0:
        return "failed"
    if row.gain is None:
        span = row.metrics["subspace_error"]
        if span is None:
            return "unknown"
        most = span.mean if span.high is None else span.high
        blind = row.span_over_other is not None and row.span_over_other.certain <= 0
        return "features" if most <= REQUIRED_SPAN and not blind else "unseen"
    certain = row.gain.certain
    if row.over_other is not None:
        certain = min(certain, row.over_other.certain)
    if certain >= REQUIRED_GAIN:
        return "leak"
    # Of too few trials for an interval, half of all attacks that see nothing gain something.
    certainly = certain > 0 and row.gain.low is not None
    return "partial" if certainly or _exposed(row) else "unseen"


def _exposed(row: LeaderboardRow) -> bool:
    """Whether a trial leaked for sure, whatever became of the others."""
    beaten = (row.gain, row.over_other) if row.over_other else (row.gain,)
    return all(summary is not None and summary.max >= _EXPOSED_GAIN for summary in beaten)


def _leaks_labels(row: LeaderboardRow) -> bool:
    # Labels that the attacker was given are no leak.
    if row.knowledge.labels == "known" or row.label_gain is None:
        return False
    return row.label_gain.certain >= _LABEL_GAIN


def _tells_members(row: LeaderboardRow) -> bool:
    return row.membership_gain is not None and row.membership_gain.certain >= _MEMBERSHIP_GAIN


def _membership(rows: Sequence[LeaderboardRow]) -> str | None:
    """The attack that told members from others best, beside what the claim allows."""
    tried = [row for row in rows if row.metrics["membership_auc"]]
    if not tried:
        return None
    best = max(tried, key=lambda row: row.strength[-1])
    area = format_summary(best.metrics["membership_auc"], 2)
    text = (
        f"members told from others with an AUC of {area} (coin: 0.50) by {best.attack}, batch size "
        f"{best.batch_size}"
    )
    if best.membership_auc_limit is not None:
        text += f"; the privacy claim allows at most {best.membership_auc_limit:.2f}"
    return text


def _sentence(row: LeaderboardRow, level: Level) -> str:
    if level == "invalid":
        return "The positive control did not pass, so what these attacks achieve here says nothing."
    if level == "failed":
        return (
            "Every attack failed against this defense, which is no protection measured: "
            f"{'; '.join(row.failures)}."
        )
    where = f"at batch size {row.batch_size}, round {row.round}"
    if row.gain is None:
        span = row.metrics["subspace_error"]
        if span is None:
            return f"No attack on {row.subject} was run against this defense."
        text = (
            f"{row.attack} leaves a span error of {span.mean:.3f} of the features {where} (0: all "
            "of their span is recovered; 1: nothing is)"
        )
        other = row.span_over_other
        if other is None or other.certain > 0:
            return f"{text}."
        return f"{text}, and as little of them with another update: it may know them beforehand."
    if level in ("unseen", "labels", "membership"):
        finding = "did not reliably beat guessing" if row.gain.mean > 0 else "did not beat guessing"
        if row.gain.low is not None and row.gain.low > 0:
            finding = "beats guessing, but as much so with another client’s update"
        return (
            f"The strongest attack, {row.attack}, {finding}: {_gain(row.gain, signed=True)} "
            f"{where}. This is what these attacks could not do, not a proof that none can."
        )
    worst = row.worst["psnr"]
    if row.gain.certain <= 0:
        return (
            f"{row.attack} reconstructs {row.subject} in some trials, the best by "
            f"{row.gain.max:.1f} dB, and not reliably: {_gain(row.gain, signed=True)} {where}."
        )
    tail = "" if worst is None else f" Worst case: {worst:.1f} dB PSNR."
    return (
        f"{row.attack} reconstructs {row.subject} better than guessing by {_gain(row.gain)} "
        f"{where}.{tail}"
    )


def _gain(gain: Summary, signed: bool = False) -> str:
    def number(value: float) -> str:
        return format_signed(value) if signed else f"{value:.1f}"

    if gain.low is None or gain.high is None:
        return f"{number(gain.mean)} dB"
    interval = f"{gain.confidence:.0%} interval {number(gain.low)} to {number(gain.high)}"
    return f"{number(gain.mean)} dB ({interval})"


def _labels(rows: Sequence[LeaderboardRow]) -> str | None:
    """The attack that recovered most labels beyond guessing."""
    found = [
        (row.label_gain.mean if row.label_gain else summary.mean, summary.mean, row)
        for row in rows
        if row.n_ok
        and row.knowledge.labels != "known"
        and (summary := row.metrics["label_accuracy"])
    ]
    if not found:
        return None
    _, share, best = max(found, key=lambda entry: entry[:2])
    guessed = best.baseline["label_accuracy"]
    guess = "" if guessed is None else f" (guessing: {guessed:.0%})"
    return f"{share:.0%} of labels recovered{guess} by {best.attack}, batch size {best.batch_size}"


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
        text += f", which {row.accuracy.examples} test examples do not tell apart"
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
        found.append(f"{strongest.n} trials only: no interval is given of fewer than {LEAST}.")
    if strongest.independent < strongest.n:
        found.append(
            f"{strongest.n} trials share images: they count as {strongest.independent} independent "
            f"ones, and no interval is given of fewer than {LEAST}."
        )
    failed = sum(row.n - row.n_ok for row in rows)
    if failed:
        total = sum(row.n for row in rows)
        found.append(f"{failed} of {total} attack runs failed; each counts as guessing.")
    if strongest.diverged:
        found.append(
            f"In {strongest.diverged} of {strongest.n} recordings local training more than doubles "
            "the loss of its own images: it diverges, and what it leaks says little of training "
            "that works. Lower the learning rate, or plant smaller weights."
        )
    made = "pictures" if strongest.subject == "images" else "rows"
    if strongest.gain is not None and strongest.gain.mean > 0:
        other = strongest.over_other
        if other is None:
            found.append(
                "No other-update control: what the attack knew beforehand is not told apart."
            )
        elif other.certain <= 0:
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
