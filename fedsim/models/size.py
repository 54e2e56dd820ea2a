"""Counts the memory that a model takes, before it is built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedsim.system import memory
from fedsim.types import FedsimError
from fedsim.words import number_of

_COPIES = 4
"""Least number of copies of the parameters: the server's, the client's, a gradient, an update."""


@dataclass(frozen=True)
class Size:
    """States how many bytes a model needs, as counted without building it in memory."""

    state: int
    """Bytes of parameters and buffers."""
    image: int
    """Bytes of all layers' outputs for one image, which a gradient has to keep."""


_LAYERS = {
    *(F.conv2d, F.linear, F.max_pool2d, torch.max_pool2d, F.batch_norm, F.group_norm),
    *(F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.softplus, torch.sigmoid, torch.tanh),
    F.dropout,
}


class _ShapesAlone(TorchFunctionMode):
    """Answers for `_LAYERS` by what they make of no image at all, which takes no memory.

    On the meta device, torch computes these by rules that import its compiler, which takes long.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if function in _LAYERS and _is_counted(first) and "out" not in kwargs:
            none = torch.empty(0, *first.shape[1:], dtype=first.dtype, device="cpu")
            # What does not fit, or has too many weights even for addresses, is torch's to answer.
            with suppress(RuntimeError, ValueError):
                others = {name: _stand_in(value) for name, value in kwargs.items()}
                answer = function(none, *map(_stand_in, args[1:]), **others)
                if isinstance(answer, Tensor):
                    return first.new_empty(len(first), *answer.shape[1:])
        return function(*args, **kwargs)


def _is_counted(layer_input: object) -> TypeGuard[Tensor]:
    """Whether it is a batch on the meta device, which has a shape, but no numbers."""
    return (
        isinstance(layer_input, Tensor)
        and layer_input.is_meta
        and layer_input.is_floating_point()
        and layer_input.dim() > 1
    )


def _stand_in(argument: object) -> object:
    """Returns a weight's shape without numbers, in memory that is never used; all else as it is."""
    if isinstance(argument, Tensor) and argument.is_meta:
        # Contiguous, as a convolution would copy anything else, and so use the memory.
        return torch.empty(argument.shape, dtype=argument.dtype, device="cpu")
    return argument


def count_size(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> Size | None:
    """Counts the size of the model that `build` makes, for inputs (C, H, W) or (D,).

    None says that it cannot be counted: a part of it needs real numbers, or fails. `build` is
    called on torch's meta device; its FedsimError passes through.
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


def check(size: Size | None) -> None:
    """Raises a FedsimError if four copies of a model's state exceed the memory; None passes."""
    if size is not None:
        memory.check(_COPIES * size.state, "the model's weights", "use a smaller model")


def check_batch(size: Size | None, key: str, images: int, device: torch.device) -> None:
    """Raises a FedsimError if a model and a batch's gradient exceed the memory of `device`.

    Args:
        size: Size of the model; None, which is unknown, passes.
        key: Key of the scenario that sets the batch, for the message.
        images: Number of images whose gradient is computed at once.
        device: Device that computes it; a CPU has this process's memory.
    """
    if size is not None:
        memory.check(
            _COPIES * size.state + 2 * images * size.image,
            f"{key}: the model's weights and a gradient of {number_of(images, 'image')}",
            "use fewer images at a time, or a smaller model",
            device,
        )


def _activation_bytes(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    total = 0

    def count(_: nn.Module, __: object, output: object) -> None:
        nonlocal total
        total += _bytes(output) if isinstance(output, Tensor) else 0

    for part in model.modules():
        # Only layers without parts count: what a container returns is the output of one of them.
        if not any(part.children()):
            part.register_forward_hook(count)
    model.eval()(torch.empty(1, *input_shape))
    return total


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
