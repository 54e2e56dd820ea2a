"""A line of the leaderboard, how its attack ranks on its defense, and its figures as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.contracts.grant import Grant
from fedsim.contracts.target import Target, ranking_targets, targets
from fedsim.report.figures import format_metric, format_number, format_percent, format_signed
from fedsim.report.threat import Comparison as Comparison
from fedsim.report.threat import ThreatModel
from fedsim.results.lines import ControlKind
from fedsim.scoring import (
    METRICS,
    Accuracy,
    Metric,
    Share,
    Summary,
    guess_problem,
    learning_problem,
)
from fedsim.types import Manipulation, watcher_of
from fedsim.words import number_of

_ROUNDING = 1e-9
"""A guess counts as at least this, so that shares of it stay finite."""

_REFUTING_LEVEL = 0.05
"""Largest chance that members told refute a claim that holds."""
OTHERS: Mapping[ControlKind | None, str] = {
    "client": "another client’s update",
    "public": "an update of public images",
    "batch": "another batch of the same client",
    "release": "another release",
}


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Gains in a metric of likeness over the guess, and, as `own`, over another update as well."""

    over_guess: Summary
    own: Summary
    """The lesser of both gains, trial by trial; `over_guess` without any control."""


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """What an attack said that it knows of its answers, in images of all trials; None: not said.

    It answered with `images`. The update leaves one answer to `determined` of them. The attack
    says of `certified` ones that they are right, and `false` of these are not (None: not compared).
    """

    images: int
    determined: int | None
    certified: int | None
    false: int | None


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow:
    """One attack on one defense, over all its trials: a line of the leaderboard.

    None is what no trial states, and what does not apply. `n` counts trials, `n_ok` those with an
    answer, `images` the different images in them, and `failures` the others by reason. A failed
    trial counts as its guess. `cell` is that of its `ResultRow`s, `variant` the sweep's assignment
    in words (empty without one), and `folders` are those of the runs. `model` names the model, or a
    learner that has none; `subject` is `images` or `rows`. The stack `defense` has the members
    `stack` in words, or is `undefended`. The `attack` is named by its label.

    `metrics`, `worst` and `baseline` have every metric by name: its mean, the value of the trial or
    image that leaked most, and the guess's mean. `leaking` counts trials whose gain due to the
    update is a leak, and `recognizable` those of them with a recognizable picture. `exposed_image`
    is the PSNR, dB, of the best image that leaks by itself; `may_expose` says whether a trial or an
    image shows what chance does not explain. The `control` is the other update that the attack was
    run on, or `no_control` says why none; `uncontrolled` trials lack one where others have it.
    `ignores_update`: the attack never looks at the update. `unaware`: it was not told of defenses.
    `masked`: it saw a client's part of a secure sum. `strongest`: it is the first of the informed
    attacks on its defense.

    The guess is learned from `guess_public` images, `guess_public_per_image` for each of its own,
    and `near_copies` attacked images have a near copy among them. Losses and accuracy (in [0, 1])
    are means over runs; `diverged` counts trials whose local training more than doubled its loss.
    `networks` and `clients` count what intervals are of; `seconds` are a trial's mean. `ended`: the
    runs have ended and are scored. The row has the largest ε and δ of all trials' claims, and the
    terms that all share. An ε of inf has the reason `privacy_reason`. `audited_epsilon` is the
    largest lower bound by canaries, and `membership_p` the p-value of the claim by members told,
    corrected for all attempts. `tensor_*` and `limit_*` are as in `TheoryOf`.
    """

    cell: str
    scenario: str
    variant: str
    folders: tuple[str, ...]
    dataset: str
    model: str
    subject: str
    defense: str
    stack: str
    undefended: bool
    attack: str
    vantage: str
    threat: ThreatModel
    knowledge: Grant
    batch_size: int
    round: int
    n: int
    n_ok: int
    images: int | None
    independent: int
    """Number of trials that share no image, which summaries are of."""
    failures: dict[str, int]
    metrics: dict[str, Summary | None]
    worst: dict[str, float | None]
    baseline: dict[str, float | None]
    gains: Mapping[str, Summary]
    """Metric -> how much more leaks than the zero-information guess, trial by trial."""
    own_gains: Mapping[str, Summary]
    """Metric -> the lesser of what leaks over the guess and over another update, trial by trial; of
    trials with a control, if any has one."""
    others: Mapping[str, Summary]
    """Metric -> summary of the same attack's answers to another update, by this one's truths."""
    over_others: Mapping[str, Summary]
    """Metric -> how much more leaks of the own update than of another."""
    leaking: Share | None
    no_control: str | None
    control: ControlKind | None = None
    uncontrolled: int = 0
    exposed_image: float | None = None
    may_expose: bool = False
    ignores_update: bool = False
    unaware: bool = False
    guess_public: int | None
    guess_public_per_image: float | None
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    accuracy: Accuracy | None
    diverged: int
    epsilon: float | None
    delta: float | None
    accountant: str | None
    unit: str | None
    relation: str | None
    privacy_reason: str | None
    privacy_covers: str | None
    audited_epsilon: float | None
    tensor_rate: float | None
    tensor_bound: float | None
    tensor_bound_reason: str | None
    limits: Mapping[str, float]
    """Metric -> the most that the privacy claim allows, the mean over trials."""
    membership_p: float | None = None
    limit_prior: str | None
    limit_reason: str | None
    seconds: float | None
    certificates: Certificates | None = None
    claimed_epsilon: float | None = None
    networks: int = 1
    clients: int = 1
    near_copies: int = 0
    recognizable: int = 0
    ended: bool = True
    masked: bool = False
    strongest: bool = False

    @property
    def comparison(self) -> Comparison:
        """(scenario, variant, data, model, threat model, who looks): rows ranked together."""
        watcher = watcher_of(self.vantage)
        return (self.scenario, self.variant, self.dataset, self.model, self.threat, watcher)

    @property
    def server(self) -> Manipulation:
        """Manipulation of the model by the server: `honest`, `planted` or `modified`."""
        return self.threat.server

    @property
    def sight(self) -> str:
        """What is seen: `masked` (part of a secure sum), or a vantage; empty for the server's."""
        if self.masked:
            return "masked"
        return "" if self.vantage == "server" else self.vantage

    @property
    def attack_on(self) -> str:
        """Name of the attack, as `idlg (aggregate)` where the defense combines clients' updates."""
        combined = self.masked or self.vantage == "aggregate"
        return f"{self.attack} ({self.sight})" if combined else self.attack

    @property
    def population(self) -> str:
        """Text that names the networks and clients that this line's intervals are of."""
        clients = number_of(self.clients, "client")
        if self.networks > 1:
            return f"of {self.networks} networks" + f" and {clients}" * (
                self.vantage != "aggregate"
            )
        whose = "this client" if self.clients == 1 else clients
        return "of this network" + f" and {whose}" * (self.vantage != "aggregate")

    @property
    def standing(self) -> tuple[float, ...]:
        """Sort key, larger if stronger: a trial worked, the attack is informed, then `strength`."""
        return (float(self.n_ok > 0), float(not self.is_uninformed), *self.strength)

    @property
    def target(self) -> Target:
        """Kind of leak by which the attack is ranked: the first that it answered, else `main`."""
        for name, target in ranking_targets().items():
            answered = self.metrics[name] if target.ranks_by == "mean" else self.gains.get(name)
            if answered:
                return self.main if name == self.main.ranking.name else target
        return self.main

    @property
    def main(self) -> Target:
        """Kind of leak that attacks on what was observed are after by default: images or rows."""
        return targets()[self.subject]

    @property
    def ranked_by(self) -> str:
        """Name of the metric that decides the attack's rank: the first that it has a value of."""
        return self.target.ranking.name

    @property
    def is_uninformed(self) -> bool:
        """Whether the attack does no better on this update than on another one.

        The lower end of the interval of the metric that ranks the attack decides. It is True if the
        attack `ignores_update`, else False if something is `exposed`, or not `is_decided`.
        """
        return self._is_uninformed_by(self.ranked_by)

    def _is_uninformed_by(self, name: str) -> bool:
        over = self.above_other(name)
        lost = over is not None and over.certain <= 0 and self.control != "batch"
        return self.ignores_update or (lost and not self.exposed)

    @property
    def is_decided(self) -> bool:
        """Whether a control tells what was read off the update from what was known before.

        False if there is none (`no_control`), or it is another batch of the same client.
        """
        return self.no_control is None and self.control != "batch"

    def above_other(self, name: str) -> Summary | None:
        """Returns the gain over another update in `name`, if that is a ranking metric; or None."""
        return self.over_others.get(name) if name in ranking_targets() else None

    def above_guess(self, name: str) -> Summary | None:
        """Returns the gain over the guess in metric `name`; None without one.

        It is None, too, if no target ranks by `name`, or one that `ranks_by` its mean.
        """
        target = ranking_targets().get(name)
        return self.gains.get(name) if target and target.ranks_by != "mean" else None

    def limit(self, name: str) -> float | None:
        """Returns the most of metric `name` that the privacy claim allows.

        None: the claim says nothing of it, or the metric was not measured. An unknown metric is a
        KeyError.
        """
        return self.limits.get(name) if self.metrics[name] else None

    @property
    def is_refuted_by_members(self) -> bool:
        """Whether members told refute the privacy claim, at a level of 5% (`membership_p`)."""
        return self.membership_p is not None and self.membership_p <= _REFUTING_LEVEL

    @property
    def exposed(self) -> bool:
        """Whether a trial or image certainly leaked, whatever others did; False if uncontrolled."""
        if self.ignores_update or self.no_control:
            return False
        certain = (
            own.max >= target.exposes
            for name, target in ranking_targets().items()
            if target.exposes is not None and (own := self.own_gains.get(name))
        )
        return any(certain) or self.exposed_image is not None

    @property
    def due(self) -> Summary | None:
        """Gain that counts, in the metric that ranks `main`: of pictures PSNR, in dB; None without.

        It is the lesser of the gains over the guess and over another update, where a control can
        tell (`is_decided`). Else it is that over the guess.
        """
        return self._due_by(self.main.ranking.name)

    def _due_by(self, name: str) -> Summary | None:
        return (self.own_gains if self.is_decided else self.gains).get(name)

    @property
    def other(self) -> str:
        """Text that names what the attack is compared with beside the guess (its control)."""
        return OTHERS.get(self.control, "another update")

    def guess_of(self, name: str) -> float:
        """Returns the guess's mean of metric `name`, else an uninformed answer's; at least 1e-9."""
        guess, metric = self.baseline[name], METRICS[name]
        guess = (metric.uninformed or 0.0) if guess is None else guess
        return max(guess, _ROUNDING)

    @property
    def guess_problem(self) -> str | None:
        """Reason why the guess that gains refer to is poor; None if good, or not described."""
        if self.guess_public is None or self.guess_public_per_image is None:
            return None
        # Shares and members are guessed from all public examples at once, or by a coin.
        itemwise = [target for target in targets().values() if target.itemwise]
        each = any(self.metrics[metric.name] for target in itemwise for metric in target.metrics)
        needed = self.guess_public_per_image if each and self.n_ok else math.inf
        return guess_problem(self.guess_public, needed, self.near_copies)

    @property
    def warnings(self) -> list[str]:
        """Texts that a reader must know before believing a figure of this line."""
        problems = (self.learning_problem, self.guess_problem, self.control_problem)
        return [problem for problem in problems if problem]

    @property
    def control_problem(self) -> str | None:
        """Reason why there is no control; None if there is one, or none is needed."""
        answered = [t for t in targets().values() if self.metrics[t.ranking.name]]
        if answered and all(target.of_all_clients for target in answered):
            return None
        return self.no_control

    @property
    def learning_problem(self) -> str | None:
        """Reason why the model cannot show what the defense costs; None if none is known."""
        if self.accuracy is None:
            return None
        trains = "update" in self.main.payloads
        return learning_problem(self.accuracy, self.test_loss, trains=trains)

    @property
    def strength(self) -> tuple[float, ...]:
        """`strength_by` each metric that ranks attacks; the first that differs decides."""
        return tuple(self.strength_by(name) for name in ranking_targets())

    def strength_by(self, name: str) -> float:
        """Returns the value that ranks the attack by metric `name`: the larger, the stronger.

        Images are ranked by the gain due to this update, labels and members by that over the guess.
        Features are ranked by the share of their span that was recovered. The value is -inf without
        an answer. A metric that ranks no attack is a KeyError.
        """
        target = ranking_targets()[name]
        uninformed = target.ranking.uninformed
        if target.ranks_by == "mean":
            mean = self.metrics[name]
            return target.ranking.gain(mean.mean, uninformed or 0.0) if mean else -math.inf
        gain = self._due_by(name) if target.ranks_by == "own" else self.gains.get(name)
        return gain.mean if gain else -math.inf

    @property
    def means(self) -> dict[str, float | None]:
        """Metric -> its mean; None where it was not measured."""
        return {name: each.mean if each else None for name, each in self.metrics.items()}

    @property
    def gain(self) -> Summary | None:
        """Gain of the main target over the guess: of pictures PSNR, in dB; None without any."""
        return self.gains.get(self.main.ranking.name)

    @property
    def own_gain(self) -> Summary | None:
        """Lesser of `gain` and `over_other`, trial by trial; without a control it is `gain`."""
        return self.own_gains.get(self.main.ranking.name)

    @property
    def over_other(self) -> Summary | None:
        """Gain of `main` over the same attack's answer to another update; None if there is none."""
        return self.over_others.get(self.main.ranking.name)

    @property
    def likeness(self) -> Mapping[str, Likeness]:
        """Metric of likeness, such as `ssim` -> its gains, where measured beside a guess."""
        return {
            name: Likeness(over_guess=self.gains[name], own=self.own_gains[name])
            for name in self.main.likeness
            if name in self.gains and name in self.own_gains
        }


