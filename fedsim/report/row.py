"""A line of the leaderboard, and how its attack ranks among those on the same defense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedsim.contracts.grant import Grant
from fedsim.results.lines import ControlKind, Subject
from fedsim.results.threat_model import ThreatModel
from fedsim.scoring import Accuracy, Share, Summary, guess_problem, learning_problem
from fedsim.types import Server, watcher_of
from fedsim.words import number_of

Comparison = tuple[str, str, str, str, ThreatModel, str]
"""(scenario, variant, data source, model, threat model, who looks): rows of one may be ranked, of
two never."""

REQUIRED_GAIN = 3.0
"""A trial leaks if it gains at least so many dB over the zero-information guess and over another
update."""

EXPOSED_GAIN = 10.0
"""No attack gains so many dB over guessing and over another update by chance. One such trial is a
leak, even if the interval of all trials reaches below 0."""

EXPOSED_IMAGE = 15.0
"""A single image is a leak if it is by so many dB better than its own guess and than what the same
attack draws of it from another update, however many of its batch stay hidden. More than
`EXPOSED_GAIN`, since the best of many images is chosen."""

LIKENESS_GAIN = 0.2
"""Structure (SSIM) or perceived likeness (LPIPS) leaks from so much beyond the guess and another
update, whatever the pixels: pictures of other colors have a low PSNR."""

RECOGNIZABLE_LPIPS = 0.3
"""Pictures that leak by their perceptual distance are recognizable up to this mean."""

RECOGNIZABLE_SSIM = 0.5
"""Pictures of a leak are recognizable from this mean SSIM on."""

RECOGNIZABLE_PSNR = 20.0
"""Pictures of a leak whose SSIM was not measured are recognizable from this mean PSNR on, dB."""

_ROUNDING = 1e-9
"""A guess's span error counts as at least this, so that shares of it stay finite."""


