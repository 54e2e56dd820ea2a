"""Defines the target contract: a kind of leak, and everything that is particular to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedsim.contracts import plugins
from fedsim.contracts.grant import Grant
from fedsim.contracts.metric import (
    GuessChances,
    Metric,
    MetricValue,
    ScoredPair,
    ScoringError,
    Unavailable,
    align,
)
from fedsim.contracts.plugins import Plugin
from fedsim.types import Observation, Payload, Reconstruction, Tensors, Truth


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Holds what a run has for scores, besides answers and truths."""

    guesser: Any = None
    """Guesser of batches from public images (`fedsim.scoring.Guesser`); None without these."""
    lpips_backbone: Literal["alex", "vgg", "squeeze"] = "alex"
    lpips_weights: str | None = None
    """Path of the backbone's weights; None for those that torchvision has here, if any."""


@dataclass(frozen=True)
class HeldExamples:
    """Reads a client's (inputs, labels) anew at each call, as `examples_at` of its data."""

    read: Callable[[], tuple[Tensor, Tensor]]
    """Function that does so."""
    labels: Tensor
    """(n,) int64: their labels alone, counted from 0."""
    classes: int
    """Number of classes; 0 where labels mean none."""

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Returns inputs (n, ...) and labels (n,) of all examples."""
        return self.read()


Aids = Mapping[str, Any]
"""Part of a target -> what it prepared for scores (`Target.prepare`)."""


@dataclass(frozen=True, kw_only=True)
class TargetScores:
    """Holds the comparison of an answer with the truth by all metrics of one target."""

    values: Mapping[str, MetricValue]
    """Metric -> its values: (n,) in the order of the truths, without `missing` ones, or a float for
    all. An `Unavailable` has the reason why there are none."""
    assignment: list[int] = field(default_factory=list)
    """Index of the answer that was scored against each truth; -1: none. Empty without a match."""
    missing: int = 0
    """Number of truths without an answer or a guess in its place; metrics leave them out."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Metric -> how it was computed, where only like values compare."""

    def per_image(self) -> dict[str, list[float]]:
        """Returns metric -> one value for each truth, of metrics that have such, as in `values`."""
        return {n: v.tolist() for n, v in self.values.items() if isinstance(v, Tensor)}

    def means(self) -> dict[str, float]:
        """Returns the mean of each metric by name, without those that are `Unavailable`."""
        tensors = {n: float(v.mean()) for n, v in self.values.items() if isinstance(v, Tensor)}
        return {n: v for n, v in self.values.items() if isinstance(v, float)} | tensors


