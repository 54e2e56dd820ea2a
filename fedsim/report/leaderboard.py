"""The leaderboard: a projection of results rows, one line per attack on a defense.

A failed trial counts as the zero-information guess of its own row, in every aggregate; no figure
leaves it out. Gains are paired: each trial's score less the guess's score on the same images.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedsim.contracts.grant import Grant
from fedsim.report.figures import describe_stack, describe_variant
from fedsim.report.paired import gains, over_other, own_gains
from fedsim.report.victims import images, units
from fedsim.results.reading import (
    Metrics,
    ResultRow,
    RoundRow,
    Subject,
    UtilityOf,
    load_runs,
    measurements,
)
from fedsim.scoring import (
    COMPARABLE,
    METRICS,
    Accuracy,
    Share,
    Summary,
    accuracy,
    guess_problem,
    learning_problem,
    share,
    summarize,
)
from fedsim.types import Server

Comparison = tuple[str, str, str, str, Server]
"""(scenario, variant, data source, model, server): rows of one may be ranked, of two never."""

REQUIRED_GAIN = 3.0
"""dB above the zero-information guess, and above another update, from which on a trial leaks."""

EXPOSED_GAIN = 10.0
"""dB above guessing, and above another update, that no attack gains by chance: one such trial is a
leak, though the interval of all reaches below 0."""

_ROUNDING = 1e-9
"""Of a span error that is told from none."""


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow:
    """One attack on one defense, over all its trials."""

    cell: str
    """`ResultRow.cell` of its trials."""
    scenario: str
    variant: str
    folders: tuple[str, ...]
    """Of the runs that its trials are from."""
    dataset: str
    model: str
    """Or the learner, of one that trains no model."""
    subject: Subject
    """What the attack is after."""
    defense: str
    stack: str
    undefended: bool
    attack: str
    vantage: str
    server: Server
    """What the server has done to the model."""
    knowledge: Grant
    batch_size: int
    round: int
    n: int
    """Trials."""
    n_ok: int
    images: int | None
    """Different images, or rows of a table, that were attacked; None of rows that do not tell."""
    independent: int
    """Trials of which no two share an image, those that do counting once: what every summary and
    interval is of."""
    failures: dict[str, int]
    """Reason -> how many trials."""
    metrics: dict[str, Summary | None]
    worst: dict[str, float | None]
    """For the client: the most that leaked in one trial (of one image, where the row has it)."""
    baseline: dict[str, float | None]
    """Mean of the zero-information guess."""
    gain: Summary | None
    """PSNR above the zero-information guess, dB."""
    label_gain: Summary | None
    """Label accuracy above guessing the majority label."""
    membership_gain: Summary | None
    """Area under the membership curve above 0.5, a coin's."""
    other_update: Summary | None
    """PSNR of the same attack's reconstruction of another update, against this truth."""
    over_other: Summary | None
    """PSNR above `other_update`, dB: what of the gain is due to this update."""
    own_gain: Summary | None
    """The lesser of `gain` and `over_other`, trial by trial, dB."""
    leaking: Share | None
    """Trials with an `own_gain` of `REQUIRED_GAIN` or more."""
    span_over_other: Summary | None
    """Span error below that of the features made of another update."""
    label_over_other: Summary | None
    """Label accuracy above that of the labels read off another update."""
    membership_over_other: Summary | None
    """Area under the membership curve above that of the scores made of another update."""
    no_control: str | None
    """Why nothing was made of another update; None if something was, and if nothing was made."""
    guess_public: int | None
    """Public images that the guess was learned from; None where it was not, or is not told."""
    guess_public_per_image: float | None
    """Of them, for each image of the guess."""
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    accuracy: Accuracy | None
    """The same, with chance, the test set's size and an interval; None of runs that do not tell."""
    diverged: int
    """Trials of a recording whose local training diverges."""
    epsilon: float | None
    """inf: no guarantee. None: not accounted."""
    delta: float | None
    accountant: str | None
    unit: str | None
    relation: str | None
    privacy_reason: str | None
    privacy_covers: str | None
    """Which releases the claim is of, in words."""
    audited_epsilon: float | None
    tensor_rate: float | None
    """Mean of what theory predicts of the attack's error, up to a constant; None for most."""
    membership_auc_limit: float | None
    """The most that the privacy claim allows; None if it says nothing of one row's presence."""
    membership_tpr_limit: float | None
    seconds: float | None
    """Mean per trial."""
    strongest: bool = False
    """Whether it worked, is not `blind`, and no other such attack gains more on this defense."""

    @property
    def comparison(self) -> Comparison:
        """Rows that may be compared with each other share it."""
        return (self.scenario, self.variant, self.dataset, self.model, self.server)

    @property
    def standing(self) -> tuple[float, ...]:
        """`strength`, behind whether the attack worked in any trial and saw anything of its update.

        A guess is no attack, and neither is what one knew beforehand.
        """
        return (float(self.n_ok > 0), float(not self.blind), *self.strength)

    @property
    def ranked_by(self) -> str:
        """The metric that decides on the attack's rank: the first that it has."""
        if self.gain:
            return "psnr"
        if self.metrics["subspace_error"]:
            return "subspace_error"
        return "label_accuracy" if self.label_gain else "membership_auc"

    @property
    def blind(self) -> bool:
        """Whether it does no better than on another update, so that it may see nothing in this.

        By the lower end of the interval of what it is ranked by. A trial that no attack gains by
        chance is proof that it sees.
        """
        over = self._over_other(self.ranked_by)
        return over is not None and over.certain <= 0 and not self.exposed

    def _over_other(self, name: str) -> Summary | None:
        return {
            "psnr": self.over_other,
            "subspace_error": self.span_over_other,
            "label_accuracy": self.label_over_other,
            "membership_auc": self.membership_over_other,
        }[name]

    def limit(self, name: str) -> float | None:
        """The most of the metric `name` that the privacy claim allows; None if it says nothing."""
        limits = {
            "membership_auc": self.membership_auc_limit,
            "membership_tpr": self.membership_tpr_limit,
        }
        return limits.get(name) if self.metrics[name] else None

    @property
    def exposed(self) -> bool:
        """Whether a trial leaked for sure, whatever became of the others."""
        return self.own_gain is not None and self.own_gain.max >= EXPOSED_GAIN

    @property
    def guessed_span(self) -> float:
        """Mean span error that the guess of features leaves, in (0, 1]; 1 where none was made."""
        guessed = self.baseline["subspace_error"]
        return 1.0 if guessed is None else max(guessed, _ROUNDING)

    @property
    def guess_problem(self) -> str | None:
        """Why the guess is poor that gains are over; None if it is not, or nothing tells."""
        if self.guess_public is None or self.guess_public_per_image is None:
            return None
        return guess_problem(self.guess_public, self.guess_public_per_image)

    @property
    def warnings(self) -> list[str]:
        """What to know before a figure of this line is believed."""
        found = (self.learning_problem, self.guess_problem, self.no_control)
        return [problem for problem in found if problem]

    @property
    def learning_problem(self) -> str | None:
        """Why the model says nothing of what the defense costs; None if it does."""
        return learning_problem(self.accuracy, self.test_loss) if self.accuracy else None

    @property
    def strength(self) -> tuple[float, float, float, float]:
        """By what attacks are ranked: gain in dB, then share of the features' span recovered, then
        label accuracy above guessing, then membership told better than by a coin."""
        span = self.metrics["subspace_error"]
        return (
            self.gain.mean if self.gain else -math.inf,
            1 - span.mean if span else -math.inf,
            self.label_gain.mean if self.label_gain else -math.inf,
            self.membership_gain.mean if self.membership_gain else -math.inf,
        )


