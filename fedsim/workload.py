"""What one defense stack's federation computes, without a federation framework.

A `Workload` is built from (scenario, stack name) alone, so every process of a run (server, clients,
Ray actors) builds the same one. All batches are functions of (seed, round, client) and not of the
stack: every defense is attacked on the same victims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedsim import rng
from fedsim.data.base import DataSource
from fedsim.data.partition import partition, sample_batch
from fedsim.device import resolve_device
from fedsim.learners.sgd import train
from fedsim.models.base import build, normalize
from fedsim.models.local import features_of
from fedsim.models.planting import honest, planted
from fedsim.models.weights import read_weights
from fedsim.recording import observation_id
from fedsim.scenario import Scenario
from fedsim.scenario.build import build_stack, declared_training, plugin_class
from fedsim.types import (
    Dataset,
    FedsimError,
    GroundTruth,
    LocalTraining,
    ModelSpec,
    Observation,
    Tensors,
    Update,
)

_EVALUATION_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Probe:
    """An update that is asked for only to be recorded: it is never aggregated.

    It is what the same client would have released in this round, had its batch been another one of
    `batch_size` images; so leakage can be compared across batch sizes and over many trials.
    """

    batch_size: int
    trial: int
    release: int = 0
    """Which of several releases of the same batch; only a defense's randomness differs."""


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """What a client computed in a round. Only `update` (and `loss`, if reported) leaves it."""

    update: Update
    truth: GroundTruth
    """With features in a round that is observed."""
    state: Tensors
    """The client's defense state for its next round (unchanged by a probe)."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The global model on the test split."""

    loss: float
    accuracy: float


