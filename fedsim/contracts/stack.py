"""Defines a defense stack, and `chain`, which composes it. The empty one is the identity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsim.contracts import plugins
from fedsim.contracts.defense import (
    AggregationDefense,
    DataDefense,
    Defense,
    GradientFn,
    LocalStep,
    ModelDefense,
    StatefulTrainingDefense,
    StatisticDefense,
    TrainingDefense,
    UpdateDefense,
)
from fedsim.contracts.guarantee import Composed, Guarantee, Release, Statistic
from fedsim.types import Effect, FedsimError, LocalTraining, Tensors, Vantage


@dataclass(frozen=True)
class Stack:
    """Holds the defenses of a stack in the order in which they act; `chain` makes and checks it.

    Those of the model, data, training and statistics come first, then those of updates, then the
    aggregation. Arguments of the same name mean the same in all its methods. `declared` is the
    local training before any defense. `release` describes what a closed-form learner releases; None
    for a learner that trains. Methods that need what is proven fail as `guarantees` does.
    """

    training_defenses: tuple[TrainingDefense, ...] = ()
    update_defenses: tuple[UpdateDefense, ...] = ()
    aggregation: AggregationDefense | None = None
    data_defense: DataDefense | None = None
    statistic_defenses: tuple[StatisticDefense, ...] = ()
    model_defenses: tuple[ModelDefense, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = field(default=None, compare=False)
    """Shapes of an update's floating-point tensors; None until `note_shapes`."""

    _memories: dict[int, dict[str, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Index of a training defense -> what its steps remember, inside `memory_of` alone."""
    _directed: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    """Indices of training defenses that were asked for a direction."""

    def note_shapes(self, parameters: Iterable[Tensor]) -> None:
        """Sets this stack's `shapes` to those of floating-point `parameters`, for guarantees."""
        shapes = tuple(tuple(p.shape) for p in parameters if p.is_floating_point())
        object.__setattr__(self, "shapes", shapes)

    @property
    def claimed_epsilon(self) -> float | None:
        """Sum of the ε that its update defenses' configurations state; None if none states any."""
        stated = [d.claimed_epsilon for d in self.update_defenses if d.claimed_epsilon is not None]
        return sum(stated) if stated else None

    @property
    def directed(self) -> bool:
        """Whether `gradient` has ever been called; always False without training defenses."""
        return bool(self._directed)

    @property
    def least_clients(self) -> int:
        """Least number of clients to combine; fewer hold too little noise. 1 without a limit."""
        return self.data_defense.least_clients if self.data_defense and self.aggregation else 1

    def sigma(self, release: Release) -> float:
        """Returns σ as `DataDefense.sigma`, with its error; 0 without a data defense."""
        return self.data_defense.sigma(release) if self.data_defense else 0.0

    def private(
        self, statistic: Statistic, value: Tensor, release: Release, rng: torch.Generator
    ) -> Tensor:
        """Returns a client's `statistic` made private, or `value` itself if nothing acts on it.

        A FedsimError says that the defense cannot keep to its claim.

        Args:
            statistic: What `value` is.
            value: Features (n, d) or a kernel matrix (n, n), and is not changed.
            release: What is computed from it.
            rng: On the CPU.
        """
        for defense in self.statistic_defenses:
            if defense.statistic == statistic:
                return defense.apply(value, release, rng)
        return value

    def assumed_of(self, statistic: Statistic) -> list[StatisticDefense]:
        """Returns the defenses of `statistic` whose claims hold only for some data."""
        return [d for d in self.statistic_defenses if d.statistic == statistic and d.assumes]

    def effect(self, declared: LocalTraining, release: Release | None = None) -> Effect:
        """Returns what the whole stack does to an update; it fails as `guarantees` does.

        What it does to the rows or statistics behind a release is not in it but in `ReleaseSpec`. A
        PluginError says that a model defense is not installed.
        """
        proven = self.guarantees(declared, release)
        training = self.training(declared)
        whole = Effect()
        for alteration in self.model_defenses:
            # By name and parameters, from which an attacker builds the same altered model.
            named = plugins.reference("fedsim.defenses", alteration)
            whole = whole.then(replace(alteration.effect(training), model=(named,)))
        last = max((i for i, d in enumerate(self.training_defenses) if d.from_loss), default=0)
        for index, defense in enumerate(self.training_defenses):
            # A direction that a later defense computes anew has no part in the update.
            if index >= last:
                whole = whole.then(defense.effect(training))
        # `proven` goes on behind the last update defense, so that it is longer.
        for member, held in zip(self.update_defenses, proven, strict=False):
            whole = whole.then(member.effect(held))
        if self.aggregation:
            # The last entry is the aggregation's own; it acts on what is proven before it.
            whole = whole.then(self.aggregation.effect(proven[-2]))
        return whole

    @property
    def vantage(self) -> Vantage:
        """View of the server: `server` (each client's update) or `aggregate` (all combined)."""
        return "aggregate" if self.aggregation else "server"

    def training(self, declared: LocalTraining) -> LocalTraining:
        """Returns the local training that all training defenses, in order, make of `declared`."""
        for defense in self.training_defenses:
            declared = defense.training(declared)
        return declared

    def gradient(self, step: LocalStep) -> GradientFn:
        """Returns the function that gives the direction of a `step`, by all training defenses.

        Defenses with a memory use that of the `memory_of` block around this call, or else begin
        anew. Errors are those of `TrainingDefense.gradient`. With any, `directed` is True from now
        on.
        """
        for index, defense in enumerate(self.training_defenses):
            # Tells of a learner that trains around its defenses (`federation.refusals`).
            self._directed.add(index)
            if isinstance(defense, StatefulTrainingDefense):
                memory = self._memories.get(index, {})
                direction = defense.gradient_with_memory(step, memory)
            else:
                direction = defense.gradient(step)
            step = replace(step, gradient=direction)
        return step.gradient

    @property
    def remembers(self) -> bool:
        """Whether a client has to keep defenses' state between its rounds."""
        training = any(isinstance(d, StatefulTrainingDefense) for d in self.training_defenses)
        return training or bool(self.update_defenses)

    @contextmanager
    def memory_of(self, state: Tensors) -> Iterator[dict[str, Tensor]]:
        """Lets the steps of `gradient` inside the block go on from the client's `state`.

        `state` is the one after the client's previous round (empty before its first). The mapping
        that is yielded is filled on exit with what the steps leave, on the CPU. The caller adds it
        to the state that `apply` returned, for the next round. It stays empty if the block fails.
        Blocks of a stack are neither nested nor shared by threads.
        """
        self._memories.update({index: {} for index in range(len(self.training_defenses))})
        for name, tensor in state.items():
            if name.startswith(_TRAINING):
                index, _, own = name.removeprefix(_TRAINING).partition(".")
                self._memories[int(index)][own] = tensor
        left: dict[str, Tensor] = {}
        try:
            yield left
            for number, memory in self._memories.items():
                # Not in `finally`: a step that fails must not leave half of a new state behind.
                left |= {f"{_TRAINING}{number}.{name}": t.cpu() for name, t in memory.items()}
        finally:
            self._memories.clear()

    def guarantees(
        self, declared: LocalTraining, release: Release | None = None
    ) -> list[Guarantee]:
        """Returns what is proven before the first update defense, and after each later stage.

        Later stages are the update defenses in order, and the aggregation, if any. A FedsimError
        says that a defense does not fit the learner, or cannot follow what comes before it.
        """
        held = Guarantee(shapes=self.shapes)
        training = self.training(declared)
        for members, what in (
            (self.training_defenses, "local training"),
            (self.model_defenses, "the model that clients train"),
        ):
            if members and release:
                raise FedsimError(
                    f"{_name(members[0])} changes {what}, and this learner does not train; drop "
                    "it, or choose learner sgd"
                )
        for defense in self.training_defenses:
            held = defense.guarantee(held, training)
        if self.data_defense:
            if release is None:
                raise FedsimError(
                    f"{_name(self.data_defense)} acts on the rows of a closed-form learner; choose "
                    "learner sketch or least_squares, or drop it"
                )
            # It stands first in its stack, so that nothing is proven before it.
            held = self.data_defense.guarantee(release)
        if self.statistic_defenses:
            held = self._of_statistics(release)
        proven = [held]
        for member in self.update_defenses:
            # The mean of releases that were changed further is not what is pooled.
            after = member.guarantee(replace(proven[-1], pooled=None))
            proven.append(replace(after, shapes=self.shapes))
        if self.aggregation:
            proven.append(self.aggregation.guarantee(proven[-1]))
        return proven

    def _of_statistics(self, release: Release | None) -> Guarantee:
        known = release.statistics if release else ()
        for defense in self.statistic_defenses:
            if release is None or defense.statistic not in known:
                raise FedsimError(
                    f"{_name(defense)} acts on the {defense.statistic} that a learner computes its "
                    "release from, and this one releases nothing of the kind; choose learner ntk, "
                    "or drop it"
                )
        assert release is not None
        parts = {d.statistic: d.guarantee(release) for d in self.statistic_defenses}
        bare = [statistic for statistic in known if statistic not in parts]
        # A release from one bare statistic is no post-processing of private ones.
        if bare:
            return Guarantee(reason=f"no defense protects the {bare[0]} that the release tells of")
        return Guarantee(mechanism=Composed(tuple(parts.values())), reason="")

    def shows_losses(self, declared: LocalTraining) -> bool:
        """Returns whether clients may report losses; it fails as `guarantees` does.

        They may not if updates are combined, or if a mechanism is proven.
        """
        proven = self.guarantees(declared)
        # A loss is a function of the data that none of the noise hides.
        return self.aggregation is None and not any(held.mechanism for held in proven)

    def init(
        self, update: Tensors, declared: LocalTraining, release: Release | None = None
    ) -> Tensors:
        """Returns the state of all update defenses before round 1; it fails as `guarantees` does.

        Names are `<index>.<name>`, with the index from 0 of a defense and its own name of a tensor.
        Updates are shaped like `update`.
        """
        proven = self.guarantees(declared, release)
        return {
            f"{index}.{name}": tensor
            # `proven[index]` is what holds before the defense of that index.
            for index, defense in enumerate(self.update_defenses)
            for name, tensor in defense.init(_floating(update), proven[index].sensitivity).items()
        }

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns (defended update, next state) of one client, by all update defenses in order.

        Integer tensors pass by. `state` is what `init` or the client's previous round returned, and
        is not changed; what `memory_of` left is not in the next one. `rng`, on the CPU, is the only
        source of randomness.
        """
        defended = _floating(update)
        after: dict[str, Tensor] = {}
        for index, defense in enumerate(self.update_defenses):
            prefix = f"{index}."
            own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
            defended, own_after = defense.apply(defended, own, rng)
            after |= {prefix + name: tensor for name, tensor in own_after.items()}
        return {name: defended.get(name, tensor) for name, tensor in update.items()}, after


_TRAINING = "training."
"""Prefix of a state's names for training defenses; those of update defenses begin with a number."""


def chain(*defenses: Defense) -> Stack:
    """Composes `defenses` in written order; `chain()` is the identity.

    A FedsimError refuses an aggregation defense that is not the last, a data defense that is not
    the first, a second defense of a statistic, or one behind an update defense.
    """
    # Only these orders are proven: each defense acts on what the ones before it have made.
    acted: set[Statistic] = set()
    changed = False
    for position, defense in enumerate(defenses):
        if isinstance(defense, AggregationDefense) and position != len(defenses) - 1:
            raise FedsimError(
                f"an aggregation defense acts on the server, after every client's: put it last "
                f"(found at position {position} of {len(defenses)})"
            )
        if isinstance(defense, DataDefense) and position != 0:
            raise FedsimError(
                f"{_name(defense)} acts on the rows, before anything is computed from them: put it "
                f"first, and alone of its kind (found at position {position} of {len(defenses)})"
            )
        changed = changed or isinstance(defense, UpdateDefense)
        if isinstance(defense, StatisticDefense):
            if changed or defense.statistic in acted:
                raise FedsimError(
                    f"{_name(defense)} acts on the {defense.statistic}, before anything is "
                    "computed from them: put it before all defenses of updates, alone of its kind "
                    f"(found at position {position} of {len(defenses)})"
                )
            acted.add(defense.statistic)
    first, last = (defenses[0], defenses[-1]) if defenses else (None, None)
    return Stack(
        tuple(d for d in defenses if isinstance(d, TrainingDefense)),
        tuple(d for d in defenses if isinstance(d, UpdateDefense)),
        last if isinstance(last, AggregationDefense) else None,
        first if isinstance(first, DataDefense) else None,
        tuple(d for d in defenses if isinstance(d, StatisticDefense)),
        tuple(d for d in defenses if isinstance(d, ModelDefense)),
    )


def _name(defense: Defense) -> str:
    return type(defense).__name__


def _floating(update: Tensors) -> Tensors:
    return {name: tensor for name, tensor in update.items() if tensor.is_floating_point()}