@dataclass(frozen=True, kw_only=True)
class TargetGuess:
    """Holds the scored answer of somebody who saw no update."""

    name: str | None = None
    """Name of the guess in rows; None if another target's guess names it."""
    metrics: Mapping[str, float | None]
    """Mean of each metric by name; None of one without a value."""
    per_image: Mapping[str, list[float]] = field(default_factory=dict)
    """Metric -> its value for each true image, in the order of the truth."""
    learned: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a row's baseline on what it was learned from: `public`, `public_per_image` and
    `near_copies`."""


@dataclass(frozen=True, kw_only=True)
class GuessRequest:
    """Describes what somebody who saw no update, but has what is `granted`, is to guess."""

    truth: Truth
    found: Reconstruction | None = None
    """Answer of the attack that the guess is compared with; None if the attack failed."""
    granted: Grant = Grant()
    observation: Observation | None = None
    """What was attacked; None if it is not at hand, and then features are not guessed."""


class Target(Plugin):
    """Base of targets, each one kind of leak. A field without a default has to be set."""

    part: ClassVar[str]
    """Name of the scored part, in an answer and in the truth."""
    noun: ClassVar[str]
    """Its noun in sentences, in the plural: `images`."""
    singular: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    """Metrics of the target; the first one ranks attacks. If one has its name followed by
    `_beyond_chance`, trials without an interval are judged by that."""
    order: ClassVar[float] = 10.0
    """Place among targets. The first one that an attack answers ranks the attack."""
    itemwise: ClassVar[bool] = False
    """Whether an answer has an entry for each example of a batch. Entries of such targets that
    stand at one place belong together."""
    payloads: ClassVar[tuple[Payload, ...]] = ()
    """Kinds of client message whose main target it is: unanswered rows of results count for it."""
    asked_singly: ClassVar[bool] = False
    """Whether attacks are asked about one example at a time, so that trials share examples."""
    of_all_clients: ClassVar[bool] = False
    """Whether its truth is of all clients that the watcher saw, not only the update's."""
    pictured: ClassVar[bool] = False
    """Whether answers are pixels, saved as `truth` and `reconstruction`, that a page can show."""
    saved_as: ClassVar[tuple[str, str] | None] = None
    """Names of answer and truth in a file of reconstructions; None: `part` and `truth_` with it."""
    saved_beside: ClassVar[tuple[str, ...]] = ()
    """Names of further tensors of the truth that scores take; they are saved beside it."""
    keeps_truth: ClassVar[bool] = False
    """Whether the truth is saved where an attack did not answer this target, too."""
    ranks_by: ClassVar[Literal["own", "gain", "mean"]] = "own"
    """Figure that ranks attacks. `own`: the part of the gain over the guess that is due to the
    attacked update. `gain`: all of it. `mean`: the mean, where guesses are compared by their means
    alone."""
    leaks: ClassVar[float]
    """Gain in the first metric from which a trial leaks, over the guess and over another update. If
    it `ranks_by` the mean, an error, it leaks at this share of the guess's error or less."""
    exposes: ClassVar[float | None] = None
    """Gain in the first metric that no attack has by chance, so that one such trial is a leak; None
    if there is none."""
    likeness: ClassVar[Mapping[str, float]] = {}
    """Metric of likeness -> its value from which an answer that leaks is recognizable. An answer
    may leak by these, whatever the first metric says. The first of them judges means."""
    likeness_gain: ClassVar[float] = 0.0
    """Gain in a metric of likeness from which an answer leaks, as in `leaks`."""
    agreement: ClassVar[Mapping[str, float]] = {}
    """Metric -> its value that an answer must reach as well before it counts as recognizable, where
    it was measured. What leaks, leaks without it."""
    recognizable_from: ClassVar[float | None] = None
    """Value of the first metric from which an answer that leaks is recognizable, where its likeness
    was not measured."""
    works: ClassVar[float | None] = None
    """Gain in the first metric of an undefended attack from which the positive control passes. If
    None, the main target passes where it `leaks`, and any other target alone does not pass."""

    @property
    def ranking(self) -> Metric:
        """Metric that ranks attacks: the first of `metrics`."""
        return self.metrics[0]

    def is_alike(self, values: Mapping[str, float | None], by: Iterable[str]) -> bool:
        """Returns whether any metric in `by`, names in `likeness`, reaches its value there.

        `values` has the answer's mean of each metric, None if not measured.
        """
        return any(self._reaches(values.get(name), name, self.likeness[name]) for name in by)

    def agrees(self, values: Mapping[str, float | None]) -> bool:
        """Returns whether all metrics of `agreement` that were measured reach their values there.

        `values` has the answer's mean of each metric, None if not measured.
        """
        return all(
            values.get(name) is None or self._reaches(values[name], name, least)
            for name, least in self.agreement.items()
        )

    def _reaches(self, value: float | None, name: str, least: float) -> bool:
        gain = {metric.name: metric.gain for metric in self.metrics}
        return value is not None and gain[name](value, least) >= 0

    def is_recognizable(self, values: Mapping[str, float | None]) -> bool:
        """Returns whether an answer that leaks is recognizable, by the `values` of its metrics.

        Each is a mean, None if not measured. The first metric of `likeness` decides or, where that
        has none, the ranking metric by `recognizable_from`. False if neither can. Measured metrics
        of `agreement` have to agree.
        """
        if not self.agrees(values):
            return False
        first, value = next(iter(self.likeness), ""), values.get(self.ranking.name)
        if values.get(first) is not None:
            return self.is_alike(values, [first])
        least = self.recognizable_from
        return value is not None and least is not None and self.ranking.gain(value, least) >= 0

    def leave(self, batch: Truth, held: HeldExamples) -> Tensor | None:
        """Returns a tensor that a client leaves for the score; None, the default, if it needs none.

        It becomes part of the client's own truth, which no attack gets to read. `batch` is what the
        update was computed from, and `held` all that the client holds.
        """
        return None

    @property
    def truth_name(self) -> str:
        """Name of the tensor in a client's truth that answers are compared with; default `part`."""
        return self.part

    def truth_of(self, truth: Truth) -> Tensor | None:
        """Returns the truth of answers, by default tensor `truth_name`; None if not recorded."""
        return truth.tensors().get(self.truth_name)

    def answer_of(self, found: Reconstruction) -> Tensor | None:
        """Returns an attack's answer to this target, by default its `part`; None without one."""
        return found.parts().get(self.part)

    def prepare(self, resources: Resources) -> Any:
        """Returns aids for scores that take long to make; made once a process, by default None."""
        return None

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Refuses, by a ScoringError, an answer that cannot be scored.

        The default refuses NaN, infinity, and another shape than that of a recorded truth.
        """
        true = self.truth_of(truth)
        if true is not None and answer.shape != true.shape:
            raise ScoringError(
                f"{self.part}: expected {tuple(true.shape)} values, got {tuple(answer.shape)}"
            )
        if not bool(answer.isfinite().all()):
            raise ScoringError(f"{self.part}: the answer is not finite")

    def compare(self, answer: Tensor, truth: Truth, aids: Aids) -> TargetScores:
        """Compares an answer, which passed `check`, with the truth by all metrics of this target.

        The default pairs both as they are. All metrics are `Unavailable` if the truth was not
        recorded.
        """
        true = self.truth_of(truth)
        if true is None:
            return TargetScores(values=self.unavailable(f"the true {self.noun} were not recorded"))
        pair = ScoredPair(claimed=answer.detach().cpu(), truth=true.detach().cpu())
        return TargetScores(values=self.compute_metrics(pair))

    def check_each(self, answer: Tensor, true: Tensor) -> None:
        """Refuses, by a ScoringError, parts of `answer` (M, ...) shaped unlike `true` (N, ...)."""
        if answer.shape[1:] != true.shape[1:]:
            raise ScoringError(
                f"reconstructed {self.noun} are {tuple(answer.shape[1:])} each, the truth's are "
                f"{tuple(true.shape[1:])}"
            )

    def compute_metrics(self, pair: ScoredPair) -> dict[str, MetricValue]:
        """Returns metric -> its value for `pair`, of all metrics of the target."""
        return {metric.name: metric.compute(pair) for metric in self.metrics}

    def unavailable(self, reason: str) -> dict[str, MetricValue]:
        """Returns metric -> `Unavailable`, for all metrics of the target and one `reason`."""
        return {metric.name: Unavailable(reason) for metric in self.metrics}

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the scored answer of somebody who saw no update; None if nothing is guessed.

        The default gives every metric's `uninformed` value, or None if the attack has no answer.
        """
        if request.found is None or self.answer_of(request.found) is None:
            return None
        return TargetGuess(metrics={metric.name: metric.uninformed for metric in self.metrics})

    def measure_chances(self, request: GuessRequest, aids: Aids) -> Mapping[str, GuessChances]:
        """Returns metric -> how likely a guess of this truth reaches each level; empty by default.

        It is the prior of the limits on any attack (`fedsim.privacy.recovery`).
        """
        return {}

    def filling(self, true: Tensor, aids: Aids) -> Tensor:
        """Returns what is saved for a missing entry, like one of `true` (N, ...); default zeros."""
        return torch.zeros_like(true[0])

    def tensors_to_save(
        self, found: Reconstruction, truth: Truth, assignments: Mapping[str, list[int]], aids: Aids
    ) -> dict[str, Tensor]:
        """Returns name -> tensor to save of an answer and its truth, in the order of the truth.

        Names are those of `saved_as` and `saved_beside`. Empty without a recorded truth, or without
        an answer if not `keeps_truth`. `assignments` maps the part of each matched target to the
        index of the answer for each truth (-1: none, which `filling` replaces). An `itemwise`
        answer that was not matched itself follows the first.
        """
        answer, true = self.answer_of(found), self.truth_of(truth)
        if true is None or (answer is None and not self.keeps_truth):
            return {}
        answer_name, truth_name = self.saved_as or (self.part, f"truth_{self.part}")
        saved = {truth_name: true, **self._select_beside(truth.tensors())}
        if answer is None:
            return saved
        order = assignments.get(self.part)
        # Entries at one place belong together: labels go with the image that they came with.
        if order is None and self.itemwise:
            order = next(iter(assignments.values()), None)
        if order:
            # Saved in the order of the truth, so that pictures can be set side by side.
            answer = align(answer, order, self.filling(true, aids))
        return {**saved, answer_name: answer}

    def _select_beside(self, tensors: Tensors) -> dict[str, Tensor]:
        return {name: tensors[name] for name in self.saved_beside if name in tensors}

    def read_saved(self, tensors: Tensors) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Returns (answer or None, truth) from tensors as `tensors_to_save` names them.

        Keys of the truth are `truth_name` and those of `saved_beside`; it is empty if not saved.
        """
        answer_name, truth_name = self.saved_as or (self.part, f"truth_{self.part}")
        true = tensors.get(truth_name)
        known = {} if true is None else {self.truth_name: true, **self._select_beside(tensors)}
        return tensors.get(answer_name), known

    def borrow(self, answer: Tensor, pairs: list[int], truth: Truth) -> Tensor:
        """Returns `answer`, given to another update, as one to this update, for a control.

        `pairs` has the index of the other update's row for each row of this one, if `asked_singly`.
        `truth` is that of this update. The default returns `answer` itself.
        """
        return answer


GROUP = "fedsim.targets"


@cache
def targets() -> Mapping[str, Target]:
    """Returns part -> installed target, in the order in which targets rank attacks; made once.

    A target that cannot be loaded is left out: `fedsim list targets` says why. A PluginError says
    that two targets score one part, or are the main target of one payload.
    """
    loaded = [plugin.cls for plugin in plugins.list_installed(GROUP) if plugin.cls]
    found = [cls() for cls in loaded if issubclass(cls, Target)]
    # The part breaks ties, so that rows and tables have one order on every machine.
    found.sort(key=lambda target: (target.order, target.part))
    by_part = {target.part: target for target in found}
    if len(by_part) < len(found):
        parts = ", ".join(target.part for target in found)
        raise plugins.PluginError(f"targets: two of them score the same part ({parts})")
    # Of two main targets the name would decide which one judges every run.
    mains: dict[Payload, Target] = {}
    for target in found:
        for payload in target.payloads:
            other = mains.setdefault(payload, target)
            if other is not target:
                raise plugins.PluginError(
                    f"targets: {other.part} and {target.part} are both the main target of {payload}"
                    "; state `payloads = ()` in the one that is derived from the other"
                )
    return by_part


@cache
def _metrics() -> Mapping[str, Metric]:
    known: dict[str, Metric] = {}
    for target in targets().values():
        for metric in target.metrics:
            # A row has one field for a name, whose values have to compare across targets.
            other = known.setdefault(metric.name, metric)
            if (other.unit, other.larger_leaks) != (metric.unit, metric.larger_leaks):
                raise plugins.PluginError(
                    f"target {target.part}: metric {metric.name} is {metric.unit}, and another "
                    f"target's of that name {other.unit}; give it a name of its own"
                )
    return known


class _Metrics(Mapping[str, Metric]):
    def __getitem__(self, name: str) -> Metric:
        return _metrics()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_metrics())

    def __len__(self) -> int:
        return len(_metrics())


METRICS: Mapping[str, Metric] = _Metrics()
"""Name -> metric of any target, in the order of a row's fields; a PluginError if targets clash."""


def ranking_targets() -> Mapping[str, Target]:
    """Returns name of a ranking metric -> first target that ranks by it; raises as `targets`."""
    ranked: dict[str, Target] = {}
    for target in targets().values():
        ranked.setdefault(target.ranking.name, target)
    return ranked


def main_target(payload: Payload) -> Target:
    """Returns the main target of messages of kind `payload`; a PluginError if none has it."""
    for target in targets().values():
        if payload in target.payloads:
            return target
    raise plugins.PluginError(f"no installed target is what attacks on {payload} are after")