def leaderboard_rows(
    folders: Iterable[Path | str], *, confidence: float = 0.95
) -> list[LeaderboardRow]:
    """Aggregate all runs below `folders`, sorted by comparison, defense, and strength of attack.

    Raises:
        ReportError: a folder holds no results, or a file in it is damaged.
    """
    return aggregate(measurements(load_runs(folders)), confidence=confidence)


def aggregate(rows: Sequence[ResultRow], *, confidence: float = 0.95) -> list[LeaderboardRow]:
    """`leaderboard_rows` of rows that are already read."""
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(row.cell, []).append(row)
    yielded = _yielded(rows)
    lines = [
        _aggregate(group, confidence, yielded.get(group[0].attack.name, COMPARABLE))
        for group in groups.values()
    ]
    return _mark_strongest(_sorted(lines))


def _sorted(lines: list[LeaderboardRow]) -> list[LeaderboardRow]:
    """Undefended first, then the leakiest defense first; within each, the strongest attack first.

    Comparisons with an honest server come first, and else keep the order in which they were read.
    """
    read = dict.fromkeys(line.comparison for line in lines)
    order = {key: i for i, key in enumerate(sorted(read, key=lambda key: key[-1] != "honest"))}
    leak: dict[tuple[object, ...], tuple[float, ...]] = {}  # of the attack that stands highest
    for line in lines:
        key = (*line.comparison, line.defense)
        leak[key] = max(leak.get(key, line.standing), line.standing)

    def rank(line: LeaderboardRow) -> tuple[object, ...]:
        leaked = leak[(*line.comparison, line.defense)]
        return (
            order[line.comparison],
            not line.undefended,
            tuple(-value for value in leaked),
            line.defense,
            tuple(-value for value in line.standing),
            line.attack,
            line.batch_size,
            line.round,
        )

    return sorted(lines, key=rank)


