"""Soteria, which prunes the representation that a classifier's gradient gives away."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor
from torch.func import jvp

from fedsim.contracts.defense import GradientFn, LocalStep, TrainingDefense, standard_normal
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, FedsimError, LocalTraining, Tensors

_LEAST_FEATURE = 0.1  # number that the authors' code adds to features, so that none divides by 0


@final
class Soteria(TrainingDefense):
    """Prunes features: their columns in the gradient of the head's first layer become zero.

    Those are the features r with the least |∂r/∂x| / (|r| + 0.1), summed over the batch, where x is
    the image. The authors differentiate each feature; here all derivatives' norms are estimated at
    once, from the change of the features along random directions.
    """

    paper: ClassVar[str] = (
        "Sun, Li, Wang, Yang, Li and Chen, Soteria: Provable Defense against Privacy Leakage in "
        "Federated Learning from Representation Perspective, CVPR 2021, section 5, p = 0"
    )

    ratio: Annotated[float, Field(ge=0, lt=1)]
    """Share of the features that are pruned."""
    directions: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Number of random directions; the norms' relative error is about 1 over the root of twice
    that."""

    def gradient(self, step: LocalStep) -> GradientFn:
        """Returns the function of the pruned direction. See `TrainingDefense.gradient`.

        It raises a FedsimError if no weights of the head take the features.
        """

        def direction(
            parameters: Tensors, images: Tensor, labels: Tensor, rng: torch.Generator
        ) -> Tensors:
            found = dict(step.gradient(parameters, images, labels, rng))
            pruned = self._find_pruned(step, parameters, images, rng)
            name = _first_layer_of_head(found, len(pruned))
            found[name] = found[name].masked_fill(pruned, 0)
            return found

        return direction

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """Returns `before`, or no proof if it has a mechanism: images choose the columns."""
        if before.mechanism:
            # Zeros that images choose are no post-processing: behind noise they show the choice.
            return Guarantee(reason="soteria prunes by the images, behind the noise: use one alone")
        return before

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an Effect with `removed` `others`, and `mixed` after several steps."""
        # Over several steps other columns are pruned in each, so that what is left is no gradient.
        return Effect(removed="others", mixed=training.steps > 1)

    def _find_pruned(
        self, step: LocalStep, parameters: Tensors, images: Tensor, rng: torch.Generator
    ) -> Tensor:
        fixed = {name: value.detach() for name, value in parameters.items()}
        features = step.features(fixed, images)
        squares = torch.zeros_like(features)
        for _ in range(self.directions):
            along = standard_normal({"images": images}, rng)["images"].to(images.dtype)
            # For a standard normal v, (∂r/∂x v)² is |∂r/∂x|² on average.
            change: Tensor = jvp(lambda x: step.features(fixed, x), (images.detach(),), (along,))[1]
            squares += change.detach().square()
        told = (squares / self.directions).sqrt() / (features.detach().abs() + _LEAST_FEATURE)
        order = told.sum(0).argsort(stable=True)
        pruned = torch.zeros(len(order), dtype=torch.bool, device=images.device)
        pruned[order[: math.floor(self.ratio * len(order))]] = True
        return pruned


def _first_layer_of_head(gradient: Tensors, features: int) -> str:
    """Returns the name of the weights that the features enter."""
    for name, tensor in gradient.items():
        if name.startswith("head.") and tensor.ndim == 2 and tensor.shape[1] == features:
            return name
    raise FedsimError(
        f"soteria: no layer of the model's head takes its {features} features; drop soteria, or "
        "choose a model whose head begins with a linear layer"
    )
