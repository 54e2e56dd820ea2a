"""Reads weights to start from: a trained model's, from a safetensors file."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from fedsim.recording.files import read_tensors
from fedsim.types import FedsimError


def read_weights(path: Path, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reads (parameters, buffers) of `model` from the file at `path`, by the model's names.

    `path` is a checkpoint of fedsim (OUT/checkpoints/STACK.safetensors), or a state dict. Integer
    tensors that the file lacks, such as batch norm's counter, are those of `model`.

    Raises:
        FedsimError: the file is no safetensors file, or does not fit the model: a tensor is
            missing, has another shape or type, or is not finite.
    """
    tensors = read_tensors(path)
    of_checkpoint = any(name.startswith("parameter.") for name in tensors)
    prefixes = ("parameter.", "buffer.") if of_checkpoint else ("", "")
    return (
        _select(path, tensors, prefixes[0], dict(model.named_parameters())),
        _select(path, tensors, prefixes[1], dict(model.named_buffers())),
    )


def _select(
    path: Path, tensors: dict[str, Tensor], prefix: str, expected: dict[str, Tensor]
) -> dict[str, Tensor]:
    chosen = {}
    for name, tensor in expected.items():
        value = tensors.get(prefix + name)
        if value is None and not tensor.is_floating_point():
            value = tensor.clone()  # a counter of batch norm, which no client releases
        if value is None:
            raise FedsimError(
                f"{path}: no tensor {prefix + name!r}; the weights have to be of the model that "
                "the scenario describes"
            )
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise FedsimError(
                f"{path}: {prefix + name} is {value.dtype} {list(value.shape)}, the scenario's "
                f"model has {tensor.dtype} {list(tensor.shape)}; describe the model of "
                "these weights"
            )
        if not value.isfinite().all():
            raise FedsimError(f"{path}: {prefix + name} has entries that are not finite")
        chosen[name] = value
    return chosen
