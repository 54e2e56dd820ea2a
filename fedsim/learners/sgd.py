"""Implements the SGD learner: what a client computes from its batches under a defense stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedsim import rng
from fedsim.contracts.defense import LocalStep, global_norm
from fedsim.contracts.learner import (
    Computation,
    Computed,
    Evaluation,
    Problem,
    Request,
    TrainingLearner,
    model_spec,
)
from fedsim.contracts.stack import Stack
from fedsim.models.base import Classifier, build, normalize, read_weights
from fedsim.models.head import build_honest, plant_neurons
from fedsim.models.local import (
    features_function,
    features_of,
    gradient,
    local_update,
    loss_function,
)
from fedsim.system.device import compute_exactly
from fedsim.system.paths import from_home
from fedsim.types import (
    Dataset,
    FedsimError,
    GroundTruth,
    LocalTraining,
    ModelSpec,
    Tensors,
    as_pixels,
)

_EVALUATION_BATCH = 256


@final
class SGD(TrainingLearner):
    """Trains a model on images or a table by stochastic gradient descent, as `training` says.

    A client releases a gradient (fedsgd) or the change of its weights (fedavg); the server moves
    the global weights by what its strategy makes of them.
    """

    data = Dataset

    def start(self, problem: Problem) -> Computation:
        """Binds the learner to one stack's federation; a FedsimError if its model does not fit."""
        return _SGDTraining(problem)


@final
class _SGDTraining(Computation):
    spec: ModelSpec
    model: Classifier

    def __init__(self, problem: Problem) -> None:
        dataset = problem.dataset
        assert isinstance(dataset, Dataset)
        self._problem = problem
        self._stack = problem.stack
        self._dataset = dataset
        self._device = problem.device
        compute_exactly(self._device)
        self.spec = model_spec(problem)
        self._altering = problem.stack.model_defenses
        self.model = build(self.spec, self._seed, self._altering).to(self._device)
        # Batch norm's counter is an integer, which no client releases.
        self.releases_statistics = any(
            buffer.is_floating_point() for buffer in self.model.buffers()
        )

    @property
    def _seed(self) -> int:
        return rng.derive(self._problem.seed, "model")

    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if self._problem.weights is not None:
            return read_weights(from_home(self._problem.weights), self.model)
        # Training computes with weights that are put in its place: the model keeps those it has.
        fresh: Classifier = self.model
        if self._problem.plants:
            fresh = build_honest(self.spec, self._seed, self._altering)
        return (
            {name: value.detach().clone().cpu() for name, value in fresh.named_parameters()},
            {name: value.clone().cpu() for name, value in fresh.named_buffers()},
        )

    def compute(self, request: Request, rng: torch.Generator) -> Computed:
        parameters = {name: value.to(self._device) for name, value in request.parameters.items()}
        buffers = {name: value.to(self._device) for name, value in request.buffers.items()}
        batches = [
            (normalize(x.to(self._device), self.spec), y.to(self._device))
            for x, y in request.batches
        ]
        trained = train(
            self.model, self.spec, parameters, buffers, batches, request.training, self._stack, rng
        )
        return Computed(
            update=trained.update,
            buffers=trained.buffers,
            num_examples=request.training.num_images,
            truth=self._truth(request, batches, parameters, buffers, trained),
            loss=trained.loss,
        )

    def apply_update(self, before: Tensor, update: Tensor, training: LocalTraining) -> Tensor:
        if training.algorithm == "fedsgd":
            return before - training.lr * update
        return before + update

    def told_update(self, before: Tensor, after: Tensor, training: LocalTraining) -> Tensor:
        if self._problem.projection_radius is not None:
            raise FedsimError(
                "the server projects the weights (training.projection_radius), so that two global "
                "models do not tell the mean update; remove the radius, or client from "
                "observe.vantages"
            )
        # In float64 the difference adds no rounding to that of the weights.
        moved = after.double() - before.double()
        return -moved / training.lr if training.algorithm == "fedsgd" else moved

    def finalize(self, mean: Tensors, clients: int) -> Tensors:
        radius = self._problem.projection_radius
        if radius is None:
            return mean
        start = self._start
        offset = {name: value - start[name] for name, value in mean.items()}
        norm = float(global_norm(offset))
        if norm <= radius:
            return mean
        return {name: start[name] + radius / norm * value for name, value in offset.items()}

    @cached_property
    def _start(self) -> Tensors:
        return self.initial()[0]

    def plant_probe(self, parameters: Tensors, seed: int) -> Tensors:
        return plant_neurons(self.model, parameters, seed)

    def evaluate(self, parameters: Tensors, buffers: Tensors) -> Evaluation:
        self.model.eval()
        state = {name: value.to(self._device) for name, value in {**parameters, **buffers}.items()}
        total = torch.zeros((), dtype=torch.float64)
        correct = 0
        images, labels = self._dataset.test_images, self._dataset.test_labels
        with torch.no_grad():
            for start in range(0, len(labels), _EVALUATION_BATCH):
                chunk = slice(start, start + _EVALUATION_BATCH)
                inputs = normalize(as_pixels(images[chunk]).to(self._device), self.spec)
                target = labels[chunk].to(self._device)
                logits = functional_call(self.model, state, (inputs,))
                total += F.cross_entropy(logits, target, reduction="sum").double().cpu()
                correct += int((logits.argmax(1) == target).sum())
        return Evaluation(loss=float(total) / len(labels), accuracy=correct / len(labels))

    def _truth(
        self,
        request: Request,
        batches: Sequence[tuple[Tensor, Tensor]],
        parameters: Tensors,
        buffers: Tensors,
        trained: Trained,
    ) -> GroundTruth:
        training = request.training
        # Under `batches: same` every step repeats the first batch, which counts once.
        distinct = training.distinct_batches
        used = batches[:distinct]
        features = losses = None
        if request.recorded:
            # The model draws what it drew in the first step.
            with rng.global_stream(trained.seed):
                parts = [
                    features_of(self.model, parameters, buffers, images, training)
                    for images, _ in used
                ]
                features = torch.cat(parts).cpu()
                if training.algorithm == "fedavg" and any(len(labels) for _, labels in used):
                    moved = trained.update
                    after = {name: value + moved[name] for name, value in parameters.items()}
                    losses = torch.stack(
                        [self._mean_loss(at, buffers, used, training) for at in (parameters, after)]
                    )
        widths = torch.tensor([column.width for column in self.spec.columns])
        # Number of the table's column that each input entry comes from; images have none.
        columns = torch.arange(len(widths)).repeat_interleave(widths) if len(widths) else None
        return GroundTruth(
            images=torch.cat([pixels for pixels, _ in request.batches[:distinct]]),
            labels=torch.cat([labels for _, labels in request.batches[:distinct]]),
            more={} if columns is None else {"columns": columns},
            features=features,
            local_losses=losses,
        )

    def _mean_loss(
        self,
        parameters: Tensors,
        buffers: Tensors,
        batches: Sequence[tuple[Tensor, Tensor]],
        training: LocalTraining,
    ) -> Tensor:
        scratch = {name: value.clone() for name, value in buffers.items()}
        loss = loss_function(self.model, scratch, replace(training, dropout=0.0))
        sizes = torch.tensor([float(len(labels)) for _, labels in batches])
        with torch.no_grad():
            # Poisson sampling may draw an empty batch, of which the mean is NaN.
            losses = [loss(parameters, *batch).cpu() for batch in batches if len(batch[1])]
        return (torch.stack(losses) * sizes[sizes > 0]).sum() / sizes.sum()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Holds the result of local training, before the update defenses."""

    update: Tensors
    """Gradient or change of weights, named like the parameters."""
    buffers: Tensors
    """All floating-point buffers (batch-norm statistics) after training."""
    seed: int
    """Seed of torch's global stream, from which the model drew."""
    loss: float
    """Loss of the first batch under the global weights: the examples' sum over `batch_size`."""


