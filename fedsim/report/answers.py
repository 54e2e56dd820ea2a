"""Answers for each defense what its attackers get, what it costs, and whether to rely on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedsim.report.control import NOT_ENDED, Control, describe_failures, positive_controls
from fedsim.report.facts import unfinished
from fedsim.report.finding import Finding, evidence_of, finding_of, gets_of
from fedsim.report.leaderboard import aggregate
from fedsim.report.level import may_leak_labels
from fedsim.report.reliance import Reliance, reliance_of
from fedsim.report.row import Comparison, LeaderboardRow
from fedsim.report.sentences import accuracy_sentence, label_sentence, privacy_claim
from fedsim.report.verdict import Verdict, verdicts
from fedsim.results.reading import Run, measurements
from fedsim.results.settings import differences
from fedsim.scoring import Summary
from fedsim.words import number_of

_INVALID = {
    "failed": "INVALID, for the attacks do not work without a defense either",
    "absent": "INVALID, for nothing was attacked without a defense",
}
"""Status of a positive control -> why it lets no defense get an answer."""

_INEFFECTIVE = "INVALID, for the attacks do not work here, which is no proof that others do not"
"""Why a failed positive control lets the undefended stack get no answer."""


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
                subject = "pictures" if self.judgement.strongest.subject == "images" else "rows"
                return f"{where}, labels are recovered; of {subject} nothing can be said"
            return f"{where}, nothing can be said"
        if self.finding in ("failed", "unknown"):
            return f"{where}, what {self.attacker} gets {self.gets}"
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
    def grounds(self) -> tuple[tuple[str, str], ...]:
        """What stands under `brief` on a page: each with its name."""
        # A certificate needs no control: the attacker has it before anybody scores.
        knows = ("It knows", self.judgement.certificates)
        costs = (("It costs", self.costs), ("It promises", self.guarantee))
        named: tuple[tuple[str, str | None], ...] = (("Shown by", self.evidence), knows, *costs)
        if self.finding == "no answer":
            named = (("Shown by", self.labels), knows)
        return tuple((name, text) for name, text in named if text)

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
    undefended = [row for row in rows if row.undefended]
    refuted = {audit.defense for run in runs for audit in run.audits if not audit.holds}
    trained = {row.round for run in runs for row in run.rounds}
    late = unfinished(runs)
    pending = NOT_ENDED if late else None
    seconds = round_seconds(runs)
    return [
        _answer(
            verdict,
            [row for row in rows if row.defense == verdict.strongest.defense],
            undefended,
            seconds=seconds,
            trained=trained,
            refuted=verdict.strongest.defense in refuted,
            pending=pending,
            control=control,
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
        found.append((control.comparison, answers(members, control, runs_of(members, runs))))
    return found


def runs_of(rows: Sequence[LeaderboardRow], runs: Sequence[Run]) -> list[Run]:
    """Returns the runs that `rows`, of one comparison, are from, or will have more rows from.

    A run without a row yet belongs to them if its scenario has the same name and settings.
    """
    cells, scenario = {row.cell for row in rows}, rows[0].scenario
    own = [run for run in runs if any(row.cell in cells for row in run.rows)]

    def belongs(run: Run) -> bool:
        if run.rows or run.setting("name") != scenario:
            return run in own
        pairs = [differences([each.scenario, run.scenario], [{}, {}]) for each in own]
        return any(not any(pair) for pair in pairs)

    return [run for run in runs if belongs(run)]


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
    undefended: Sequence[LeaderboardRow],
    *,
    seconds: Mapping[str, float],
    trained: Collection[int],
    refuted: bool,
    pending: str | None,
    control: Control,
) -> Answer:
    """Answers for one defense.

    Args:
        verdict: on it.
        rows: of it.
        undefended: rows without a defense.
        seconds: of a round, by defense.
        trained: numbers of the rounds that were trained.
        refuted: whether an audit refutes what its training claims.
        pending: why there is no answer yet, if there is none.
        control: the positive control.
    """
    row = verdict.strongest
    invalid = _INVALID.get(control.status)
    if control.status == "broken":
        invalid = f"INVALID, for {control.reason}"
    elif row.undefended and control.status == "failed":
        invalid = _INEFFECTIVE
    unanswerable = pending or invalid
    stands = invalid and not pending and any(may_leak_labels(line) for line in rows)
    finding = "no answer" if unanswerable else finding_of(verdict, rows)
    reliance, reason = reliance_of(verdict, finding, rows, undefended, refuted=refuted)
    if finding == "failed":
        reason += f": {'; '.join(describe_failures(rows))}"
    return Answer(
        defense=row.defense,
        stack=row.stack,
        undefended=row.undefended,
        attacker=_attacker(row),
        finding=finding,
        gets=gets_of(verdict, rows, finding),
        evidence=evidence_of(verdict, rows, finding),
        costs=_costs(row, undefended[0] if undefended else None, seconds),
        guarantee=privacy_claim(row),
        verdict="not shown" if unanswerable else reliance,
        reason=unanswerable or reason,
        labels=(label_sentence(rows) or "") if stands else "",
        untried=() if pending else _untried(rows, trained),
        judgement=verdict,
    )


def _attacker(row: LeaderboardRow) -> str:
    """Names who attacks, with all that the threat model adds to what this attacker has.

    A server that altered the model is never called just a server.
    """
    watchers = {"client": "another participant", "eavesdropper": "an eavesdropper on the wire"}
    if row.vantage in watchers:
        name, done = watchers[row.vantage], _DONE.get(row.server)
        has = f"{row.threat.differs}," if row.threat.differs else ""
        return f"{name}{has}" + (f", where a malicious server has {done}," if done else "")
    done = _DONE.get(row.server)
    name = f"a malicious server that {done}" if done else "the server"
    name += f"{row.threat.differs}," if row.threat.differs else ""
    if row.masked:
        return f"{name}, which sees masked updates,"
    return f"{name}, which sees sums alone," if row.vantage == "aggregate" else name


_DONE = {
    "planted": "planted weights in the model’s head",
    "modified": "put a module into the model",
}
"""What a malicious server has done."""


def _costs(
    row: LeaderboardRow, undefended: LeaderboardRow | None, seconds: Mapping[str, float]
) -> str:
    accuracy = accuracy_sentence(row, undefended)
    own = seconds.get(row.defense)
    if own is None:
        return f"{accuracy}, seconds of a round not recorded"
    text = f"{_seconds(own)} s a round"
    usual = seconds.get(undefended.defense) if undefended and not row.undefended else None
    if usual is not None:
        same = _seconds(usual) == _seconds(own)
        text += ", as without defense" if same else f" instead of {_seconds(usual)} s"
    return f"{accuracy}, {text}"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


def _untried(rows: Sequence[LeaderboardRow], trained: Collection[int]) -> tuple[str, ...]:
    """Lists kinds of attack and attacker that occur in none of the rows of one defense.

    `trained` are the rounds that were trained.
    """
    measured = {name for row in rows for name, value in row.metrics.items() if value is not None}
    of_images = rows[0].subject == "images"
    smallest, rounds = min(row.batch_size for row in rows), sorted({row.round for row in rows})
    few = len(rounds) <= _FEW
    others = f"rounds other than {' and '.join(map(str, rounds))}" if few else "the other rounds"
    lists = [
        ("pictures" if of_images else "rows", "psnr" not in measured),
        ("labels", of_images and "label_accuracy" not in measured),
        ("who took part (membership)", "membership_auc" not in measured),
        (f"batches of fewer than {number_of(smallest, 'image')}", of_images and smallest > 1),
        (others, bool(set(trained) - set(rounds))),
        ("a server that alters the model", all(row.server == "honest" for row in rows)),
        ("other participants", all(row.vantage != "client" for row in rows)),
        ("the server", all(row.vantage in ("client", "eavesdropper") for row in rows)),
    ]
    return tuple(name for name, missing in lists if missing)


_FEW = 3
"""At most so many rounds are listed by number."""