class Workload:
    """The computations of one defense stack's federation."""

    def __init__(self, scenario: Scenario, stack_name: str, dataset: Dataset | None = None) -> None:
        """`dataset` spares loading the source again.

        Raises:
            FedsimError: the data is missing, the partition is impossible, or the model does not
                fit the images.
        """
        self.scenario = scenario
        self.stack_name = stack_name
        self.device = torch.device(resolve_device(scenario.device))
        self.stack = build_stack(scenario.defenses[stack_name])
        declared = declared_training(scenario)
        self.declared = declared
        """Before the stack's training defenses."""
        self.training = self.stack.training(declared)
        self.dataset = load_dataset(scenario) if dataset is None else dataset
        with blaming("data.partition"):
            self.parts = partition(
                self.dataset,
                scenario.data.partition,
                scenario.data.clients,
                rng.derive(scenario.seed, "partition"),
                least=declared.batch_size,
            )
        self.spec = ModelSpec(
            name=scenario.model.name,
            parameters=scenario.model.parameters,
            input_shape=self.dataset.input_shape,
            num_classes=len(self.dataset.classes),
            mean=self.dataset.mean,
            std=self.dataset.std,
        )
        with blaming("model"):
            self.model = build(self.spec, rng.derive(scenario.seed, "model")).to(self.device)

    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(parameters, buffers) before the first round; the same for every stack.

        Raises:
            FedsimError: `training.weights` cannot be read, or are of another model.
        """
        if self.scenario.training.weights is not None:
            with blaming("training.weights"):
                return read_weights(Path(self.scenario.training.weights).expanduser(), self.model)
        make = honest if self.scenario.observe.plant else build
        fresh = make(self.spec, rng.derive(self.scenario.seed, "model"))
        parameters = {name: value.detach() for name, value in fresh.named_parameters()}
        return parameters, dict(fresh.named_buffers())

    def shortened(self, steps: int) -> Workload:
        """The same with at most so many local steps declared."""
        short = copy(self)
        short.declared = replace(self.declared, steps=min(steps, self.declared.steps))
        short.training = self.stack.training(short.declared)
        return short

    @property
    def releases_statistics(self) -> bool:
        """Whether clients also release batch-norm statistics of their data."""
        return self.training.mode == "train" and any(
            buffer.is_floating_point() for buffer in self.model.buffers()
        )

    def probed(self, parameters: Tensors, round: int) -> Tensors:
        """The weights at which the probes of `round` are computed, for the global `parameters`."""
        if not self.scenario.observe.plant:
            return parameters
        seed = rng.derive(self.scenario.seed, "plant", round)
        return planted(self.model, parameters, seed)

    def participants(self, round: int) -> list[int]:
        """Clients sampled in `round` (1-based), ascending."""
        clients = self.scenario.data.clients
        count = max(1, math.floor(self.scenario.federation.participation * clients + 0.5))
        stream = rng.generator(self.scenario.seed, "participants", round)
        return sorted(torch.randperm(clients, generator=stream)[:count].tolist())

    def is_observed(self, round: int) -> bool:
        """Whether anything is recorded in `round` (1-based)."""
        last = self.scenario.training.rounds
        return round in {last if r == "last" else r for r in self.scenario.observe.rounds}

    def observed(self, round: int) -> list[int]:
        """Clients whose update (of training or of a probe) is recorded in `round`."""
        if not self.is_observed(round):
            return []
        wanted = self.scenario.observe.clients
        probing = self.scenario.observe.batch_sizes is not None
        taking_part = self.participants(round)
        if self.stack.aggregation:
            return taking_part
        if wanted == "all":
            return list(range(self.scenario.data.clients)) if probing else taking_part
        return sorted(wanted) if probing else [c for c in taking_part if c in wanted]

    def probes(self, round: int) -> list[Probe]:
        """What `observed(round)` is asked besides training, `observe.releases` times each.

        Empty if the training update itself is recorded.
        """
        sizes = self.scenario.observe.batch_sizes
        if sizes is None or not self.is_observed(round):
            return []
        trials = range(self.scenario.observe.trials)
        return [Probe(batch_size=size, trial=trial) for size in sizes for trial in trials]

    def plans(self, round: int, probe: Probe | None) -> bool:
        """Whether the scenario asks for `probe` in `round`."""
        return (
            probe is not None
            and replace(probe, release=0) in self.probes(round)
            and probe.release < self.scenario.observe.releases
        )

    def recordings(self) -> Iterator[Observation]:
        """What a run without failures records, without tensors, in canonical order."""
        for round in range(1, self.scenario.training.rounds + 1):
            clients = self.observed(round)
            if not clients:
                continue
            seen = [-1] if self.stack.aggregation else clients
            asked: list[Probe | None] = list(self.probes(round)) or [None]
            for probe in asked:
                for client in seen:
                    yield self.observation(
                        round,
                        client,
                        Update(tensors={}, num_examples=0),
                        {},
                        {},
                        probe=probe,
                        num_clients=len(clients) if client < 0 else 1,
                        releases=self.scenario.observe.releases,
                    )

    def client_update(
        self,
        client: int,
        round: int,
        parameters: Tensors,
        buffers: Tensors,
        state: Tensors,
        *,
        probe: Probe | None = None,
    ) -> ClientResult:
        """Train `client` in `round` on the global model and apply the stack. Pure.

        `state` is the client's defense state after its previous round (empty before the first).

        Raises:
            FedsimError: the batch is larger than the client's data.
        """
        training = self._training(probe)
        path = (round, client) if probe is None else (round, client, probe.batch_size, probe.trial)
        pixels, labels = self._batches(client, training, path)
        parameters = {name: value.to(self.device) for name, value in parameters.items()}
        buffers = {name: value.to(self.device) for name, value in buffers.items()}
        batches = [
            (normalize(x.to(self.device), self.spec), y.to(self.device))
            for x, y in zip(pixels, labels, strict=True)
        ]
        again = (probe.release,) if probe and probe.release else ()
        stream = rng.generator(self.scenario.seed, "defense", *path, *again)
        with self.stack.recalling(state) as remembered:
            trained = train(self.model, parameters, buffers, batches, training, self.stack, stream)
        update = {name: value.cpu() for name, value in trained.update.items()}
        before = state or self.stack.init(update, self._declared(probe))
        defended, after = self.stack.apply(update, before, stream)
        return ClientResult(
            update=Update(
                tensors=defended,
                num_examples=training.num_images,
                buffers={name: value.cpu() for name, value in trained.buffers.items()},
            ),
            truth=self._truth(round, batches, pixels, labels, parameters, buffers, training),
            state={**after, **remembered} if probe is None else state,
            loss=trained.loss,
        )

    def observation(
        self,
        round: int,
        client: int,
        update: Update,
        parameters: Tensors,
        buffers: Tensors,
        *,
        probe: Probe | None = None,
        num_clients: int = 1,
        releases: int = 1,
    ) -> Observation:
        """What the attacker saw of `update`, decoded from the wire; client -1: the aggregate.

        Of several `releases` it is their mean.
        """
        return Observation(
            id=self.observation_id(round, client, probe),
            update=update.tensors,
            buffers_update=update.buffers,
            parameters=parameters,
            buffers=buffers,
            model=self.spec,
            training=self._training(probe),
            defense=tuple(
                {"name": ref.name, **ref.parameters}
                for ref in self.scenario.defenses[self.stack_name]
            ),
            vantage=self.stack.vantage,
            round=round,
            client=client,
            num_clients=num_clients,
            trial=probe.trial if probe else 0,
            seed=self.scenario.seed,
            releases=releases,
        )

    def observation_id(self, round: int, client: int, probe: Probe | None) -> str:
        """The id under which an update is recorded; client -1 is the aggregate."""
        suffix = f"b{probe.batch_size}-t{probe.trial}" if probe else "training"
        return observation_id(self.stack_name, round, client, suffix)

    def evaluate(self, parameters: Tensors, buffers: Tensors) -> Evaluation:
        """Mean loss and accuracy of the global model on the test split."""
        self.model.eval()
        state = {name: value.to(self.device) for name, value in {**parameters, **buffers}.items()}
        total = torch.zeros((), dtype=torch.float64)
        correct = 0
        images, labels = self.dataset.test_images, self.dataset.test_labels
        with torch.no_grad():
            for start in range(0, len(labels), _EVALUATION_BATCH):
                chunk = slice(start, start + _EVALUATION_BATCH)
                inputs = normalize(as_pixels(images[chunk]).to(self.device), self.spec)
                target = labels[chunk].to(self.device)
                logits = functional_call(self.model, state, (inputs,))
                total += F.cross_entropy(logits, target, reduction="sum").double().cpu()
                correct += int((logits.argmax(1) == target).sum())
        return Evaluation(loss=float(total) / len(labels), accuracy=correct / len(labels))

    def _training(self, probe: Probe | None) -> LocalTraining:
        return self.stack.training(self._declared(probe))

    def _declared(self, probe: Probe | None) -> LocalTraining:
        return replace(self.declared, batch_size=probe.batch_size) if probe else self.declared

    def _batches(
        self, client: int, training: LocalTraining, path: tuple[int, ...]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Pixels and labels of every local step."""
        pixels, labels = [], []
        distinct = training.steps if training.batches == "different" else 1
        for step in range(distinct):
            stream = rng.generator(self.scenario.seed, "batch", *path, step)
            chosen = sample_batch(self.parts[client], training.batch_size, stream)
            pixels.append(as_pixels(self.dataset.train_images[chosen]))
            labels.append(self.dataset.train_labels[chosen])
        repeat = training.steps // distinct
        return pixels * repeat, labels * repeat

    def _truth(
        self,
        round: int,
        batches: list[tuple[Tensor, Tensor]],
        pixels: list[Tensor],
        labels: list[Tensor],
        parameters: Tensors,
        buffers: Tensors,
        training: LocalTraining,
    ) -> GroundTruth:
        distinct = training.num_images // training.batch_size
        features = None
        if self.is_observed(round):  # of other rounds nobody will ask for them
            parts = [
                features_of(self.model, parameters, buffers, images, training)
                for images, _ in batches[:distinct]
            ]
            features = torch.cat(parts).cpu()
        return GroundTruth(
            images=torch.cat(pixels[:distinct]),
            labels=torch.cat(labels[:distinct]),
            features=features,
        )


def load_dataset(scenario: Scenario) -> Dataset:
    """Load the scenario's data source.

    Raises:
        FedsimError: the source is not installed, or its data is missing or unreadable.
    """
    chosen = scenario.data.source
    with blaming("data.source"):
        source = plugin_class("fedsim.data", chosen.name).model_validate(chosen.parameters)
        assert isinstance(source, DataSource)
        return source.load()


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """Let a FedsimError from inside start with the scenario's key that is to blame."""
    try:
        yield
    except FedsimError as error:
        raise FedsimError(f"{key}: {error}") from error


def as_pixels(images: Tensor) -> Tensor:
    """uint8 images -> float32 pixels in [0, 1]."""
    return images.float() / 255
