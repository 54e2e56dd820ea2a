"""What a defense stack puts between the computed update and the one that is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.stack import Stack
from fedsim.forecasting.plan import Plan
from fedsim.forecasting.sensitivity import flat
from fedsim.learners.sgd import train
from fedsim.models.base import Classifier
from fedsim.models.local import step_weights
from fedsim.types import LocalTraining, Noise, Observation, Tensors

_NONE = Stack()


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """An update y that is seen of a computed one u, as y / scale = u + error + noise."""

    scale: float
    """The factor of clipping; 1 where nothing is scaled."""
    error: Tensor | None
    """(m,): what pruning, rounding, or anything undeclared does; None where the update is exact
    but for noise."""
    std: float
    """Deviation of Gaussian noise in each entry of y / scale; 0 where `error` has it already."""


def disturbance(
    plan: Plan,
    observation: Observation,
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    names: tuple[str, ...],
) -> Disturbance:
    """Returns what the stack does to the update of these images.

    Noise that is all that is added is taken from what the stack declares, and drawn nowhere: so a
    larger one is never a smaller disturbance. Everything else is computed as a client would.

    Args:
        plan: Whose stack.
        observation: The round's.
        model: As the update is of.
        images: (N, C, H, W), normalized float64: of the first client's first step, and so on.
        labels: (N,).
        names: Of the update's tensors, in the order of the vector.
    """
    effect, clients = observation.effect, observation.num_clients
    altered = not effect.known or effect.removed or effect.rounded or effect.mixed
    scaled = effect.scaled or effect.scaled_examples
    std = noise_std(effect.noise, observation.training, clients)
    if not altered and not scaled:
        return Disturbance(scale=1.0, error=None, std=std)
    plain: list[Tensors] = []
    defended: list[Tensors] = []
    state = model.to(torch.float32)
    groups = zip(images.float().chunk(clients), labels.chunk(clients), strict=True)
    for number, (x, y) in enumerate(groups):
        stream = rng.generator(observation.seed, "disturbance", number)
        for bare, kept in ((True, plain), (False, defended)):
            kept.append(_update(plan, observation, state, x, y, stream, bare=bare))
    computed = torch.stack([flat(each, names) for each in plain]).mean(0).double()
    seen = torch.stack([flat(each, names) for each in defended]).mean(0).double()
    scale = 1.0
    if effect.scaled_examples or (scaled and effect.bound is None):
        scale = _projected(seen, computed, std)
    elif scaled:
        assert effect.bound is not None
        norms = [float(flat(each, names).norm()) for each in plain]
        scale = sum(min(1.0, effect.bound / max(n, 1e-30)) for n in norms) / len(norms)
    return Disturbance(
        scale=scale,
        error=seen / scale - computed if altered else None,
        std=0.0 if altered else std / scale,
    )


def _projected(seen: Tensor, computed: Tensor, std: float) -> float:
    """Returns the factor of `computed` in `seen`, less two deviations of what noise adds to it."""
    norm = max(float(computed.norm()), 1e-30)
    factor = float(seen @ computed) / norm**2 - 2 * std / norm
    return min(1.0, max(factor, 1e-6))


def noise_std(noise: tuple[Noise, ...], training: LocalTraining, clients: int) -> float:
    """Returns the deviation of all `noise` in an entry of the mean update of so many clients."""
    single = training.algorithm == "fedsgd"
    steps = 1.0 if single else training.lr**2 * sum(w * w for w in step_weights(training))
    share = {"step": steps / clients, "update": 1 / clients, "sum": 1 / clients**2}
    return math.sqrt(sum(each.variance * share[each.on] for each in noise))


def _update(
    plan: Plan,
    observation: Observation,
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    stream: rng.Stream,
    *,
    bare: bool,
) -> Tensors:
    training = observation.training
    if training.batches == "different" and training.steps > 1:
        batches = list(zip(images.chunk(training.steps), labels.chunk(training.steps), strict=True))
    else:
        batches = [(images, labels)] * training.steps
    stack = _NONE if bare else plan.stack
    with stack.memory_of({}):
        trained = train(
            model, observation.parameters, observation.buffers, batches, training, stack, stream
        )
    update = trained.update
    if bare:
        return update
    state = stack.init(update, plan.declared)
    return stack.apply(update, state, stream)[0]
