"""Trains many clients at once: the same local training as `fedsim.models.local`, stacked.

A small network leaves a processor waiting for the next operation. So K clients take each step
together, as one operation on weights that are stacked along a first axis.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedsim.models.base import Classifier
from fedsim.models.local import gradient, local_update, loss_function
from fedsim.types import FedsimError, LocalTraining, Tensors


def local_updates(
    model: Classifier,
    parameters: Tensors,
    buffers: Tensors,
    batches: Iterable[tuple[Tensor, Tensor]],
    training: LocalTraining,
) -> Tensors:
    """Computes the updates of K clients, stacked (K, ...), by the parameters' names.

    Client k's is what `local_update` makes of the k-th weights and batches, up to rounding.

    Args:
        model: Network that all clients train.
        parameters: Weights that each client starts from, stacked (K, ...).
        buffers: Buffers of the network, the same for all clients.
        batches: Per step, the clients' normalized images (K, B, ...) and labels (K, B), or
            probabilities (K, B, C).
        training: Local training of every client.

    Raises:
        FedsimError: the clients cannot share a step (`require_batched`).
    """
    require_batched(model, training)
    losses = torch.vmap(loss_function(model, buffers, training))

    def total(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        # No client's loss depends on another's weights, so the sum's gradient is that of each.
        each: Tensor = losses(parameters, images, labels)
        return each.sum()

    def direction(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        return gradient(total, parameters, images, labels)

    # All else in a step works entry by entry, and so on stacked weights, too.
    return local_update(direction, parameters, batches, training)


def require_batched(model: Classifier, training: LocalTraining) -> None:
    """Refuses a network whose clients cannot take their steps together.

    Raises:
        FedsimError: batch norm would write each client's statistics into common buffers, or dropout
            would draw for all clients.
    """
    if training.mode != "train":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise FedsimError(
                f"model: {name} is batch norm in training mode, which keeps statistics of one "
                "client, so clients cannot be trained at once; use `norm: group` or `mode: eval`"
            )
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if drops or (training.dropout and module in model._dropouts):
            raise FedsimError(
                f"model: {name} drops out at random in training mode, so clients cannot be trained "
                "at once; set dropout to 0, or use `mode: eval`"
            )
