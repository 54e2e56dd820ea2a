"""Computes what one canary contributes to a release, and what the server sees of it."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import global_norm
from fedsim.models.base import normalize
from fedsim.models.local import LossFn, gradient, loss_function
from fedsim.training.workload import Workload
from fedsim.types import Dataset, Tensors, as_pixels


class Contributions:
    """Computes what canaries contribute at the model `start`, its (parameters, buffers).

    If `start` is None, it is the workload's model before training.
    """

    def __init__(self, workload: Workload, start: tuple[Tensors, Tensors] | None = None) -> None:
        self._workload = workload
        self.start = workload.initial() if start is None else start
        """(parameters, buffers) of the model at which contributions are computed."""

    def client_update(self, *path: int) -> Tensors:
        """Returns a random update on the CPU, of twice the L2 norm that the stack allows.

        The stack has to bound the norm of a client's update. `path`, such as a client's number,
        gives the direction: the same path, the same one.
        """
        proven = self._workload.stack.guarantees(self._workload.declared)
        # The last stage without a mechanism has the bound that noise is then added to.
        bound = [held.sensitivity for held in proven if held.mechanism is None][-1]
        stream = rng.generator(self._workload.scenario.seed, "canary", *path)
        toward = {
            name: torch.randn(value.shape, generator=stream)
            for name, value in self.start[0].items()
        }
        # Longer than the bound, so that clipping that does not act is found out.
        size = 2 * bound / float(global_norm(toward))
        return {name: size * value for name, value in toward.items()}

    def unit_gradient(self, image: Tensor, label: Tensor) -> Tensors:
        """Computes the gradient of one example's loss, scaled to an L2 norm of 1, on the CPU.

        `image` is (1, C, H, W), not normalized: bytes, or pixels in [0, 1]; `label` is its class,
        0-d. A gradient of zero becomes NaN. An update of a descent step goes the other way.
        """
        assert self._workload.spec is not None
        device = self._workload.device
        inputs = normalize(as_pixels(image).to(device), self._workload.spec)
        found = gradient(self._loss, self._parameters, inputs, label.reshape(1).to(device))
        norm = float(global_norm(found))
        return {name: (value / norm).cpu() for name, value in found.items()}

    @cached_property
    def _parameters(self) -> Tensors:
        return {name: value.to(self._workload.device) for name, value in self.start[0].items()}

    @cached_property
    def _loss(self) -> LossFn:
        assert self._workload.model is not None
        state = {name: value.to(self._workload.device) for name, value in self.start[1].items()}
        return loss_function(self._workload.model, state, self._workload.training)


def images(workload: Workload) -> Dataset:
    """Returns the workload's data, which have to be a Dataset: an AssertionError for a Table."""
    assert isinstance(workload.dataset, Dataset), "closed-form learners make no such claim"
    return workload.dataset


def other_label(data: Dataset, label: Tensor) -> Tensor:
    """Returns the class after `label` (0 after the last), a canary's in the other world."""
    return (label + 1) % len(data.classes)


def along(update: Tensors, toward: Tensors) -> float:
    """Returns the inner product of two updates on the CPU, over the tensors that `toward` has."""
    return sum(
        float(torch.dot(update[name].flatten().double(), value.flatten().double()))
        for name, value in toward.items()
    )
