"""Counts the memory that a model takes, before it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedsim.system import memory
from fedsim.types import FedsimError
from fedsim.words import number_of

_COPIES = 4
"""At least so many copies of the parameters exist: the server's, the client's, a gradient and an
update."""


@dataclass(frozen=True)
class Size:
    """States the bytes of a model, counted without storage."""

    state: int
    """Bytes of parameters and buffers."""
    image: int
    """Bytes that the layers compute of one image, which its gradient needs."""


_SHAPED_AS_THEIR_INPUT = {
    *(F.batch_norm, F.group_norm, F.dropout),
    *(F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.softplus, torch.sigmoid, torch.tanh),
}


class _ShapesAlone(TorchFunctionMode):
    """Answers for layers whose outputs' shapes follow from their inputs.

    On the meta device, torch computes these by rules that import its compiler, which takes a
    process longer than all else that it counts.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in _SHAPED_AS_THEIR_INPUT:
            return torch.empty_like(args[0])
        if function is F.linear and args[0].shape[-1] == args[1].shape[1]:
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[0])
        return function(*args, **(kwargs or {}))


def counted(build: Callable[[], nn.Module], input_shape: tuple[int, int, int]) -> Size | None:
    """Counts the size of what `build` makes; returns None if torch's meta device cannot make it.

    Raises:
        FedsimError: as `build`.
    """
    try:
        with torch.device("meta"), torch.no_grad(), _ShapesAlone():
            model = build()
            state = sum(_bytes(t) for t in (*model.parameters(), *model.buffers()))
            return Size(state=state, image=_activation_bytes(model, input_shape))
    except FedsimError:
        raise
    except Exception:  # a third party's model may need real numbers: then it is built uncounted
        return None


def check(size: Size | None, content: str = "the model's weights") -> None:
    """Refuses a model that does not fit the memory.

    Raises:
        FedsimError: it does not fit.
    """
    if size is not None:
        memory.check(_COPIES * size.state, content, "use a smaller model")


def check_batch(size: Size | None, key: str, images: int, device: torch.device) -> None:
    """Refuses a batch of `images` whose gradient does not fit beside the model.

    Args:
        size: of the model; None if it cannot be counted.
        key: of the scenario, which sets the batch.
        images: in the batch.
        device: where it is computed.

    Raises:
        FedsimError: it does not fit.
    """
    if size is not None:
        memory.check(
            _COPIES * size.state + 2 * images * size.image,
            f"{key}: the model's weights and a gradient of {number_of(images, 'image')}",
            "use fewer images at a time, or a smaller model",
            device,
        )


def _activation_bytes(model: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Returns the bytes of all layers' outputs for one image."""
    total = 0

    def count(_: nn.Module, __: object, output: object) -> None:
        nonlocal total
        total += _bytes(output) if isinstance(output, Tensor) else 0

    for part in model.modules():
        if not any(part.children()):
            part.register_forward_hook(count)
    model.eval()(torch.empty(1, *input_shape))
    return total


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