def _mark_strongest(lines: list[LeaderboardRow]) -> list[LeaderboardRow]:
    seen: set[tuple[str, ...]] = set()
    marked = []
    for line in lines:
        key = (*line.comparison, line.defense)
        works = line.n_ok > 0 and not line.blind
        marked.append(replace(line, strongest=key not in seen and works))
        seen.add(key)
    return marked


def _yielded(rows: Sequence[ResultRow]) -> dict[str, tuple[str, ...]]:
    """What each attack was seen to recover anywhere: a failure counts as guessing just that."""
    found: dict[str, tuple[str, ...]] = {}
    for row in rows:
        if row.ok:
            own = tuple(name for name in COMPARABLE if _of(row.metrics, name) is not None)
            known = found.get(row.attack.name, ())
            found[row.attack.name] = tuple(n for n in COMPARABLE if n in known or n in own)
    return found


def _aggregate(rows: list[ResultRow], confidence: float, yielded: Sequence[str]) -> LeaderboardRow:
    first, apart = rows[0], units(rows)

    def measured(values: Sequence[float | None] | None) -> list[float]:
        """Of one value per row, where it has one; rows that share an image give their mean."""
        known = [[v for i in unit if (v := values[i]) is not None] for unit in apart if values]
        return [sum(each) / len(each) for each in known if each]

    def summary(values: Sequence[float | None] | None) -> Summary | None:
        return summarize(measured(values), confidence=confidence)

    def gained(name: str) -> list[float] | None:
        return gains(rows, name) if name in yielded else None

    values = {name: _counted(rows, name) if name in yielded else None for name in COMPARABLE}
    ok = [row for row in rows if row.ok]
    own = measured(own_gains(rows)) if "psnr" in yielded else []
    learned = [row.baseline for row in rows if row.baseline]
    # Two runs' claims would only differ if they were not the same; then the weaker one stands.
    weakest = max(rows, key=lambda row: -1.0 if row.epsilon is None else row.epsilon)
    privacy = weakest.claimed
    return LeaderboardRow(
        cell=first.cell,
        scenario=first.scenario,
        variant=describe_variant(first.variant),
        folders=tuple(sorted({str(row.folder) for row in rows})),
        dataset=first.dataset,
        model=first.computed,
        subject=first.subject,
        defense=first.defense.name,
        stack=describe_stack(first.defense.stack),
        undefended=not first.defense.stack,
        attack=first.attack.label,
        vantage=first.vantage,
        server=first.server,
        knowledge=first.knowledge,
        batch_size=first.batch_size,
        round=first.round,
        n=len(rows),
        n_ok=len(ok),
        images=images(rows),
        independent=len(apart),
        failures=dict(Counter(row.reason or "no reason given" for row in rows if not row.ok)),
        metrics={name: summary(values[name]) for name in COMPARABLE},
        worst={name: _worst(rows, name, values[name]) for name in COMPARABLE},
        baseline={name: _guess(rows, name) for name in COMPARABLE},
        gain=summary(gained("psnr")),
        label_gain=summary(gained("label_accuracy")),
        membership_gain=summary(gained("membership_auc")),
        other_update=summary([_of(_other(row), "psnr") for row in rows]),
        over_other=summary(over_other(rows, "psnr")),
        own_gain=summarize(own, confidence=confidence),
        leaking=share(sum(v >= REQUIRED_GAIN for v in own), len(own), confidence=confidence)
        if own
        else None,
        span_over_other=summary(over_other(rows, "subspace_error")),
        label_over_other=summary(over_other(rows, "label_accuracy")),
        membership_over_other=summary(over_other(rows, "membership_auc")),
        no_control=_no_control(rows),
        guess_public=min((b.public for b in learned if b.public is not None), default=None),
        guess_public_per_image=min(
            (b.public_per_image for b in learned if b.public_per_image is not None), default=None
        ),
        train_loss=_mean(rows, lambda row: row.utility.train_loss if row.utility else None),
        test_loss=_mean(rows, lambda row: row.utility.test_loss if row.utility else None),
        test_accuracy=_mean(rows, lambda row: row.utility.test_accuracy if row.utility else None),
        accuracy=accuracy_of([r.utility for r in rows if r.utility], confidence=confidence),
        diverged=sum(bool(row.utility and row.utility.diverged) for row in rows),
        epsilon=weakest.epsilon,
        delta=privacy.delta if privacy else None,
        accountant=privacy.accountant if privacy else None,
        unit=privacy.unit if privacy else None,
        relation=privacy.relation if privacy else None,
        privacy_reason=privacy.reason if privacy else None,
        privacy_covers=privacy.covers if privacy else None,
        audited_epsilon=max(
            _present(rows, lambda row: row.privacy.audited_epsilon if row.privacy else None),
            default=None,
        ),
        tensor_rate=_mean(rows, lambda row: row.theory.tensor_rate if row.theory else None),
        membership_auc_limit=_mean(
            rows, lambda row: row.theory.membership_auc if row.theory else None
        ),
        membership_tpr_limit=_mean(
            rows, lambda row: row.theory.membership_tpr if row.theory else None
        ),
        seconds=_mean(rows, lambda row: row.cost.seconds if row.cost else None),
    )


