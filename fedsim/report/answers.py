"""Answers for each defense what its attackers get, what it costs, and whether to rely on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from fedsim.report.control import Control, positive_controls
from fedsim.report.facts import unfinished
from fedsim.report.figures import NO_DIFFERENTIAL_PRIVACY, format_epsilon, format_signed
from fedsim.report.leaderboard import aggregate
from fedsim.report.level import Level, may_leak_labels
from fedsim.report.row import REQUIRED_GAIN, Comparison, LeaderboardRow
from fedsim.report.sentences import (
    WEAK_EPSILON,
    accuracy_sentence,
    label_sentence,
    membership_sentence,
    privacy_claim,
    unstated_terms,
)
from fedsim.report.verdict import Verdict, verdicts
from fedsim.results.reading import Run, measurements
from fedsim.scoring import LEAST, Summary
from fedsim.words import number_of

RECOGNIZABLE_SSIM = 0.5
"""Pictures of a leak are recognizable from this mean SSIM on."""

RECOGNIZABLE_PSNR = 20.0
"""Pictures of a leak whose SSIM was not measured are recognizable from this mean PSNR on, dB."""

LARGEST_DELTA = 1e-3
"""Above this δ a guarantee may fail for one person in a thousand, and nothing rests on it."""

_INVALID = {
    "failed": "INVALID, for the attacks do not work without a defense either",
    "absent": "INVALID, for nothing was attacked without a defense",
}
"""Status of a positive control -> why it lets no defense get an answer."""

_INEFFECTIVE = "INVALID, for the attacks do not work here, which is no proof that others do not"
"""Why a failed positive control lets the undefended stack get no answer."""

Reliance = Literal["rely", "do not rely", "not shown"]

Finding = Literal[
    "recognizable",
    "colors only",
    "features",
    "labels",
    "membership",
    "some trials",
    "nothing",
    "failed",
    "unknown",
    "no answer",
]
"""What an attacker gets: the worst that the attacks on a defense achieved. `some trials`: nothing
on average, but `REQUIRED_GAIN` or more in a few. `no answer`: the rows are INVALID, or some of them
are still to come."""

_GETS: Mapping[Finding, str] = {
    "recognizable": "recognizable {subject}",
    "colors only": "{coarse} only",
    "features": "features of the {subject}",
    "labels": "labels",
    "membership": "who took part",
    "some trials": "something in some trials, and nothing reliably",
    "nothing": "nothing beyond the guess",
}

_LEAKS = ("recognizable", "colors only", "features", "labels", "membership")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answers for one defense of one comparison, in one sentence and in its parts."""

    defense: str
    stack: str
    undefended: bool
    attacker: str
    """Who attacks, in words; a server that altered the model is named so."""
    finding: Finding
    gets: str
    """What the attacker gets, in words."""
    evidence: str
    """Gain, interval and number of trials of the attack that shows it; empty if none ran."""
    costs: str
    """Accuracy of the model and seconds of a round, beside those without a defense."""
    guarantee: str
    """ε with unit, relation and δ, or that there is none."""
    verdict: Reliance
    reason: str
    """Why the verdict is this one, in words."""
    labels: str
    """How many labels were recovered where nothing else has an answer, since that needs no control:
    in words; else empty."""
    untried: tuple[str, ...]
    """What no attack of these rows has tried."""
    judgement: Verdict
    """The strongest attack and how it was judged."""

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return f"{self.lead}{self.rest}"

    @property
    def lead(self) -> str:
        """The first words of the sentence: who gets what behind which defense."""
        where = "Without a defense" if self.undefended else f"Behind {self.defense}"
        if self.finding == "no answer":
            if self.labels:
                return f"{where}, labels are recovered; of {self._subject} nothing can be said"
            return f"{where}, nothing can be said"
        return f"{where}, {self.attacker} {self.gets}"

    @property
    def rest(self) -> str:
        """The other words of the sentence: evidence, costs, guarantee and verdict."""
        if self.finding == "no answer":
            return f": {self.labels}; {self.reason}." if self.labels else f": {self.reason}."
        evidence = f": {self.evidence}" if self.evidence else ""
        return f"{evidence}; {self.costs}; {self.guarantee}; {self.reliance}."

    @property
    def brief(self) -> str:
        """The sentence without evidence, costs and guarantee, for a terminal."""
        if self.finding == "no answer":
            return f"{self.lead}: {self.reason}."
        return f"{self.lead}; {self.reliance}."

    @property
    def _subject(self) -> str:
        return _subject(self.judgement.strongest)

    @property
    def reliance(self) -> str:
        """The verdict with its reason, as a clause."""
        if self.verdict == "rely":
            return f"rely on it {self.reason}"
        verb = "do not rely on it" if self.verdict == "do not rely" else self.verdict
        return f"{verb}: {self.reason}"

    @property
    def gain(self) -> Summary | None:
        """The strongest attack's gain over guessing in dB, as `Verdict.gain`."""
        return self.judgement.gain


