"""The ideal secure aggregation: the server sees the clients' mean and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, final

import torch
from torch import Tensor

from fedsim.defense import AggregationDefense, Guarantee, shapes
from fedsim.types import FedsimError, Tensors, Update


@final
class Aggregate(AggregationDefense):
    """Shows the server only the mean of the round's updates, weighted by their numbers of examples.

    What a secure-aggregation protocol promises, without the protocol: the yardstick for one. The
    mean is formed as the updates arrive, in float32 or wider, in the memory of one update; integer
    tensors are averaged and rounded. A non-finite entry of one client is non-finite in the mean.
    """

    paper: ClassVar[str] = (
        "Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, "
        "CCS 2017; the weights: McMahan et al., AISTATS 2017, Algorithm 1"
    )

    def combine(self, updates: Iterable[Update]) -> Update:
        """Mean of tensors and of buffers; `num_examples` is the total.

        Raises:
            FedsimError: there is no update, one counts less than one example, or their tensors
                differ in name or shape.
        """
        seen = 0
        tensors: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        first: Update | None = None
        for update in updates:
            if update.num_examples < 1:
                raise FedsimError(
                    f"aggregate: an update has num_examples {update.num_examples}; it is the "
                    "weight of the mean and must be at least 1"
                )
            seen += update.num_examples
            if first is None:
                first = update
                tensors, buffers = _widened(update.tensors), _widened(update.buffers)
            else:
                _move_towards(tensors, update.tensors, update.num_examples / seen)
                _move_towards(buffers, update.buffers, update.num_examples / seen)
        if first is None:
            raise FedsimError("aggregate: no client sent an update in this round")
        return Update(
            tensors=_narrowed(tensors, first.tensors),
            buffers=_narrowed(buffers, first.buffers),
            num_examples=seen,
        )

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Each client's own guarantee, whatever its weight.

        A mean with weights below 1 is no longer than the longest update, and it is computed from
        the client's release: post-processing. What the other clients' noise adds is not counted.
        """
        return before


def _widened(update: Tensors) -> dict[str, Tensor]:
    return {name: tensor.to(_wide(tensor), copy=True) for name, tensor in update.items()}


def _move_towards(mean: dict[str, Tensor], update: Tensors, weight: float) -> None:
    if shapes(mean) != shapes(update):
        raise FedsimError(
            "aggregate: the clients' updates differ in names or shapes of their tensors; all "
            "clients must train the same model"
        )
    for name, tensor in update.items():
        mean[name].lerp_(tensor.to(mean[name].dtype), weight)


def _narrowed(mean: Tensors, like: Tensors) -> dict[str, Tensor]:
    return {
        name: (tensor if like[name].is_floating_point() else tensor.round()).to(like[name].dtype)
        for name, tensor in mean.items()
    }


def _wide(tensor: Tensor) -> torch.dtype:
    if not tensor.is_floating_point():
        return torch.float64
    return torch.promote_types(tensor.dtype, torch.float32)
