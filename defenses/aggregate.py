"""The ideal secure aggregation: the server sees the clients' mean and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedsim.contracts.defense import AggregationDefense, shapes
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, FedsimError, Tensors, Update


@final
class Aggregate(AggregationDefense):
    """Shows the server only the mean of the round's updates, weighted by their numbers of examples.

    It is the ideal result of secure aggregation, without a protocol. The mean is formed as updates
    arrive, in float32 or wider, in the memory of one update. It comes in the types of the first
    update, integers rounded. An entry that is not finite in one update is not finite in the mean.
    """

    averages: ClassVar[bool] = True

    paper: ClassVar[str] = (
        "Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, "
        "CCS 2017; the weights: McMahan et al., AISTATS 2017, Algorithm 1"
    )

    def combine(self, updates: Iterable[Update]) -> Update:
        """Returns the weighted mean of tensors and buffers; `num_examples` is the total.

        A FedsimError says that there is no update, one has no examples, or tensors differ in name
        or shape.
        """
        seen = 0
        tensors, buffers = _RunningMean(), _RunningMean()
        for update in updates:
            if update.num_examples < 1:
                raise FedsimError(
                    f"aggregate: an update has num_examples {update.num_examples}; it is the "
                    "weight of the mean and must be at least 1"
                )
            # The mean so far moves towards each update by its
            # share of all examples: no sum is held.
            seen += update.num_examples
            tensors.move_towards(update.tensors, update.num_examples / seen)
            buffers.move_towards(update.buffers, update.num_examples / seen)
        if seen == 0:
            raise FedsimError("aggregate: no client sent an update in this round")
        return Update(tensors=tensors.read(), buffers=buffers.read(), num_examples=seen)

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns `before`, or its `pooled` mechanism where clients share the noise among them."""
        # A mean with weights below 1 is no longer than the longest update, and it is computed from
        # the client's release: post-processing. What other clients' noise adds is not counted,
        # unless they share it: then each counts one example, so that the mean is a plain one.
        return replace(before, mechanism=before.pooled, pooled=None) if before.pooled else before

    def effect(self, before: Guarantee) -> Effect:
        """Returns an empty Effect: nothing is added to the mean."""
        return Effect()


def sum_updates(updates: Iterable[Update], who: str) -> Update:
    """Returns the sum of the updates' tensors, added up in float64, and the mean of their buffers.

    All updates weigh alike. `num_examples` is the total. Sums of two or more half-precision tensors
    are float32; other types stay. `who` names the caller in the FedsimError where there is no
    update; another says that tensors differ in name or shape.
    """
    count = examples = 0
    tensors, buffers = _RunningMean(torch.float64), _RunningMean()
    for update in updates:
        count += 1
        examples += update.num_examples
        tensors.move_towards(update.tensors, 1 / count)
        buffers.move_towards(update.buffers, 1 / count)
    if count == 0:
        raise FedsimError(f"{who}: no client sent an update in this round")
    return Update(tensors=tensors.read(times=count), buffers=buffers.read(), num_examples=examples)


class _RunningMean:
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Starts an empty mean; floats are added up in `dtype` or wider."""
        self._least = dtype
        self._mean: dict[str, Tensor] | None = None
        self._dtypes: dict[str, torch.dtype] = {}

    def move_towards(self, update: Tensors, weight: float) -> None:
        """Moves the mean towards an equally shaped update by its share of all so far, in (0, 1]."""
        if self._mean is None:
            self._dtypes = {name: tensor.dtype for name, tensor in update.items()}
            # A copy, since the mean changes in place and a client's update must not.
            self._mean = {
                name: tensor.to(self._wide(tensor), copy=True) for name, tensor in update.items()
            }
        elif shapes(self._mean) != shapes(update):
            raise FedsimError(
                "aggregate: the clients' updates differ in names or shapes of their tensors; all "
                "clients must train the same model"
            )
        else:
            for name, tensor in update.items():
                self._mean[name].lerp_(tensor.to(self._mean[name].dtype), weight)

    def read(self, times: int = 1) -> dict[str, Tensor]:
        """Returns `times` the mean, in the types of the first update; empty before that."""
        found: dict[str, Tensor] = {}
        for name, mean in (self._mean or {}).items():
            kept = self._dtypes[name]
            floating = kept.is_floating_point
            # A sum in half precision would overflow at 65,504, and round by more than a client may
            # move it.
            wide = torch.promote_types(kept, torch.float32) if floating and times > 1 else kept
            found[name] = (mean * times if floating else (mean * times).round()).to(wide)
        return found

    def _wide(self, tensor: Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return torch.float64
        return torch.promote_types(tensor.dtype, self._least)