def train(
    model: Classifier,
    spec: ModelSpec,
    parameters: Tensors,
    buffers: Tensors,
    batches: Sequence[tuple[Tensor, Tensor]],
    training: LocalTraining,
    stack: Stack,
    generator: torch.Generator,
) -> Trained:
    """Trains on `batches` as `training` says, and returns the result before the update defenses.

    All tensors are on one device, and so is the result. Defenses with a memory go on from a
    client's earlier steps only inside `stack.memory_of`. Errors are those of `Stack.gradient` and
    `loss_function`.

    Args:
        model: Network that computes the loss; its weights stay, and its mode may change.
        spec: Description of the model, which defenses of steps are handed.
        parameters: Global weights by name, which stay as they are.
        buffers: Global buffers by name, which stay as they are.
        batches: (normalized images (B, C, H, W), labels (B,)) of each step. Sums are divided by
            `training.batch_size`, also where B varies.
        training: Local training as the stack's training defenses change it.
        stack: Defenses, of which those of training make the direction of a step.
        generator: Stream of the defenses' and the model's draws, on the CPU.
    """
    updated = {name: value.clone() for name, value in buffers.items()}
    loss = loss_function(model, updated, training)
    losses: list[Tensor] = []

    def plain(at: Tensors, images: Tensor, labels: Tensor, _: torch.Generator) -> Tensors:
        # An example's weight must not depend on how many others are drawn.
        share = len(images) / training.batch_size
        if share == 0:
            losses.append(torch.zeros(()))
            return {name: torch.zeros_like(value) for name, value in at.items()}
        grads = gradient(
            loss, at, images, labels, on_loss=lambda value: losses.append(share * value)
        )
        return grads if share == 1 else {name: share * grad for name, grad in grads.items()}

    scratch = {name: value.clone() for name, value in buffers.items()}
    direction = stack.gradient(
        LocalStep(
            model=model,
            spec=spec,
            loss=loss,
            # What a defense looks at leaves batch-norm statistics as they are.
            features=features_function(model, scratch, training),
            gradient=plain,
            batch_size=training.batch_size,
        )
    )
    # Layers draw from torch's global stream; by its seed the truth can repeat their draws.
    seed = int(torch.randint(2**62, (), generator=generator))
    with rng.global_stream(seed):
        update = local_update(
            lambda at, images, labels: direction(at, images, labels, generator),
            parameters,
            batches,
            training,
        )
        share = len(batches[0][0]) / training.batch_size
        if not losses and share:  # a training defense computes gradients of its own
            with torch.no_grad():
                measured = loss_function(model, scratch, training)
                losses.append(share * measured(parameters, *batches[0]))
    return Trained(
        update={name: value.detach() for name, value in update.items()},
        buffers={name: value for name, value in updated.items() if value.is_floating_point()},
        seed=seed,
        loss=float(losses[0]) if losses else 0.0,
    )