def population_of(rows: Sequence[LeaderboardRow]) -> str:
    """Returns a text that names the networks and clients that the intervals of `rows` are of."""
    populations = {row.population for row in rows}
    return min(populations) if len(populations) == 1 else "of the networks and clients of each line"


def by_comparison(rows: Sequence[LeaderboardRow]) -> dict[Comparison, list[LeaderboardRow]]:
    """Returns comparison -> its rows, both in the order of `rows`."""
    groups: dict[Comparison, list[LeaderboardRow]] = {}
    for row in rows:
        groups.setdefault(row.comparison, []).append(row)
    return groups


ABSENT = "–"
"""Stands where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Holds the figures of one metric of a row, as text; a dash where nothing was measured."""

    metric: Metric
    value: str
    """Mean over trials, with its interval where the metric shows one."""
    guess: str
    above: str
    """Gain over the guess, with its sign and interval; positive where more leaks."""
    above_other: str
    """Gain over the same attack's answer to another update; a dash without that control."""
    worst: str
    """Value of the trial or image that leaked most."""
    limit: str
    """The most that the privacy claim allows."""

    @property
    def heading(self) -> str:
        """Name of the metric as a column has it, without its unit."""
        return heading_of(self.metric)

    @property
    def words(self) -> str:
        """Text of the metric's name and mean, as `PSNR 18.2 [16.9, 19.4]`."""
        return f"{self.heading} {self.value}"


