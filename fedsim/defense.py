"""The kinds of defense, told apart by type, and `chain`, which composes them.

A defense is a frozen plugin; what it remembers between rounds is a value that the caller keeps.
`chain(a, b, c)` applies in written order and the empty chain is the identity, bit for bit. Each
member states what it does to the *guarantee* proven so far, and only the whole stack's guarantee is
ever accounted: a stack that is not a known mechanism has ε = ∞, never a guess.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.plugins import Plugin
from fedsim.types import (
    FedsimError,
    LocalTraining,
    Relation,
    ReleaseKind,
    Sampling,
    Tensors,
    Unit,
    Update,
    Vantage,
)

LossFn = Callable[[Tensors, Tensor, Tensor], Tensor]
"""(parameters, normalized images (B, C, H, W), labels (B,)) -> mean loss, 0-d. Pure."""

GradientFn = Callable[[Tensors, Tensor, Tensor, torch.Generator], Tensors]
"""(parameters, images, labels, rng) -> the direction of one local step, named like parameters."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A release that an accountant knows: Gaussian noise on a quantity of bounded contributions.

    `noise_multiplier` is s / C: the noise's standard deviation over the L2 bound of what one `unit`
    contributes. `relation` says what neighbouring data are: under `zero_out` that contribution is
    exchanged for zero and the sensitivity is C; under `replace_one` it is exchanged for any other
    and the sensitivity is 2C. `releases` counts how often one round makes the release; `sampling`
    says how each drew its own batch from the client's data (None: an example may be in every one).
    `correlation` is λ where a client's t-th release has the noise
    z_t - λ z_(t-1), over all its rounds; `noise_multiplier` is then that of z_t. `shared` says that
    the noise is the server's: t counts the federation's rounds, whoever takes part in them.
    """

    noise_multiplier: float
    unit: Unit
    relation: Relation
    releases: int = 1
    sampling: Sampling | None = None
    correlation: float = 0.0
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class ExactMechanism(ABC):
    """A release that is no Gaussian mechanism, but whose ε is known in its own right.

    `accountant` says in a few words how ε is found.
    """

    unit: Unit
    relation: Relation
    accountant: str

    @abstractmethod
    def epsilon(self, delta: float, releases: int) -> float:
        """The least proven ε of so many independent releases of the same data; inf if there is
        none."""


@dataclass(frozen=True, kw_only=True)
class CurveMechanism(ExactMechanism):
    """An exact mechanism whose whole curve is known, so that it composes with others.

    `beta` is how far neighbours' examples are apart at most, under relation `close`.
    """

    beta: float

    @abstractmethod
    def log_delta(self, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        """log δ at each ε >= 0: the largest over neighbours, in both directions."""

    def epsilon(self, delta: float, releases: int) -> float:
        """The releases' composition."""
        return Composed.of((self,)).epsilon(delta, releases)


@final
@dataclass(frozen=True, kw_only=True)
class Composed(ExactMechanism):
    """Independent releases of the same data, each by a mechanism of which the curve is known."""

    parts: tuple[CurveMechanism, ...]

    @classmethod
    def of(cls, parts: tuple[CurveMechanism, ...]) -> Composed:
        """Of one mechanism or more.

        Raises:
            FedsimError: they hide different things.
        """
        if len({(part.unit, part.beta) for part in parts}) > 1:
            raise FedsimError(
                f"mechanisms that hide different things do not compose: {_listed(parts)}; give "
                "them the same beta"
            )
        relative = any(part.relation == "relative" for part in parts)
        return cls(
            unit=parts[0].unit,
            relation="relative" if relative else parts[0].relation,
            accountant=f"{_listed(parts)}, β = {parts[0].beta:g}",
            parts=parts,
        )

    def epsilon(self, delta: float, releases: int) -> float:
        """By the composition of the parts' curves (`fedsim.privacy.composition`)."""
        return _composed_epsilon(self.parts * releases, delta)


@lru_cache(maxsize=256)
def _composed_epsilon(parts: tuple[CurveMechanism, ...], delta: float) -> float:
    from fedsim.privacy.composition import epsilon

    return epsilon([part.log_delta for part in parts], delta)


def _listed(parts: tuple[CurveMechanism, ...]) -> str:
    return " and ".join(part.accountant for part in parts)


