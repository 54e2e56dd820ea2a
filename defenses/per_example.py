"""Clipping of each example's own gradient, and what noise on the sum proves of one example."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedsim.contracts.defense import LossFn
from fedsim.contracts.guarantee import Guarantee, of_steps
from fedsim.types import Effect, FedsimError, LocalTraining, Noise, Tensors

_CHUNK_BYTES = 1 << 28
"""Bytes of the examples' gradients that are held at once, unless a single one has more."""
_CHUNK_EXAMPLES = 256  # most examples whose gradients are held at once
_BLOCK = 256  # entries whose squares are summed in the gradients' own precision


def clipped_mean(
    loss: LossFn, parameters: Tensors, images: Tensor, labels: Tensor, norm: float, batch_size: int
) -> dict[str, Tensor]:
    """Computes the sum of the examples' clipped gradients, divided by `batch_size`.

    A gradient that is not finite counts as zero. The result is in float64, as float32 would round
    it by more than one example may move it. Rounding is safe after noise has been added.

    Args:
        loss: mean loss of a batch, in the parameters.
        parameters: weights by name, at which gradients are computed.
        images: (N, ...) inputs; N may be 0, and need not be `batch_size`.
        labels: (N, ...) their labels.
        norm: bound on an example's gradient, the L2 norm over all tensors together.
        batch_size: divisor of the sum.

    Raises:
        FedsimError: the loss cannot be taken one example at a time.
    """
    fixed = {name: value.detach() for name, value in parameters.items()}
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in fixed.items()}
    # Every example has a gradient as large as the model: only so many are held at once.
    each = sum(value.numel() * value.element_size() for value in fixed.values())
    size = min(_CHUNK_EXAMPLES, max(1, _CHUNK_BYTES // max(1, each)))
    for start in range(0, len(images), size):
        x, y = (part[start : start + size] for part in (images, labels))
        for name, part in _clipped_sum(_per_example(loss, fixed, x, y), norm).items():
            total[name] += part
    return {name: value / batch_size for name, value in total.items()}


def in_types_of(parameters: Tensors, noisy: Tensors) -> dict[str, Tensor]:
    """Returns the tensors of `noisy`, each in the type of the parameter of the same name."""
    return {name: value.to(parameters[name].dtype) for name, value in noisy.items()}


def noisy_steps(
    defense: str, noise_multiplier: float, training: LocalTraining, correlation: float = 0.0
) -> Guarantee:
    """Returns what Gaussian noise on every step's sum of clipped gradients proves.

    Args:
        defense: name, for the reason where there is no noise, and so no mechanism.
        noise_multiplier: standard deviation of the noise over the clipping norm.
        training: local training after the stack's training defenses.
        correlation: λ, the share in [0, 1) of the last step's noise that is subtracted.
    """
    if noise_multiplier == 0:
        return Guarantee(reason=f"{defense} adds no noise: its noise_multiplier is 0")
    return Guarantee(mechanism=of_steps(noise_multiplier, training, correlation))


def noise_on_steps(std: float, correlation: float = 0.0) -> Effect:
    """Returns the Effect of clipped examples, and of noise on each step unless `std` is 0.

    `std` is its standard deviation on the mean gradient, `correlation` the λ of `noisy_steps`.
    """
    noise = Noise(variance=std**2, on="step", correlation=correlation)
    return Effect(scaled_examples=True, noise=(noise,) if noise.variance else ())


def _clipped_sum(grads: dict[str, Tensor], norm: float) -> Tensors:
    norms = torch.linalg.vector_norm(torch.stack([_lengths(g) for g in grads.values()]), dim=0)
    finite = norms.isfinite()
    # rounding must not lift a clipped gradient above the bound: that of a block's norm, in whatever
    # order it is summed, and that of the products below
    slack = 1 - _BLOCK / 4 * max(torch.finfo(_wide(g)).eps for g in grads.values())
    slack -= 8 * max(torch.finfo(g.dtype).eps for g in grads.values())
    scale = torch.where(norms > norm * slack, norm / norms * slack, 1.0) * finite
    if not finite.all():
        grads = {
            name: g.masked_fill(~finite.view(-1, *[1] * (g.dim() - 1)), 0)
            for name, g in grads.items()
        }
    # a sum in half precision ends at 65,504, and is rounded by more than an example may move it
    return {
        name: torch.tensordot(scale.to(_wide(g)), g.to(_wide(g)), dims=1)
        for name, g in grads.items()
    }


def _lengths(grads: Tensor) -> Tensor:
    """Computes (B,) float64 L2 norms of (B, ...)."""
    # By blocks: the rounding of a float32 sum over millions of entries exceeds any slack, and
    # float64 throughout takes ten times as long.
    rows = grads.flatten(1) if grads.dim() > 1 else grads[:, None]
    count = rows.shape[1] // _BLOCK
    blocks = torch.unflatten(rows[:, : count * _BLOCK], 1, (count, _BLOCK))
    parts = [
        torch.linalg.vector_norm(blocks, dim=2, dtype=_wide(grads)),
        torch.linalg.vector_norm(
            rows[:, count * _BLOCK :], dim=1, keepdim=True, dtype=_wide(grads)
        ),
    ]
    lengths: Tensor = torch.linalg.vector_norm(torch.cat(parts, dim=1).double(), dim=1)
    return lengths


def _wide(grads: Tensor) -> torch.dtype:
    return torch.promote_types(grads.dtype, torch.float32)


def _per_example(
    loss: LossFn, parameters: Tensors, images: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Computes the gradient of each example's own loss: name -> (B, *shape)."""

    def own_loss(at: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return loss(at, image[None], label[None])

    # Each example draws a dropout mask of its own, as it would in a batch.
    each = vmap(grad(own_loss), in_dims=(None, 0, 0), randomness="different")
    try:
        grads: dict[str, Tensor] = each(dict(parameters), images, labels)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("vmap", "transform")):  # torch.func's own words
            raise
        raise FedsimError(
            "per-example clipping: this model's loss cannot be taken one example at a time, as "
            "with batch norm in train mode, whose statistics mix the examples; choose the model's "
            f"norm: group (or training.local.mode: eval). Cause: {str(error).splitlines()[0]}"
        ) from error
    return grads