def heading_of(metric: Metric) -> str:
    """Returns the name of a metric for people, without its unit."""
    return (metric.heading or metric.name.replace("_", " ")).removesuffix(" dB")


def metrics_of(row: LeaderboardRow) -> list[Measured]:
    """Returns the figures of all metrics that `row` has; the one that ranks the row comes first."""
    names = [name for name, summary in row.metrics.items() if summary]
    names.sort(key=lambda name: name != row.ranked_by)
    return [measure_row(row, name) for name in names]


def measure_row(row: LeaderboardRow, name: str) -> Measured:
    """Returns the figures of metric `name`; dashes, but for the guess, if all trials failed."""
    metric, value, guess = METRICS[name], row.metrics.get(name), row.baseline.get(name)
    guess = metric.uninformed if guess is None else guess
    above = _format_gain(paired := row.above_guess(name), metric)
    if paired is None and value is not None and guess is not None:
        above = _with_sign(metric.gain(value.mean, guess), metric)
    figures = {
        "value": format_metric(value, metric),
        "above": above,
        "above_other": _format_gain(row.above_other(name), metric),
        "worst": _plain(row.worst.get(name), metric),
        "limit": _plain(row.limit(name), metric),
    }
    shown = figures if row.n_ok else dict.fromkeys(figures, ABSENT)
    return Measured(metric=metric, guess=_plain(guess, metric), **shown)


def _format_gain(summary: Summary | None, metric: Metric) -> str:
    if summary is None:
        return ABSENT
    text = _with_sign(summary.mean, metric)
    if summary.low is None or summary.high is None:
        return text
    return f"{text} [{_with_sign(summary.low, metric)}, {_with_sign(summary.high, metric)}]"


def _with_sign(value: float, metric: Metric) -> str:
    if metric.shown_as == "percent":
        return f"{format_signed(100 * value, 0)}%"
    return format_signed(value, metric.digits)


def _plain(value: float | None, metric: Metric) -> str:
    if metric.shown_as == "percent":
        return format_percent(value)
    return format_number(value, metric.digits)
