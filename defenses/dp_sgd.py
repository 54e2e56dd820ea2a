"""DP-SGD of Abadi et al. 2016: per-example clipping, then noise on every local step."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, vmap

from fedsim.defense import (
    GradientFn,
    Guarantee,
    LossFn,
    Mechanism,
    TrainingDefense,
    add_gaussian,
)
from fedsim.types import FedsimError, LocalTraining, Tensors

_CHUNK_BYTES = 1 << 28
_CHUNK_EXAMPLES = 256


@final
class DPSGD(TrainingDefense):
    """Clips each example's gradient to `norm`, takes the mean, adds N(0, (z norm / B)^2).

    z is `noise_multiplier` and B the batch size. An example whose gradient is not finite counts as
    zero. It replaces the gradient of training defenses before it. One example is hidden, against
    any other in its place; how often it is released follows from the local training. Local steps on
    the `same` batch are accounted without amplification by sampling.

    Examples must not see each other: batch norm in train mode is refused.
    """

    paper: ClassVar[str] = (
        "Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1"
    )

    norm: Annotated[float, Field(ge=1e-12, le=1e12)]
    """Bound C on an example's gradient, all tensors together."""
    noise_multiplier: Annotated[float, Field(ge=0, le=1e12)]
    """z: standard deviation of the noise on the sum of clipped gradients, over C."""

    def training(self, declared: LocalTraining) -> LocalTraining:
        """The training as it is."""
        return declared

    def gradient(self, loss: LossFn, gradient: GradientFn) -> GradientFn:
        """The noisy mean of clipped gradients of the examples' own losses.

        Raises:
            FedsimError: (when called) the loss cannot be taken one example at a time.
        """

        def direction(
            parameters: Tensors, images: Tensor, labels: Tensor, rng: torch.Generator
        ) -> Tensors:
            fixed = {name: value.detach() for name, value in parameters.items()}
            mean = self._clipped_mean(loss, fixed, images, labels)
            return add_gaussian(mean, self.noise_multiplier * self.norm / len(images), rng)

        return direction

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """A Gaussian mechanism per local step, whatever else the step does with its gradient."""
        if self.noise_multiplier == 0:
            return Guarantee(reason="dp_sgd adds no noise: its noise_multiplier is 0")
        steps = 1 if training.algorithm == "fedsgd" else training.steps
        return Guarantee(
            mechanism=Mechanism(
                noise_multiplier=self.noise_multiplier,
                unit="example",
                relation="replace_one",
                releases=steps,
                sampled=steps == 1 or training.batches == "different",
            )
        )

    def _clipped_mean(
        self, loss: LossFn, parameters: Tensors, images: Tensor, labels: Tensor
    ) -> Tensors:
        total = {name: torch.zeros_like(value) for name, value in parameters.items()}
        size = _chunk_size(parameters)
        for x, y in zip(torch.split(images, size), torch.split(labels, size), strict=True):
            for name, part in self._clipped_sum(_per_example(loss, parameters, x, y)).items():
                total[name] += part
        return {name: value / len(images) for name, value in total.items()}

    def _clipped_sum(self, grads: dict[str, Tensor]) -> Tensors:
        norms = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(_rows(g), dim=1) for g in grads.values()]), dim=0
        ).double()
        finite = norms.isfinite()
        # rounding must not lift a clipped gradient above the bound
        slack = 1 - 8 * max(torch.finfo(g.dtype).eps for g in grads.values())
        scale = torch.where(norms > self.norm, self.norm / norms * slack, 1.0) * finite
        if not finite.all():
            grads = {
                name: g.masked_fill(~finite.view(-1, *[1] * (g.dim() - 1)), 0)
                for name, g in grads.items()
            }
        return {name: torch.tensordot(scale.to(g.dtype), g, dims=1) for name, g in grads.items()}


def _per_example(
    loss: LossFn, parameters: Tensors, images: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Name -> (B, *shape): the gradient of each example's own loss."""

    def own_loss(at: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return loss(at, image[None], label[None])

    each = vmap(grad(own_loss), in_dims=(None, 0, 0), randomness="different")
    try:
        grads: dict[str, Tensor] = each(dict(parameters), images, labels)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("vmap", "transform")):  # torch.func's own words
            raise
        raise FedsimError(
            "dp_sgd: this model's loss cannot be taken one example at a time, as with batch norm "
            "in train mode, whose statistics mix the examples; choose the model's norm: group "
            f"(or training.local.mode: eval). Cause: {str(error).splitlines()[0]}"
        ) from error
    return grads


def _rows(grads: Tensor) -> Tensor:
    return grads.flatten(1) if grads.dim() > 1 else grads[:, None]


def _chunk_size(parameters: Tensors) -> int:
    """Examples whose gradients are held at once."""
    per_example = sum(value.numel() * value.element_size() for value in parameters.values())
    return min(_CHUNK_EXAMPLES, max(1, _CHUNK_BYTES // max(1, per_example)))