def answers(
    rows: Sequence[LeaderboardRow], control: Control, runs: Sequence[Run] = ()
) -> list[Answer]:
    """Returns one answer per defense among the rows of one comparison, in their order.

    Args:
        rows: of one comparison.
        control: that judges it; if it did not pass, no defense gets an answer, except that labels
            which were recovered are stated.
        runs: that the rows are from, which say how long a round took. A run that has not ended, or
            of which rows are not scored, lets no defense get an answer.
    """
    undefended = next((row for row in rows if row.undefended), None)
    late = unfinished(runs)
    pending = "the run has not ended, or is not scored to its end" if late else None
    seconds = round_seconds(runs)
    return [
        _answer(
            verdict,
            [row for row in rows if row.defense == verdict.strongest.defense],
            undefended,
            seconds,
            pending,
            control.status,
        )
        for verdict in verdicts(rows, control)
    ]


def answers_of(
    runs: Sequence[Run], *, confidence: float = 0.95
) -> list[tuple[Comparison, list[Answer]]]:
    """Returns the answers of every comparison among the rows of `runs`, in the leaderboard's order.

    `confidence` is that of the intervals.
    """
    rows = aggregate(measurements(runs), confidence=confidence)
    found = []
    for control in positive_controls(rows):
        members = [row for row in rows if row.comparison == control.comparison]
        cells = {row.cell for row in members}
        own = [run for run in runs if any(row.cell in cells for row in run.rows)]
        found.append((control.comparison, answers(members, control, own)))
    return found


def round_seconds(runs: Sequence[Run]) -> dict[str, float]:
    """Maps each defense to the mean seconds of its rounds, of all runs that state them."""
    times: dict[str, list[float]] = {}
    for run in runs:
        for row in run.rounds:
            if row.seconds is not None:
                times.setdefault(row.defense, []).append(row.seconds)
    return {defense: fmean(values) for defense, values in times.items()}


def _answer(
    verdict: Verdict,
    rows: Sequence[LeaderboardRow],
    undefended: LeaderboardRow | None,
    seconds: Mapping[str, float],
    pending: str | None,
    control: str,
) -> Answer:
    row = verdict.strongest
    invalid = _INEFFECTIVE if row.undefended and control == "failed" else _INVALID.get(control)
    unanswerable = pending or invalid
    leaky = any(may_leak_labels(line) for line in rows)
    stands = invalid and not pending and leaky
    finding = "no answer" if unanswerable else _finding(verdict)
    reliance, reason = _reliance(verdict, finding)
    return Answer(
        defense=row.defense,
        stack=row.stack,
        undefended=row.undefended,
        attacker=_attacker(row),
        finding=finding,
        gets=_gets(verdict, rows, finding),
        evidence=_evidence(verdict, rows, finding),
        costs=_costs(row, undefended, seconds),
        guarantee=privacy_claim(row),
        verdict="not shown" if unanswerable else reliance,
        reason=unanswerable or reason,
        labels=(label_sentence(rows) or "") if stands else "",
        untried=_untried(rows),
        judgement=verdict,
    )


