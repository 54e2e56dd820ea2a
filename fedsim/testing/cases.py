"""Makes cases for the suites, without a federation: plugins, updates, what a server sees."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import pydantic
import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import GradientFn, LocalStep, LossFn, NoisyAggregation, ServerRound
from fedsim.contracts.guarantee import Release
from fedsim.contracts.learner import Request
from fedsim.contracts.plugins import Plugin
from fedsim.contracts.stack import Stack
from fedsim.learners.sgd import train
from fedsim.models.base import build, normalize
from fedsim.models.local import features_function, features_of
from fedsim.recording.files import observation_id
from fedsim.scenario.build import (
    announce_defenses,
    build_learner,
    build_stack,
    declared_training,
    problem_of,
)
from fedsim.scenario.model import Data, PluginRef, Scenario
from fedsim.types import (
    Dataset,
    GroundTruth,
    LocalTraining,
    ModelSpec,
    Observation,
    ReleaseSpec,
    RowTruth,
    Table,
    Tensors,
    Update,
    as_pixels,
)
from fedsim.words import number_of

P = TypeVar("P", bound=Plugin)


class PluginContract(ABC, Generic[P]):
    """Base of all suites: tests the parameters and the source of what `make` returns."""

    @abstractmethod
    def make(self) -> P:
        """Returns the plugin under test, an equal one in each of several calls."""

    def test_parameters_are_resolved_and_unknown_ones_refused(self) -> None:
        plugin = self.make()
        resolved = plugin.model_dump(mode="json")
        assert type(plugin).model_validate(resolved) == plugin
        with pytest.raises(pydantic.ValidationError):
            type(plugin).model_validate({**resolved, "no_such_parameter": 1})

    def test_the_source_is_cited(self) -> None:
        cls = type(self.make())
        assert cls.paper, f"{cls.__name__}.paper: state the source"
        assert (cls.__doc__ or "").strip(), f"{cls.__name__}: state in a docstring what it does"


BOUND = 2.0
"""L2 bound that the suites take as proven by the defenses before."""


def example_training(**changes: object) -> LocalTraining:
    """Returns a `fedsgd` training of one step on 3 images at lr 0.1, with `changes` of fields."""
    fields: dict[str, object] = {"algorithm": "fedsgd", "steps": 1, "batch_size": 3, "lr": 0.1}
    return LocalTraining(**{**fields, **changes})  # type: ignore[arg-type]


def local_step(
    loss: LossFn,
    gradient: GradientFn,
    batch_size: int,
    shape: tuple[int, ...] = (1, 2, 2),
    classes: int = 5,
) -> LocalStep:
    """Returns a step of softmax regression, whose features are the flattened images.

    Args:
        loss: Need not be the model's.
        gradient: The direction so far.
        batch_size: Divides sums over a batch.
        shape: (C, H, W) of an image.
        classes: Number of classes.
    """
    spec = example_spec(shape, classes, hidden=[])
    model = build(spec, seed=0)
    return LocalStep(
        model=model,
        spec=spec,
        loss=loss,
        features=features_function(model, {}, example_training()),
        gradient=gradient,
        batch_size=batch_size,
    )


def example_spec(shape: tuple[int, ...], classes: int, **parameters: Any) -> ModelSpec:
    """Returns the description of an `mlp` with `parameters`, on images of `shape` (C, H, W)."""
    channels = shape[0]
    return ModelSpec(
        name="mlp",
        parameters=parameters,
        input_shape=shape,
        num_classes=classes,
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
    )


def stream(seed: int = 1) -> torch.Generator:
    """Returns a new torch generator on the CPU; the same seed is the same stream."""
    return torch.Generator().manual_seed(seed)


def mixed_update(scale: float = 1.0) -> dict[str, Tensor]:
    """Returns an update with each float type, 0-d, empty and repeated entries, times `scale`."""
    draw = stream(0)
    return {
        "single": scale * torch.randn(4, 3, generator=draw),
        "double": scale * torch.randn(5, generator=draw, dtype=torch.float64),
        "half": (scale * torch.randn(2, 3, generator=draw)).half(),
        "bfloat": (scale * torch.randn(3, generator=draw)).bfloat16(),
        "scalar": scale * torch.randn((), generator=draw),
        "empty": torch.zeros(0, 3),
        "ties": torch.full((6,), scale),
    }


def near(vectors: Tensor, by: float) -> Tensor:
    """Returns `vectors` (N, d), each moved in a fixed random direction by `by` times its length."""
    directions = torch.randn(vectors.shape, generator=stream())
    lengths = vectors.norm(dim=1, keepdim=True) / directions.norm(dim=1, keepdim=True)
    perturbed: Tensor = vectors + by * lengths * directions
    return perturbed


def zeros() -> dict[str, Tensor]:
    """Returns the update of a client that has learned nothing, shaped like `mixed_update`."""
    return {name: torch.zeros_like(tensor) for name, tensor in mixed_update().items()}


def non_finite(value: float) -> dict[str, Tensor]:
    """Returns `mixed_update` with one entry replaced by `value`, such as NaN or infinity."""
    update = mixed_update()
    update["single"][1, 1] = value
    return update


UPDATES: Mapping[str, Callable[[], dict[str, Tensor]]] = {
    "ordinary": mixed_update,
    "tiny": lambda: mixed_update(1e-6),
    "large": lambda: mixed_update(1e4),
    "zero": zeros,
    "no tensors": dict,
    "NaN": lambda: non_finite(math.nan),
    "infinite": lambda: non_finite(math.inf),
}


def same(a: Tensors, b: Tensors) -> bool:
    """Returns whether names, shapes, types and bits are equal; NaN equals NaN of the same sign."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and bool(((a[name] == b[name]) | (a[name].isnan() & b[name].isnan())).all())
        # 0.0 equals -0.0, but not in their bits.
        and bool((torch.signbit(a[name]) == torch.signbit(b[name])).all())
        for name in a
    )