def _no_control(rows: list[ResultRow]) -> str | None:
    ok = [row for row in rows if row.ok]
    if not ok or any(_other(row) for row in ok):
        return None
    if len(rows) == 1:
        return "no control: one trial"
    return "no control: one trial worked" if len(ok) == 1 else "no control: no other images"


def _counted(rows: list[ResultRow], name: str) -> list[float] | None:
    """One value per row, a failed row's being its zero-information guess.

    None if the attack does not yield this metric, or if a failed row has no guess to count as: no
    figure is better than one that leaves failures out.
    """
    ok = [_of(row.metrics, name) for row in rows if row.ok]
    if ok and None in ok:
        return None
    values = [_of(row.metrics, name) if row.ok else _guessed(row, name) for row in rows]
    known = [value for value in values if value is not None]
    return known if len(known) == len(rows) else None


def _guessed(row: ResultRow, name: str) -> float | None:
    value = _of(row.baseline, name)
    return METRICS[name].uninformed if value is None else value


def _guess(rows: list[ResultRow], name: str) -> float | None:
    return _mean(rows, lambda row: _of(row.baseline, name))


def _worst(rows: list[ResultRow], name: str, values: list[float] | None) -> float | None:
    if values is None:
        return None
    images = [v for row in rows if row.ok for v in (row.per_image or {}).get(name, [])]
    return (max if METRICS[name].larger_leaks else min)([*values, *images])


def _other(row: ResultRow) -> Metrics | None:
    return row.control.other_update if row.control else None


def _of(metrics: Metrics | None, name: str) -> float | None:
    return metrics[name] if metrics else None


def accuracy_of(
    evaluated: Sequence[UtilityOf | RoundRow], *, confidence: float = 0.95
) -> Accuracy | None:
    """Of the mean over runs, which have one test set; of the smallest if they do not.

    None if one of them does not tell what it was tested on.
    """
    told = [u for u in evaluated if u.test_accuracy is not None]
    sizes = [(u.test_examples, u.test_chance) for u in told if u.test_examples and u.test_chance]
    if not told or len(sizes) < len(told):
        return None
    share = sum(u.test_accuracy or 0.0 for u in told) / len(told)
    return accuracy(share, *min(sizes), confidence=confidence)


def _present(rows: list[ResultRow], get: Callable[[ResultRow], float | None]) -> list[float]:
    return [value for row in rows if (value := get(row)) is not None]


def _mean(rows: list[ResultRow], get: Callable[[ResultRow], float | None]) -> float | None:
    values = _present(rows, get)
    return sum(values) / len(values) if values else None