Statistic = Literal["features", "kernel"]
"""What a release may be computed from: features (n, d), or their kernel matrix (n, n)."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """What a closed-form learner releases of a client's rows D, as far as privacy depends on it.

    `sketch`: D'G, G of standard normal entries. `coefficients`: those of least squares.
    `sketched_coefficients`: those of least squares on a sketch. `normal_coefficients`: a draw of
    the normal distribution that the latter tends to. `kernel_regression`: a function of
    `statistics`, and of labels that nothing protects.
    """

    kind: ReleaseKind
    row_norm: float
    """l, the public bound on the L2 norm of a row of D (features and target)."""
    columns: int
    """r, the columns of G (0 for `coefficients`)."""
    features: int
    """d, the number of features."""
    statistics: tuple[Statistic, ...] = ()
    """All that the release is computed from; empty where it is computed from the rows at once."""
    gain: float = 1.0
    """s, the largest eigenvalue of S in the kernel (x'z)(x'Sz), which is public."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What is proven of an update on its way through a stack.

    `sensitivity` bounds the L2 norm of the whole update (all tensors together) whatever the data;
    `mechanism` is the release it has been through; `reason` says why there is none. `pooled` is
    what the plain mean of all clients' updates is, where they share the noise among them.
    """

    sensitivity: float = math.inf
    mechanism: Mechanism | ExactMechanism | None = None
    reason: str = "no noise is added"
    pooled: ExactMechanism | None = None

    def bounded(self, norm: float) -> Guarantee:
        """After a step that leaves no update longer than `norm` (nor than it was)."""
        return replace(self, sensitivity=min(self.sensitivity, norm))

    def unproven(self, reason: str) -> Guarantee:
        """After a step that may enlarge the update. Post-processing keeps a mechanism."""
        reason = self.reason if self.mechanism else reason
        return replace(self, sensitivity=math.inf, reason=reason)


class DataDefense(Plugin):
    """Regularizes the rows D that a closed-form learner computes from: appends σ I below them.

    To a sketch D'G that adds σ times a matrix of standard normal entries.
    """

    @abstractmethod
    def sigma(self, release: Release) -> float:
        """σ >= 0 of one client, in the units of the rows.

        Raises:
            FedsimError: the defense does not fit what is released, or no σ is enough.
        """

    @abstractmethod
    def guarantee(self, release: Release) -> Guarantee:
        """What holds of a client's release from the regularized rows.

        Raises:
            FedsimError: as `sigma`.
        """

    @property
    def least_clients(self) -> int:
        """How many clients' releases have to be combined for what `pooled` claims."""
        return 1


class StatisticDefense(Plugin):
    """Privatizes a statistic from which a closed-form learner computes its release.

    The release is then post-processing: it is private if every statistic that it is computed from
    is. Shape and type are kept, and of a kernel matrix that it is positive semidefinite.
    """

    statistic: ClassVar[Statistic]
    """The one that it acts on."""

    @abstractmethod
    def apply(self, value: Tensor, release: Release, rng: torch.Generator) -> Tensor:
        """The private version of a client's `value`, which is not mutated.

        Raises:
            FedsimError: the defense cannot do what it is asked for.
        """

    @abstractmethod
    def guarantee(self, release: Release) -> CurveMechanism:
        """What holds of the private statistic, if its rows keep to what `release` says.

        Raises:
            FedsimError: as `apply`.
        """


class UpdateDefense(Plugin):
    """Changes the update before it leaves the client: a pair of pure functions.

    Only floating-point tensors are ever handed to a defense; integer ones pass by unchanged.
    """

    @abstractmethod
    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        """The state before the first round, for updates shaped like `update`.

        `sensitivity` is the L2 bound that the defenses before this one guarantee (inf if none).
        """

    @abstractmethod
    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """(defended update, next state). Mutates neither argument; names and shapes are kept."""

    @abstractmethod
    def guarantee(self, before: Guarantee) -> Guarantee:
        """What holds after this defense, given what held before it.

        Raises:
            FedsimError: the defense cannot follow what comes before it.
        """


class TrainingDefense(Plugin):
    """Changes how the client trains."""

    @abstractmethod
    def training(self, declared: LocalTraining) -> LocalTraining:
        """The local training that this defense makes of `declared`."""

    @abstractmethod
    def gradient(self, loss: LossFn, gradient: GradientFn, batch_size: int) -> GradientFn:
        """The direction of a local step, given the loss and the direction so far.

        `batch_size` is what sums over a batch are divided by: the number of its examples, or its
        mean where that varies with the step. A batch may then be empty.
        """

    @abstractmethod
    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """What holds of the update after training that is described by `training`."""