def _finding(verdict: Verdict) -> Finding:
    row = verdict.strongest
    # A trial that no attack gains by chance shows what the attack can do, whatever the mean.
    if row.exposed or (verdict.level == "leak" and _is_recognizable(row)):
        return "recognizable"
    if verdict.level == "unseen" and verdict.leaking and verdict.leaking.count:
        return "some trials"
    return _OF_LEVEL[verdict.level]


_OF_LEVEL: Mapping[Level, Finding] = {
    "leak": "colors only",
    "partial": "colors only",
    "features": "features",
    "labels": "labels",
    "membership": "membership",
    "unseen": "nothing",
    "unknown": "unknown",
    "failed": "failed",
    "invalid": "no answer",
}


def _is_recognizable(row: LeaderboardRow) -> bool:
    """Whether what a leak shows is recognizable on average; of rows there is no SSIM."""
    likeness, pixels = row.metrics["ssim"], row.metrics["psnr"]
    if likeness is not None:
        return likeness.mean >= RECOGNIZABLE_SSIM
    return pixels is not None and pixels.mean >= RECOGNIZABLE_PSNR


def _attacker(row: LeaderboardRow) -> str:
    """Names who attacks; a server that altered the model is never called just a server."""
    conduct = {
        "planted": "a malicious server that planted weights in the model’s head",
        "modified": "a malicious server that put a module into the model",
    }
    if row.vantage == "client":
        return "another participant"
    if row.vantage == "eavesdropper":
        return "an eavesdropper on the wire"
    name = conduct.get(row.server, "the server")
    if row.masked:
        return f"{name}, which sees masked updates,"
    return f"{name}, which sees sums alone," if row.vantage == "aggregate" else name


def _gets(verdict: Verdict, rows: Sequence[LeaderboardRow], finding: Finding) -> str:
    """Words what the attacker gets."""
    row = verdict.strongest
    if finding == "failed":
        runs = number_of(sum(line.n for line in rows), "attack run")
        return f"was not measured, for all of {runs} failed, which is no protection"
    if finding in ("unknown", "no answer"):
        return f"was not measured, for no attack on {row.subject} ran"
    subject = _subject(row)
    coarse = "colors" if row.subject == "images" else "coarse values"
    gets = _GETS[finding].format(subject=subject, coarse=coarse)
    seldom = finding == "recognizable" and verdict.level != "leak"
    return f"gets {gets}{' in some trials' if seldom else ''}"


def _subject(row: LeaderboardRow) -> str:
    return "pictures" if row.subject == "images" else "rows"


def _evidence(verdict: Verdict, rows: Sequence[LeaderboardRow], finding: Finding) -> str:
    """Words the figures behind a finding: of pictures, or of what else leaks where they do not."""
    row = verdict.strongest
    if finding in ("failed", "unknown", "no answer"):
        return ""
    other = {"labels": label_sentence, "membership": membership_sentence}.get(finding)
    if other:
        return f"{other(rows)}, pictures or rows {_gain(verdict)}, n = {_n(row)}"
    span = row.metrics["subspace_error"]
    figure = f"span error {span.mean:.2f}" if verdict.gain is None and span else _gain(verdict)
    parts = [f"{figure} by {row.attack_on} at batch size {row.batch_size}", f"n = {_n(row)}"]
    leaking = verdict.leaking
    if leaking and (finding == "some trials" or (row.exposed and verdict.level != "leak")):
        parts.append(
            f"{leaking.count} of {leaking.n} with {REQUIRED_GAIN:g} dB or more (interval of that "
            f"chance {100 * leaking.low:.0f} to {leaking.high:.0%})"
        )
    attempts = verdict.gain.compared if verdict.gain else 1
    if attempts > 1:
        attacks = number_of(len({r.attack for r in rows if r.n_ok}), "attack")
        parts.append(f"the best of {attempts} attempts with {attacks}")
    if row.no_control:
        parts.append(row.no_control)
    return ", ".join(parts)