def copy(tensors: Tensors) -> dict[str, Tensor]:
    """Returns clones of all tensors, by the same names."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def make_observation(
    images: Tensor,
    labels: Tensor,
    *,
    model: str = "lenet",
    model_parameters: Mapping[str, Any] | None = None,
    num_classes: int = 10,
    training: LocalTraining | None = None,
    defense: Sequence[Mapping[str, Any]] = (),
    num_clients: int = 1,
    seed: int = 0,
    weights: Tensors | None = None,
) -> tuple[Observation, GroundTruth]:
    """Returns what a server sees of clients who train a model on `images`, and the truth.

    Each client trains on as many images, normalized by a mean of 0.4 and a deviation of 0.25. All
    is computed on the CPU. The truth has images, labels and features, in the order of the images.

    Args:
        images: (N, C, H, W) pixels in [0, 1], ordered by client and then by step.
        labels: (N,) int64.
        model: Name of a registered model.
        model_parameters: Parameters of the model; None: its defaults.
        num_classes: Number of the model's classes.
        training: Declared training; None is one gradient of each client's images, in train mode.
        defense: Defenses as a scenario lists them, `name` and parameters each.
        num_clients: Number of clients; several need an aggregation defense to combine them.
        seed: Seed of the weights and the defenses' noise.
        weights: All parameters and buffers to start from, else a RuntimeError; None: fresh ones.

    Raises:
        ValueError: the number of images does not fit, several clients' updates are not combined, or
            a plugin refuses a parameter.
        FedsimError: a plugin is unknown, or the defenses do not fit.
    """
    refs = [reference(member) for member in defense]
    stack = build_stack(refs)
    declared = training or LocalTraining(
        algorithm="fedsgd", steps=1, batch_size=len(images) // num_clients, lr=0.1
    )
    # Steps follow what training defenses made of it; a stack itself is asked with the declared one.
    training = stack.training(declared)
    if len(images) != training.num_images * num_clients:
        raise ValueError(
            f"expected {number_of(num_clients * training.num_images, 'image')}, "
            f"{training.num_images} of each client, got {len(images)}"
        )
    if num_clients > 1 and stack.aggregation is None:
        raise ValueError("several clients' updates need an aggregation defense to combine them")

    spec = _spec_of(images, model, model_parameters, num_classes)
    network = build(spec, rng.derive(seed, "model"), stack.model_defenses)
    if weights is not None:
        network.load_state_dict(dict(weights))
    parameters = {name: value.detach().clone() for name, value in network.named_parameters()}
    buffers = {name: value.clone() for name, value in network.named_buffers()}
    updates, features = [], []
    for client, (x, y) in enumerate(
        zip(images.chunk(num_clients), labels.chunk(num_clients), strict=True)
    ):
        distinct = training.distinct_batches
        batches = list(zip(normalize(x, spec).chunk(distinct), y.chunk(distinct), strict=True))
        features += [features_of(network, parameters, buffers, b, training) for b, _ in batches]
        # Where batches are the `same`, the one batch serves every step.
        batches *= training.steps // distinct
        stream = rng.generator(seed, "defense", client)
        trained = train(network, spec, parameters, buffers, batches, training, stack, stream)
        defended, _ = stack.apply(trained.update, stack.init(trained.update, declared), stream)
        # In evaluation mode no statistics are updated, and clients send none.
        released = trained.buffers if training.mode == "train" else {}
        updates.append(Update(tensors=defended, num_examples=training.num_images, buffers=released))
    start = _Start(parameters, buffers, spec, training)
    observation = _observe(stack, refs, declared, None, updates, start, seed)
    truth = GroundTruth(images=images.clone(), labels=labels.clone(), features=torch.cat(features))
    return observation, truth


def _spec_of(
    images: Tensor, model: str, parameters: Mapping[str, Any] | None, num_classes: int
) -> ModelSpec:
    channels = images.shape[1]
    return ModelSpec(
        name=model,
        parameters=dict(parameters or {}),
        input_shape=(channels, images.shape[2], images.shape[3]),
        num_classes=num_classes,
        mean=(0.4,) * channels,
        std=(0.25,) * channels,
    )


@dataclass(frozen=True)
class _Start:
    parameters: Tensors
    buffers: Tensors
    spec: ModelSpec | ReleaseSpec
    training: LocalTraining


def _observe(
    stack: Stack,
    refs: Sequence[PluginRef],
    declared: LocalTraining,
    release: Release | None,
    updates: list[Update],
    start: _Start,
    seed: int,
) -> Observation:
    update = updates[0] if stack.aggregation is None else stack.aggregation.combine(updates)
    if isinstance(stack.aggregation, NoisyAggregation):
        # The last entry is the aggregation's own; its noise is made for what is proven before it.
        *_, before, _ = stack.guarantees(declared, release)
        stream = rng.generator(seed, "defense", "server")
        count, bound = len(updates), before.sensitivity
        update = stack.aggregation.add_noise(
            update, ServerRound(clients=count, sensitivity=bound, stream=stream, before=None)
        )
    client = -1 if stack.aggregation else 0
    return Observation(
        id=observation_id("example", 1, client, "training"),
        update=update.tensors,
        buffers_update=update.buffers,
        parameters=start.parameters,
        buffers=start.buffers,
        spec=start.spec,
        training=start.training,
        defense=announce_defenses(stack, refs, declared, release),
        effect=stack.effect(declared, release),
        vantage=stack.vantage,
        round=1,
        client=client,
        num_clients=len(updates),
        trial=0,
        seed=0,
    )


def reference(plugin: Mapping[str, Any]) -> PluginRef:
    """Returns a reference to the plugin `plugin["name"]`; all other keys are its parameters."""
    parameters = {key: value for key, value in plugin.items() if key != "name"}
    return PluginRef(name=plugin["name"], parameters=parameters)


def example_batch(count: int, shape: tuple[int, ...] = (1, 16, 16)) -> tuple[Tensor, Tensor]:
    """Returns fixed images (count, C, H, W) on [0, 1], and labels (count,) 3, 6, 9, 2, 5, ..."""
    images = torch.rand(count, *shape, generator=rng.generator(0, "example"))
    return images, (3 * torch.arange(1, count + 1)) % 10


_CPU = torch.device("cpu")


def make_release(
    rows: Tensor,
    members: Tensor,
    *,
    learner: str = "sketch",
    parameters: Mapping[str, Any] | None = None,
    defense: Sequence[Mapping[str, Any]] = (),
    num_clients: int = 1,
    intercept: bool = True,
    classes: tuple[str, ...] | None = None,
    row_norm: float | None = None,
    seed: int = 0,
) -> tuple[Observation, RowTruth]:
    """Returns what a server sees of a release from the `members` among `rows`, and the truth.

    Args:
        rows: (N, d + 1) float64 features and target in [-1, 1], by client; each has as many.
        members: (N,) bool: whether each row takes part.
        learner: Name of a registered closed-form learner.
        parameters: Parameters of the learner; None: its defaults.
        defense: Defenses as a scenario lists them, `name` and parameters each.
        num_clients: Number of clients; several need an aggregation defense to combine them.
        intercept: Whether the last feature is the constant 1.
        classes: Classes of a target that is -1 or +1; None for a quantity.
        row_norm: Bound on the L2 norm of a row; None: sqrt(d + 1).
        seed: Seed of the random matrices and the defenses' noise.

    Raises:
        FedsimError: a plugin is unknown, learner and defenses do not fit, or a row is longer than
            `row_norm`.
        ValueError: several clients are not combined, or a plugin refuses a parameter.
    """
    stack = _stack_for(num_clients, defense)
    size = rows.shape[1]
    # Nothing is computed from the rows (`private_statistics`), so that a claim can be made.
    table = Table(
        name="example",
        train_rows=rows,
        train_labels=torch.zeros(len(rows), dtype=torch.int64),
        test_rows=rows,
        columns=tuple(f"column {i}" for i in range(size)),
        row_norm=math.sqrt(size) if row_norm is None else row_norm,
        classes=classes,
        intercept=intercept,
        private_statistics=(),
    )
    scenario = _scenario(learner, parameters, num_clients)
    return _observe_release(
        scenario, stack, table, (rows, table.train_labels), members, defense, seed
    )


def make_kernel_release(
    images: Tensor,
    labels: Tensor,
    members: Tensor,
    *,
    parameters: Mapping[str, Any] | None = None,
    defense: Sequence[Mapping[str, Any]] = (),
    num_clients: int = 1,
    seed: int = 0,
) -> tuple[Observation, RowTruth]:
    """Returns what a server sees of a kernel regression of images, and the truth.

    A FedsimError says that a plugin is unknown, or that learner and defenses do not fit, and a
    ValueError that a plugin refuses a parameter.

    Args:
        images: (N, C, H, W) uint8, by client; each has as many.
        labels: (N,) int64, of which the largest is the last class.
        members: (N,) bool: whether each image takes part.
        parameters: Parameters of learner ntk; None: its defaults.
        defense: Defenses as a scenario lists them, `name` and parameters each.
        num_clients: Number of clients; several need an aggregation defense to combine them.
        seed: Seed of the random matrices and the defenses' noise.

    Raises:
        FedsimError: a plugin is unknown, or learner and defenses do not fit.
        ValueError: several clients are not combined, or a plugin refuses a parameter.
    """
    stack = _stack_for(num_clients, defense)
    channels = images.shape[1]
    dataset = Dataset(
        name="example",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        classes=tuple(f"class {i}" for i in range(int(labels.max()) + 1)),
        private_statistics=(),
    )
    learner = build_learner(PluginRef(name="ntk", parameters=dict(parameters or {})))
    scenario = _scenario("ntk", learner.model_dump(mode="json"), num_clients)
    held = (as_pixels(images), labels)
    return _observe_release(scenario, stack, dataset, held, members, defense, seed)


def _stack_for(num_clients: int, defense: Sequence[Mapping[str, Any]]) -> Stack:
    stack = build_stack([reference(member) for member in defense])
    if num_clients > 1 and stack.aggregation is None:
        raise ValueError("several clients' releases need an aggregation defense to combine them")
    return stack


def _scenario(learner: str, parameters: Mapping[str, Any] | None, clients: int) -> Scenario:
    return Scenario(
        name="example",
        data=Data(source=PluginRef(name="example"), clients=clients),
        learner=PluginRef(name=learner, parameters=dict(parameters or {})),
        attacks=[],
    )


def _observe_release(
    scenario: Scenario,
    stack: Stack,
    dataset: Dataset | Table,
    data: tuple[Tensor, Tensor],
    members: Tensor,
    defense: Sequence[Mapping[str, Any]],
    seed: int,
) -> tuple[Observation, RowTruth]:
    problem = problem_of(scenario, stack, dataset.without_training(), len(members), _CPU)
    refs = [reference(member) for member in defense]
    computation = build_learner(scenario.learner).start(problem)
    before, buffers = computation.initial()
    declared = declared_training(scenario.training)
    # All rows are dealt out, members or not, so that a client's share does not tell who took part.
    parts = torch.arange(len(members)).chunk(scenario.data.clients)
    updates = []
    for client, indices in enumerate(parts):
        kept = indices[members[indices]]
        stream = rng.generator(seed, "defense", client)
        request = Request(
            batches=[(data[0][kept], data[1][kept])],
            parameters=before,
            buffers=buffers,
            training=declared,
            # Apart from the defenses' stream, so that a defense changes no draw of the learner.
            stream=rng.generator(seed, "learner", client),
            recorded=True,
        )
        released = computation.compute(request, stream).update
        state = stack.init(released, declared, computation.release)
        defended, _ = stack.apply(released, state, stream)
        updates.append(Update(tensors=defended, num_examples=1))
    spec = computation.describe()
    assert spec is not None
    start = _Start(before, buffers, spec, declared)
    observation = _observe(stack, refs, declared, computation.release, updates, start, seed)
    order = torch.cat(parts)
    truth = computation.candidates(data[0][order], data[1][order])
    assert truth is not None
    clients = torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
    return observation, replace(
        truth, rows=truth.rows.clone(), members=members[order].clone(), clients=clients
    )


def example_rows(count: int, columns: int = 4) -> tuple[Tensor, Tensor]:
    """Returns fixed float64 rows (count, columns) on [-1, 1], and whether each takes part.

    The last column but one is 1. Two of three rows take part, the first does not.
    """
    stream = rng.generator(0, "example rows")
    rows = torch.rand(count, columns, generator=stream, dtype=torch.float64) * 2 - 1
    rows[:, -2] = 1
    return rows, torch.arange(count) % 3 > 0
