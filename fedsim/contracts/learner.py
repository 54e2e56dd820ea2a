"""Defines data sources, learners (what a client computes, and what the server does), engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsim.contracts.guarantee import Release
from fedsim.contracts.plugins import Plugin
from fedsim.contracts.stack import Stack
from fedsim.types import (
    Dataset,
    FedsimError,
    GroundTruth,
    LocalTraining,
    ModelSpec,
    Named,
    Payload,
    ReleaseSpec,
    RowTruth,
    Table,
    Tensors,
)

LabelledBatches = Sequence[tuple[Tensor, Tensor]]
"""Inputs of a client's computation (`Request.batches`)."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Describes what a learner works on: one stack's federation, without its clients' data.

    It derives weights and other public draws from `seed`, the scenario's. `clients` counts those of
    the federation.
    """

    learner: Named
    """The learner as the scenario names it."""
    stack: Stack
    dataset: Dataset | Table
    """Description of the data and test split, without training examples (`without_training`)."""
    device: torch.device
    seed: int
    clients: int
    examples: int
    """Number of training examples of all clients together."""
    model: Named | None = None
    """Network as the scenario names it; None without one."""
    weights: str | None = None
    """Path of the weights to start from; None for fresh ones."""
    plants: bool = False
    """Whether the server plants neurons in what it sends with a probe, and trains without them."""
    projection_radius: float | None = None
    """L2 radius of the ball around the initial weights that the model is kept in; None: no ball."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Holds what a client is asked in a round, at the global model's `parameters` and `buffers`."""

    batches: LabelledBatches
    """(pixels (B, C, H, W) or features (B, D), on [0, 1], labels (B,)) of each local step. A
    learner that releases once gets one batch of all examples; of a table, (rows (n, d + 1), labels
    (n,))."""
    parameters: Tensors
    buffers: Tensors
    training: LocalTraining
    """Local training after the stack's training defenses; ignored by a learner that trains
    nothing."""
    stream: torch.Generator
    """Stream of the learner's draws, apart from the defenses'; `fedsim.rng.normal` draws from it
    what has to stay secret."""
    recorded: bool
    """Whether the round is observed, so that the truth will be asked for."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Holds what a client computed, before the update defenses."""

    update: Tensors
    """Update on any device, named and shaped like the parameters: a gradient or a change of
    weights, as `LocalTraining` says, or the release."""
    buffers: Tensors
    """New buffers of the client's model, such as batch-norm statistics; empty if it has none."""
    num_examples: int
    """Weight in the mean over the clients, which the server gets to see."""
    truth: GroundTruth | None
    """What was used, for scores: features and losses if `Request.recorded`; None for a release."""
    loss: float | None
    """Loss of the first batch under the global model, before any step; None without training."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Holds the global model's loss, as its learner defines it, and its accuracy."""

    loss: float
    accuracy: float | None
    """Share of the test data classified correctly, from 0 to 1; None for a learner without
    classes."""