def _n(row: LeaderboardRow) -> str:
    """Words the trials; those that share an image count once."""
    count = number_of(row.n, "trial")
    return count if row.independent == row.n else f"{count}, {row.independent} independent"


def _gain(verdict: Verdict) -> str:
    gain = verdict.gain
    if gain is None:
        return "no gain measured"
    what = "due to this update" if verdict.strongest.blind else "over guessing"
    text = f"{format_signed(gain.mean)} dB {what}"
    if gain.low is None or gain.high is None:
        return f"{text} (no interval)"
    ends = f"{format_signed(gain.low)} to {format_signed(gain.high)} dB"
    return f"{text}, {gain.confidence:.0%} interval {ends}"


def _costs(
    row: LeaderboardRow, undefended: LeaderboardRow | None, seconds: Mapping[str, float]
) -> str:
    accuracy = accuracy_sentence(row, undefended)
    own = seconds.get(row.defense)
    if own is None:
        return f"{accuracy}, seconds of a round not recorded"
    text = f"{own:.2g} s a round"
    usual = seconds.get(undefended.defense) if undefended and not row.undefended else None
    if usual is not None:
        same = f"{usual:.2g}" == f"{own:.2g}"
        text += ", as without defense" if same else f" instead of {usual:.2g} s"
    return f"{accuracy}, {text}"


def _reliance(verdict: Verdict, finding: Finding) -> tuple[Reliance, str]:
    """Returns the verdict and why; only a guarantee that attacks do not contradict is relied on."""
    row = verdict.strongest
    audited, epsilon = row.audited_epsilon, row.epsilon
    if finding in _LEAKS:
        return "do not rely", "the attack works"
    if audited is not None and epsilon is not None and audited > epsilon:
        return "do not rely", "the audit refutes its ε"
    if row.undefended:
        return "not shown", "there is no defense to rely on"
    if finding in ("failed", "unknown"):
        return "not shown", "no attack was measured"
    if finding == "some trials":
        return "not shown", "some trials gain what guessing does not"
    if weakness := _weakness(row):
        return "not shown", f"only these attacks failed here, and {weakness}"
    gain = verdict.gain
    if gain is None or gain.n < LEAST or gain.high is None:
        return "not shown", "too few trials for an interval"
    if gain.high >= REQUIRED_GAIN:
        reach = f"{format_signed(gain.high)} dB"
        return "not shown", f"the interval reaches {reach}, so more trials are needed"
    if row.learning_problem:
        return "not shown", "the model learned nothing, so that its updates may hold nothing"
    return "rely", "for what its ε promises, and no more"


def _weakness(row: LeaderboardRow) -> str | None:
    """Returns why the guarantee of `row` bears no reliance; None if it does."""
    epsilon, delta = row.epsilon, row.delta
    if epsilon is None or math.isinf(epsilon):
        return "no guarantee says that others will"
    if unstated_terms(row):
        return f"its guarantee does not state {' and '.join(unstated_terms(row))}"
    if row.relation in NO_DIFFERENTIAL_PRIVACY:
        return "its guarantee is no differential privacy"
    if epsilon >= WEAK_EPSILON:
        return f"an ε of {format_epsilon(epsilon)} promises next to nothing"
    if delta is not None and delta > LARGEST_DELTA:
        return f"its δ is above {LARGEST_DELTA:g}"
    return None


def _untried(rows: Sequence[LeaderboardRow]) -> tuple[str, ...]:
    """Lists kinds of attack and attacker that occur in none of the rows of one defense."""
    measured = {name for row in rows for name, value in row.metrics.items() if value is not None}
    lists = [
        ("pictures", rows[0].subject == "images" and "psnr" not in measured),
        ("labels", rows[0].subject == "images" and "label_accuracy" not in measured),
        ("who took part (membership)", "membership_auc" not in measured),
        ("a server that alters the model", all(row.server == "honest" for row in rows)),
        ("other participants", all(row.vantage != "client" for row in rows)),
    ]
    return tuple(name for name, missing in lists if missing)
