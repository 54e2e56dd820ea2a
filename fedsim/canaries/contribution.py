"""What one canary contributes to a release, and what the server sees of it.

The global model stays at its start, as of a server that sends it again: a claim is one against any
server.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim import rng
from fedsim.defense import global_norm
from fedsim.learners.sgd import as_pixels
from fedsim.models.base import normalize
from fedsim.models.local import gradient, loss_function
from fedsim.types import Dataset, Tensors
from fedsim.workload import Workload


def images(workload: Workload) -> Dataset:
    """The workload's data, which are images: no closed-form learner claims what canaries try."""
    assert isinstance(workload.dataset, Dataset), "closed-form learners make no such claim"
    return workload.dataset


def other_label(data: Dataset, label: Tensor) -> Tensor:
    """The label that a canary has in the other world."""
    return (label + 1) % len(data.classes)


def client_update(workload: Workload, *path: int) -> Tensors:
    """An update of twice the stack's bound on a client's, in a random direction of its own."""
    parameters, _ = workload.initial()
    proven = workload.stack.guarantees(workload.declared)
    bound = [held.sensitivity for held in proven if held.mechanism is None][-1]
    stream = rng.generator(workload.scenario.seed, "canary", *path)
    toward = {
        name: torch.randn(value.shape, generator=stream) for name, value in parameters.items()
    }
    size = 2 * bound / float(global_norm(toward))
    return {name: size * value for name, value in toward.items()}


def unit_gradient(workload: Workload, image: Tensor, label: Tensor) -> Tensors:
    """The gradient of one example's loss at the initial model, scaled to a norm of 1.

    Args:
        image: (1, C, H, W), as the dataset holds it.
        label: 0-d.
    """
    assert workload.model is not None and workload.spec is not None
    device = workload.device
    parameters, buffers = workload.initial()
    state = {name: value.to(device) for name, value in buffers.items()}
    loss = loss_function(workload.model, state, workload.training)
    inputs = normalize(as_pixels(image).to(device), workload.spec)
    at = {name: value.to(device) for name, value in parameters.items()}
    found = gradient(loss, at, inputs, label.reshape(1).to(device))
    norm = float(global_norm(found))
    return {name: (value / norm).cpu() for name, value in found.items()}


def along(update: Tensors, toward: Tensors) -> float:
    """Their inner product, all tensors together."""
    return sum(
        float(torch.dot(update[name].flatten().double(), value.flatten().double()))
        for name, value in toward.items()
    )