class RememberingDefense(TrainingDefense):
    """A training defense whose steps depend on the client's earlier ones, over all its rounds."""

    @abstractmethod
    def recalling(
        self, loss: LossFn, gradient: GradientFn, batch_size: int, memory: dict[str, Tensor]
    ) -> GradientFn:
        """As `gradient`, going on from `memory`, which each step replaces with its own.

        It is empty before a client's first step, and is kept between rounds as it was left.
        """

    def gradient(self, loss: LossFn, gradient: GradientFn, batch_size: int) -> GradientFn:
        """The direction of the first step and of those that follow it."""
        return self.recalling(loss, gradient, batch_size, {})


class AggregationDefense(Plugin):
    """Changes what the server sees of a round: one combined update instead of each client's."""

    @abstractmethod
    def combine(self, updates: Iterable[Update]) -> Update:
        """The only update the server gets to see. Consumes `updates` one by one."""

    @abstractmethod
    def guarantee(self, before: Guarantee) -> Guarantee:
        """What holds of the combined update, given what holds of each client's."""


@dataclass(frozen=True, kw_only=True)
class ServerRound:
    """What a round's noise of the server depends on; nothing of it depends on who answers."""

    clients: int
    """How many are asked in a round."""
    sensitivity: float
    """The L2 bound on one client's update."""
    stream: torch.Generator
    """This round's randomness."""
    before: torch.Generator | None
    """The round before's, from its start again; None in the first."""


class NoisyAggregation(AggregationDefense):
    """An aggregation by a trusted server that adds noise of its own to what it shows."""

    @abstractmethod
    def noised(self, combined: Update, round: ServerRound) -> Update:
        """What the server shows of what `combine` made. Does not mutate `combined`."""


Defense = DataDefense | StatisticDefense | UpdateDefense | TrainingDefense | AggregationDefense


