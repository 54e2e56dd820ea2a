"""The SGD learner: what a client computes from its batches under a defense stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import rng
from fedsim.defense import Stack
from fedsim.models.base import Classifier
from fedsim.models.local import gradient, local_update, loss_function
from fedsim.types import LocalTraining, Tensors

NAME = "sgd"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of local training, before the update defenses."""

    update: Tensors
    buffers: Tensors
    """New floating-point buffers (batch-norm statistics)."""
    loss: float
    """Mean loss of the first batch under the global weights."""


def train(
    model: Classifier,
    parameters: Tensors,
    buffers: Tensors,
    batches: Sequence[tuple[Tensor, Tensor]],
    training: LocalTraining,
    stack: Stack,
    generator: torch.Generator,
) -> Trained:
    """Train as `training` says (already with the stack's training defenses) on `batches`.

    Each batch is (normalized images (B, C, H, W), labels (B,)), one per step.
    """
    own = {name: value.clone() for name, value in buffers.items()}
    loss = loss_function(model, own, training)
    losses: list[Tensor] = []

    def plain(at: Tensors, images: Tensor, labels: Tensor, _: torch.Generator) -> Tensors:
        return gradient(loss, at, images, labels, on_loss=losses.append)

    direction = stack.gradient(loss, plain)
    with rng.global_stream(int(torch.randint(2**62, (), generator=generator))):
        update = local_update(
            lambda at, images, labels: direction(at, images, labels, generator),
            parameters,
            batches,
            training,
        )
        if not losses:  # a training defense computes gradients of its own
            with torch.no_grad():
                scratch = {name: value.clone() for name, value in buffers.items()}
                measured = loss_function(model, scratch, training)
                losses.append(measured(parameters, *batches[0]))
    return Trained(
        update={name: value.detach() for name, value in update.items()},
        buffers={name: value for name, value in own.items() if value.is_floating_point()},
        loss=float(losses[0]),
    )