OTHERS: Mapping[ControlKind | None, str] = {
    "client": "another client’s update",
    "public": "an update of public images",
    "batch": "another batch of the same client",
    "release": "another release",
}
"""What a control is of, in words."""


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """How much more alike pictures are than the guess, and than those of another update."""

    over_guess: Summary
    own: Summary
    """The lesser of both, trial by trial; `over_guess` without any control."""


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """What an attack said that it knows of its answers, in images of all its trials."""

    images: int
    """That it answered with."""
    determined: int | None
    """None if it says nothing of that."""
    certified: int | None
    """None if it certifies nothing."""
    false: int | None
    """Certified images that are not right, by the truth; None if that was not compared."""


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow:
    """One attack on one defense, over all its trials."""

    cell: str
    """`ResultRow.cell` of its trials."""
    scenario: str
    variant: str
    folders: tuple[str, ...]
    """Folders of the runs that the trials are from."""
    dataset: str
    model: str
    """Name of the model, or of the learner if it trains no model."""
    subject: Subject
    """What the attack is after."""
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
    """Number of trials."""
    n_ok: int
    images: int | None
    """Number of different images, or rows of a table, that were attacked; None if the rows do not
    say."""
    independent: int
    """Number of independent trials: those that share an image count once. Every summary and
    interval is over these."""
    failures: dict[str, int]
    """Reason -> number of trials that failed for it."""
    metrics: dict[str, Summary | None]
    worst: dict[str, float | None]
    """The most that leaked in one trial, or of one image where the rows have values per image."""
    baseline: dict[str, float | None]
    """Mean of the zero-information guess."""
    gain: Summary | None
    """PSNR above the zero-information guess, dB."""
    label_gain: Summary | None
    """Label accuracy above guessing the majority label."""
    membership_gain: Summary | None
    """Area under the membership curve above 0.5, a coin's."""
    other_update: Summary | None
    """PSNR against this truth of what the same attack reconstructs from another update."""
    over_other: Summary | None
    """PSNR above `other_update`, dB: the part of the gain that is due to this update."""
    own_gain: Summary | None
    """The lesser of `gain` and `over_other`, trial by trial, dB; of trials with a control, if any
    has one."""
    leaking: Share | None
    """Share of trials whose gain that is `due` is `REQUIRED_GAIN` or more."""
    span_over_other: Summary | None
    """By how much the span error is below that of features reconstructed from another update."""
    label_over_other: Summary | None
    """By how much label accuracy is above that of labels inferred from another update."""
    membership_over_other: Summary | None
    """By how much the area under the membership curve is above that of scores of another update."""
    no_control: str | None
    """Why the attack was not run on another update; None if it was, or if every trial failed."""
    control: ControlKind | None = None
    """What the other update is of; of trials that differ the weakest. None without any, and where
    rows do not say."""
    uncontrolled: int = 0
    """Number of trials with an answer and no control, where others have one."""
    likeness: Mapping[str, Likeness] = field(default_factory=dict)
    """Of SSIM and LPIPS, where they were measured beside a guess."""
    exposed_image: float | None = None
    """PSNR of the best image that is a leak by itself, dB (see `EXPOSED_IMAGE`)."""
    may_expose: bool = False
    """Whether a trial, or an image of one, is so good that chance does not explain it away, though
    it makes nothing certain."""
    ignores_update: bool = False
    """Whether the attack never looks at the update."""
    guess_public: int | None
    """Number of public images that the guess was learned from; None if it learned from none, or the
    rows do not say."""
    guess_public_per_image: float | None
    """Number of public images for each image of the guess."""
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    accuracy: Accuracy | None
    """Test accuracy with chance, the test set's size and an interval; None if the runs do not
    say."""
    diverged: int
    """Number of trials on recordings whose local training diverges."""
    epsilon: float | None
    """inf: nothing is guaranteed. None: it was not accounted."""
    delta: float | None
    accountant: str | None
    unit: str | None
    relation: str | None
    privacy_reason: str | None
    privacy_covers: str | None
    """Which releases the claim covers, in words."""
    audited_epsilon: float | None
    tensor_rate: float | None
    """Mean of the error that theory predicts, up to a constant; None for most attacks."""
    membership_auc_limit: float | None
    """The largest area that the privacy claim allows; None if it does not bound membership."""
    membership_tpr_limit: float | None
    seconds: float | None
    """Mean seconds of a trial."""
    certificates: Certificates | None = None
    """What the attack said that it knows, summed over the trials; None if it said nothing."""
    networks: int = 1
    """Number of networks attacked, one of each run: its trials share weights and partition."""
    clients: int = 1
    """Number of clients attacked, over all networks."""
    near_copies: int = 0
    """Number of attacked images, over all trials, of which a public one is a near copy."""
    recognizable: int = 0
    """Number of trials that leak, with pictures that are recognizable."""
    ended: bool = True
    """Whether its runs have ended, and are scored to their end."""
    masked: bool = False
    """Whether the attacked update is a client's masked part of a secure sum."""
    strongest: bool = False
    """Whether the attack worked, is not `blind`, and gains most on this defense of all such
    attacks."""

    @property
    def comparison(self) -> Comparison:
        """Identifies the comparison; only rows of one comparison are ranked together."""
        watcher = watcher_of(self.vantage)
        return (self.scenario, self.variant, self.dataset, self.model, self.threat, watcher)

    @property
    def server(self) -> Server:
        """What the server has done to the model."""
        return self.threat.server

    @property
    def sight(self) -> str:
        """Names what is seen: "masked" (a part of a secure sum), else the vantage.

        Empty for a client's update as the server sees it, which is the usual case.
        """
        if self.masked:
            return "masked"
        return "" if self.vantage == "server" else self.vantage

    @property
    def attack_on(self) -> str:
        """Names the attack, and what it is on behind defenses that combine updates."""
        combined = self.masked or self.vantage == "aggregate"
        return f"{self.attack} ({self.sight})" if combined else self.attack

    @property
    def population(self) -> str:
        """Says of what an interval of this line is: its trials vary images, and little else."""
        clients = number_of(self.clients, "client")
        if self.networks > 1:
            return f"of {self.networks} networks" + f" and {clients}" * (
                self.vantage != "aggregate"
            )
        whose = "this client" if self.clients == 1 else clients
        return "of this network" + f" and {whose}" * (self.vantage != "aggregate")

    @property
    def standing(self) -> tuple[float, ...]:
        """Sort key of attacks: `strength`, behind whether a trial worked and is not `blind`."""
        return (float(self.n_ok > 0), float(not self.blind), *self.strength)

    @property
    def ranked_by(self) -> str:
        """Name of the metric that decides the attack's rank: the first that it has a value of."""
        if self.gain:
            return "psnr"
        if self.metrics["subspace_error"]:
            return "subspace_error"
        return "label_accuracy" if self.label_gain else "membership_auc"

    @property
    def blind(self) -> bool:
        """Whether the attack does no better on this update than on another one.

        It then may read nothing off this update. Judged by the lower end of the interval of the
        metric that ranks it. A trial that no attack gains by chance proves that the attack reads
        the update.
        """
        return self.is_blind_by(self.ranked_by)

    def is_blind_by(self, name: str) -> bool:
        """Whether it is `blind` by metric `name`.

        Another batch of the same client tells nothing: look-alikes are drawn as well from it. What
        then remains is `undecided`.
        """
        over = self.above_other(name)
        lost = over is not None and over.certain <= 0 and self.control != "batch"
        return self.ignores_update or (lost and not self.exposed)

    @property
    def is_decided(self) -> bool:
        """Whether a control could tell what was read from what was known."""
        return self.no_control is None and self.control != "batch"

    def above_other(self, name: str) -> Summary | None:
        """Returns by how much metric `name` leaks more of its own update than of another.

        None without that control, and for metrics that have none.
        """
        return {
            "psnr": self.over_other,
            "subspace_error": self.span_over_other,
            "label_accuracy": self.label_over_other,
            "membership_auc": self.membership_over_other,
        }.get(name)

    def above_guess(self, name: str) -> Summary | None:
        """Returns by how much metric `name` leaks more than the guess, trial by trial.

        None where that was not measured, and for metrics of which only means are compared.
        """
        return {
            "psnr": self.gain,
            "label_accuracy": self.label_gain,
            "membership_auc": self.membership_gain,
        }.get(name)

    def limit(self, name: str) -> float | None:
        """Returns the most of metric `name` that the privacy claim allows, if it bounds it."""
        limits = {
            "membership_auc": self.membership_auc_limit,
            "membership_tpr": self.membership_tpr_limit,
        }
        return limits.get(name) if self.metrics[name] else None

    @property
    def exposed(self) -> bool:
        """Whether one trial, or one image, certainly leaked, whatever the others did."""
        if self.own_gain is None or self.ignores_update or self.no_control:
            return False
        return self.own_gain.max >= EXPOSED_GAIN or self.exposed_image is not None

    @property
    def due(self) -> Summary | None:
        """The gain that counts: the part due to this update, where a control can tell it."""
        return self.own_gain if self.is_decided else self.gain

    @property
    def other(self) -> str:
        """Words what the attack is compared with besides the guess."""
        return OTHERS.get(self.control, "another update")

    @property
    def guessed_span(self) -> float:
        """Mean span error of the guess of features, in (0, 1]; 1 if no guess was made."""
        guessed = self.baseline["subspace_error"]
        return 1.0 if guessed is None else max(guessed, _ROUNDING)

    @property
    def guess_problem(self) -> str | None:
        """Why the guess is poor that gains refer to; None if it is good, or not described."""
        if self.guess_public is None or self.guess_public_per_image is None:
            return None
        return guess_problem(self.guess_public, self.guess_public_per_image, self.near_copies)

    @property
    def warnings(self) -> list[str]:
        """Lists what a reader must know before believing a figure of this line."""
        problems = (self.learning_problem, self.guess_problem, self.no_control)
        return [problem for problem in problems if problem]

    @property
    def learning_problem(self) -> str | None:
        """Why the model cannot show what the defense costs; None if it can."""
        if self.accuracy is None:
            return None
        return learning_problem(self.accuracy, self.test_loss, trains=self.subject == "images")

    @property
    def strength(self) -> tuple[float, float, float, float]:
        """Values that rank attacks, the first deciding.

        Gain in dB that is due to this update, share of the features' span that was recovered, label
        accuracy above guessing, and membership AUC above a coin's; -inf for what an attack does not
        recover.
        """
        span = self.metrics["subspace_error"]
        return (
            self.due.mean if self.due else -math.inf,
            1 - span.mean if span else -math.inf,
            self.label_gain.mean if self.label_gain else -math.inf,
            self.membership_gain.mean if self.membership_gain else -math.inf,
        )


def population_of(rows: Sequence[LeaderboardRow]) -> str:
    """Says of what the intervals of `rows` are, of all lines at once where these agree."""
    populations = {row.population for row in rows}
    return min(populations) if len(populations) == 1 else "of the networks and clients of each line"