@dataclass(frozen=True)
class Stack:
    """A chain of defenses: those of data, training and statistics act first, then update ones, then
    the aggregation."""

    training_defenses: tuple[TrainingDefense, ...] = ()
    update_defenses: tuple[UpdateDefense, ...] = ()
    aggregation: AggregationDefense | None = None
    data_defense: DataDefense | None = None
    statistic_defenses: tuple[StatisticDefense, ...] = ()

    _memories: dict[int, dict[str, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def least_clients(self) -> int:
        """With fewer clients' updates nothing may be combined: their shared noise is too little."""
        return self.data_defense.least_clients if self.data_defense and self.aggregation else 1

    def sigma(self, release: Release) -> float:
        """σ of the σ I that a client appends to its rows; 0 without a data defense."""
        return self.data_defense.sigma(release) if self.data_defense else 0.0

    def private(
        self, statistic: Statistic, value: Tensor, release: Release, rng: torch.Generator
    ) -> Tensor:
        """A client's `statistic` as its release may use it: `value` itself without a defense."""
        for defense in self.statistic_defenses:
            if defense.statistic == statistic:
                return defense.apply(value, release, rng)
        return value

    @property
    def vantage(self) -> Vantage:
        """What the server sees: each client's update, or only their combination."""
        return "aggregate" if self.aggregation else "server"

    def training(self, declared: LocalTraining) -> LocalTraining:
        """The local training after every training defense."""
        for defense in self.training_defenses:
            declared = defense.training(declared)
        return declared

    def gradient(self, loss: LossFn, gradient: GradientFn, batch_size: int) -> GradientFn:
        """The direction of a local step after every training defense."""
        for index, defense in enumerate(self.training_defenses):
            if isinstance(defense, RememberingDefense):
                memory = self._memories.get(index, {})
                gradient = defense.recalling(loss, gradient, batch_size, memory)
            else:
                gradient = defense.gradient(loss, gradient, batch_size)
        return gradient

    @property
    def remembers(self) -> bool:
        """Whether a client has to keep a state between its rounds."""
        training = any(isinstance(d, RememberingDefense) for d in self.training_defenses)
        return training or bool(self.update_defenses)

    @contextmanager
    def recalling(self, state: Tensors) -> Iterator[dict[str, Tensor]]:
        """Let the steps of `gradient` inside go on from where the client's `state` says it was.

        `state` is the client's after its round before (empty before its first). The value is filled
        on exit with what the steps leave, to be kept with the state of the update defenses. Outside
        of it, every direction begins as in a client's first round.
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
                left |= {f"{_TRAINING}{number}.{name}": t.cpu() for name, t in memory.items()}
        finally:
            self._memories.clear()

    def guarantees(
        self, declared: LocalTraining, release: Release | None = None
    ) -> list[Guarantee]:
        """What holds before the first update defense, and after each stage behind it.

        `release` is what a closed-form learner releases; None of one that trains as `declared`.

        Raises:
            FedsimError: a defense does not fit the learner, or cannot follow what comes before it.
        """
        held = Guarantee()
        training = self.training(declared)
        if self.training_defenses and release:
            raise FedsimError(
                f"{_name(self.training_defenses[0])} changes local training, and this learner does "
                "not train; drop it, or choose learner sgd"
            )
        for defense in self.training_defenses:
            held = defense.guarantee(held, training)
        if self.data_defense:
            if release is None:
                raise FedsimError(
                    f"{_name(self.data_defense)} acts on the rows of a closed-form learner; choose "
                    "learner sketch or least_squares, or drop it"
                )
            held = self.data_defense.guarantee(release)
        if self.statistic_defenses:
            held = self._of_statistics(release)
        proven = [held]
        for member in self.update_defenses:
            # The mean of releases that were changed further is not what is pooled.
            proven.append(member.guarantee(replace(proven[-1], pooled=None)))
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
        if bare:
            return Guarantee(reason=f"no defense protects the {bare[0]} that the release tells of")
        return Guarantee(mechanism=Composed.of(tuple(parts.values())), reason="")

    def shows_losses(self, declared: LocalTraining) -> bool:
        """Whether clients that train may report their loss.

        Not if their update is hidden or privatized. `declared` is the training before the stack's
        own training defenses.
        """
        proven = self.guarantees(declared)
        return self.aggregation is None and not any(held.mechanism for held in proven)

    def init(
        self, update: Tensors, declared: LocalTraining, release: Release | None = None
    ) -> Tensors:
        """The state of all update defenses before the first round, as one flat mapping."""
        proven = self.guarantees(declared, release)
        return {
            f"{index}.{name}": tensor
            for index, defense in enumerate(self.update_defenses)
            for name, tensor in defense.init(_floating(update), proven[index].sensitivity).items()
        }

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """(defended update, next state) after every update defense. Integer tensors pass by."""
        defended = _floating(update)
        after: dict[str, Tensor] = {}
        for index, defense in enumerate(self.update_defenses):
            prefix = f"{index}."
            own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
            defended, own_after = defense.apply(defended, own, rng)
            after |= {prefix + name: tensor for name, tensor in own_after.items()}
        return {name: defended.get(name, tensor) for name, tensor in update.items()}, after


_TRAINING = "training."
"""How the names of what training defenses remember begin; others begin with a number."""


def chain(*defenses: Defense) -> Stack:
    """Compose `defenses` in written order; `chain()` is the identity.

    Raises:
        FedsimError: more than one aggregation defense, or one that is not the last; more than one
            data defense, or one that is not the first; or more than one defense of a statistic, or
            one behind an update defense.
    """
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
    )


def global_norm(update: Tensors) -> Tensor:
    """L2 norm of all tensors together, 0-d float64; 0 if there are none."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in update.values()]
    return (
        torch.linalg.vector_norm(torch.stack(norms))
        if norms
        else torch.zeros((), dtype=torch.float64)
    )


def all_finite(update: Tensors) -> bool:
    """Whether no entry is infinite or NaN."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in update.values())


def add_gaussian(update: Tensors, std: float, rng: torch.Generator) -> Tensors:
    """`update` plus independent N(0, std^2) on every entry; `std` 0 is the identity, bit for bit.

    Noise is drawn where `rng` lives and, for half-precision tensors, rounded after the addition. It
    is ordinary floating-point noise: the attack of Mironov (CCS 2012) on its low bits is not met.
    """
    return {name: _plus_gaussian(tensor, std, rng) for name, tensor in update.items()}


def shapes(update: Tensors) -> Mapping[str, torch.Size]:
    """Name -> shape."""
    return {name: tensor.shape for name, tensor in update.items()}


def _name(defense: Defense) -> str:
    return type(defense).__name__


def _floating(update: Tensors) -> Tensors:
    return {name: tensor for name, tensor in update.items() if tensor.is_floating_point()}


def _plus_gaussian(tensor: Tensor, std: float, rng: torch.Generator) -> Tensor:
    if std == 0:
        return tensor
    wide = torch.promote_types(tensor.dtype, torch.float32)
    noise = torch.randn(tensor.shape, generator=rng, dtype=wide, device=rng.device)
    return (tensor.to(wide) + std * noise.to(tensor.device)).to(tensor.dtype)