class Computation(ABC):
    """Base of what a learner does in one stack's federation, at its clients and at the server."""

    spec: ModelSpec | None = None
    """Description of the model; None for a learner that trains none."""
    model: nn.Module | None = None
    """Network; None for a learner that trains none."""
    release: Release | None = None
    """Release of a closed-form learner, as far as privacy depends on it; None without one."""
    releases_statistics: bool = False
    """Whether clients also release batch-norm statistics of their data."""

    def describe(self) -> ModelSpec | ReleaseSpec | None:
        """Returns what an observation says of the model or release; None if none is observed.

        The default is `spec`: a closed-form learner that is observed has to override it.
        """
        return self.spec

    def candidates(self, inputs: Tensor, labels: Tensor) -> RowTruth | None:
        """Returns the rows that a client's release is computed from, one for each of `inputs`.

        `inputs` and `labels` are examples of the client, as `examples_at` of its data returns them.
        All rows are members, and of client 0. None (default): releases are never observed.
        """
        return None

    def most_examples(self, training: LocalTraining) -> int:
        """Returns the largest weight of a client in the mean over clients, in examples.

        `training` is that after the stack's training defenses. The default is its `num_images`.
        """
        return training.num_images

    def check(self, clients: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Refuses, by a FedsimError, data for which a defense's claim fails; by default none.

        `clients` maps each client to its (inputs, labels), as in `candidates`.
        """
        return

    @abstractmethod
    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns (parameters, buffers) before round 1, on the CPU.

        A FedsimError says that `Problem.weights` cannot be read or misfit.
        """

    @abstractmethod
    def compute(self, request: Request, rng: torch.Generator) -> Computed:
        """Computes one client's update of one round.

        Draws of defenses and of a model's layers come from `rng`, others from `request.stream`.
        Training asks `Stack.gradient` for the direction of every step. The caller has entered
        `Stack.memory_of`, from which steps go on. A FedsimError says why nothing can be released.
        """

    @abstractmethod
    def apply_update(self, before: Tensor, update: Tensor, training: LocalTraining) -> Tensor:
        """Returns a global parameter, now `before`, after a client's `update` of it.

        A gradient is subtracted, times the learning rate of the round's `training`. A change of
        weights is added, and a release is the result. The strategy averages results over clients.
        """

    def told_update(self, before: Tensor, after: Tensor, training: LocalTraining) -> Tensor:
        """Returns the clients' mean update of one parameter, float64, as two global models tell it.

        Its values there are `before` and `after`; `training` is that of the round between. The
        method undoes `apply_update` and `finalize` of a mean that weighs all clients alike. The
        default refuses by a FedsimError: only learners for which that is possible override it.
        """
        raise FedsimError(
            "two global models do not tell the mean update of this learner's clients; remove "
            "client from observe.vantages, or use learner sgd"
        )

    @abstractmethod
    def finalize(self, mean: Tensors, clients: int) -> Tensors:
        """Returns the new global parameters, given the strategy's `mean` over so many `clients`.

        The mean is of what `apply_update` returned, and not of updates.
        """

    @abstractmethod
    def evaluate(self, parameters: Tensors, buffers: Tensors) -> Evaluation:
        """Returns loss and accuracy of the global model, by its tensors, on the test split."""

    @abstractmethod
    def plant_probe(self, parameters: Tensors, seed: int) -> Tensors:
        """Returns `parameters` with the weights that the server plants in probes, by `seed`.

        A model without a part to plant them in keeps its `parameters`.
        """


def model_spec(problem: Problem) -> ModelSpec:
    """Describes the problem's `model` for its Dataset; an AssertionError if it lacks either."""
    model, dataset = problem.model, problem.dataset
    assert model is not None
    assert isinstance(dataset, Dataset)
    return ModelSpec(
        name=model.name,
        parameters=model.parameters,
        num_classes=len(dataset.classes),
        # `ModelSpec` derives from `InputSpec`.
        **vars(dataset.input_spec),
    )


class Learner(Plugin):
    """Base of learners, which say what clients compute and what the server makes of the mean."""

    data: ClassVar[type[Dataset] | type[Table]]
    """Kind of data that it computes from."""
    trains: ClassVar[bool] = False
    """Whether it trains a model over rounds, see `TrainingLearner`. One that does not releases once
    (`training.rounds: 1`), from all of a client's data, and its server takes the plain mean."""
    section: ClassVar[str] = "learner"
    """Section of the scenario that a refusal of `start` names."""
    reads_features: ClassVar[bool] = False
    """Whether a learner that trains nothing computes from the features of a frozen model, if the
    scenario names one (`model`, `training.weights`)."""

    def view(self, data: Dataset | Table) -> Dataset | Table:
        """Returns `data` as it reads them, by default unchanged; a FedsimError if it cannot."""
        return data

    def payload(self) -> Payload | None:
        """Returns the kind of message that clients send; None (default) if no attack reads it."""
        return None

    def least_examples(self, training: LocalTraining) -> int:
        """Returns how many examples a client must hold for `training` as declared; by default 1."""
        return 1

    @abstractmethod
    def start(self, problem: Problem) -> Computation:
        """Binds the learner to one stack's federation; a FedsimError says why it does not fit."""


class TrainingLearner(Learner):
    """Base of learners that train a model over rounds, as a scenario's `training` says."""

    trains: ClassVar[bool] = True
    section: ClassVar[str] = "model"

    def view(self, data: Dataset | Table) -> Dataset | Table:
        """Returns a table as a Dataset of inputs and classes; all as it is if `self.data` is Table.

        A FedsimError refuses to make a Dataset of a table whose target is a quantity.
        """
        # A closed-form learner reads a table's rows as they are, a network inputs and classes.
        return data.labelled() if self.data is Dataset else data

    def payload(self) -> Payload | None:
        """Returns `update`, the kind that a training learner's clients send."""
        return "update"

    def least_examples(self, training: LocalTraining) -> int:
        """Returns the batch size, whatever the sampling: no batch has an example twice."""
        return training.batch_size


class DataSource(Plugin):
    """Base of sources of labelled images, or of a table. Fields say where and how they are read."""

    @abstractmethod
    def load(self) -> Dataset | Table:
        """Returns the whole set in memory, train and test split, in an order that never varies.

        A FedsimError says where missing or unreadable data were sought, and the remedy.
        """

    @property
    def place(self) -> str | None:
        """File or folder that the source reads; None if data come with a package, or are drawn.

        The default is the field `path` or `root`. A node asks its owner's policy about it.
        """
        named = getattr(self, "path", None) or getattr(self, "root", None)
        return None if named is None else str(named)

    def prepared(self, dataset: Dataset | Table) -> Dataset | Table:
        """Returns `dataset` with all that this source computes from training data computed anew.

        An audit calls it after it exchanged an image. The default returns `dataset` itself.
        """
        return dataset


class Engine(Plugin):
    """Base of engines, which carry a federation's messages and decide where its clients compute.

    A scenario names it by `federation.engine`, and sets no parameters of it.
    """

    remote: ClassVar[bool] = False
    """Whether clients are on machines of their owners: data, truth and secrets stay there, no
    canary takes the place of a client's data, and nobody but the server combines updates."""

    @abstractmethod
    def check(self) -> None:
        """Refuses, by a FedsimError with the remedy, a machine on which it cannot run."""
