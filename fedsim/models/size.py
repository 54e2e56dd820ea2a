"""Counts the memory that a model takes, before it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
"""Least number of copies of the parameters: the server's, the client's, a gradient, an update."""


@dataclass(frozen=True)
class Size:
    """States the bytes of a model, counted without storage."""

    state: int
    """Bytes of parameters and buffers."""
    image: int
    """Bytes of all layers' outputs for one image, which a gradient has to keep."""


_SHAPED_AS_THEIR_INPUT = {
    *(F.batch_norm, F.group_norm, F.dropout),
    *(F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.softplus, torch.sigmoid, torch.tanh),
}


class _ShapesAlone(TorchFunctionMode):
    """Answers for layers whose outputs' shapes follow from their inputs.

    On the meta device, torch computes these by rules that import its compiler, which takes long.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_counted(args) and not (kwargs and "out" in kwargs):
            first, *others = args
            if function in _SHAPED_AS_THEIR_INPUT and _fits(function, first, others):
                return first.new_empty(first.shape)
            if function is F.linear and _maps(first, others):
                return first.new_empty(*first.shape[:-1], others[0].shape[0])
            if (of := _SHAPE_RULES.get(function)) and (
                shape := of(first, *others, **(kwargs or {}))
            ):
                return first.new_empty(shape)
        return function(*args, **(kwargs or {}))


def _is_counted(args: Sequence[object]) -> bool:
    """Whether a layer's input is on the meta device: it has a shape, but no numbers."""
    first = args[0] if args else None
    return isinstance(first, Tensor) and first.is_meta and first.is_floating_point()


def _fits(function: object, layer_input: Tensor, others: Sequence[object]) -> bool:
    """Whether statistics and weights have the input's channels; if not, torch raises its error."""
    channels = layer_input.shape[1] if layer_input.dim() > 1 else 0
    parts = [other.shape for other in others if isinstance(other, Tensor)]
    if function is F.group_norm:
        groups = others[0] if others else None
        if not isinstance(groups, int) or groups < 1 or channels % groups:
            return False
    if function is F.batch_norm and not channels:
        return False
    return all(shape == (channels,) for shape in parts)


def _maps(layer_input: Tensor, others: Sequence[object]) -> bool:
    """Whether weight (out, in) and bias (out,) of a linear layer fit its input's features."""
    weight, bias = [*others, None, None][:2]
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not layer_input.dim():
        return False
    whole = bias is None or (isinstance(bias, Tensor) and bias.shape == weight.shape[:1])
    return whole and layer_input.shape[-1] == weight.shape[1]


def _convolution_shape(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[int, ...] | None:
    """Returns the shape of a convolution's output; None if torch has to say it, or refuse it."""
    if weight.dim() != 4 or not (bias is None or bias.shape == weight.shape[:1]):
        return None
    outputs, inputs, *kernel = weight.shape
    if images.shape[1:2] != (groups * inputs,) or outputs % groups:
        return None
    return _window_shape(images, outputs, kernel, stride, padding, dilation)


def _pool_shape(
    images: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[int, ...] | None:
    """Returns the shape of a max pool's output; None if torch has to say it, or refuse it."""
    if ceil_mode or return_indices or images.dim() != 4:
        return None
    if max(_pair(padding)) * 2 > min(_pair(kernel_size)):
        return None
    return _window_shape(
        images, images.shape[1], kernel_size, stride or kernel_size, padding, dilation
    )


def _window_shape(
    images: Tensor, channels: int, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[int, ...] | None:
    """Returns the shape (N, C, H', W') of an output for each window of images (N, C, H, W)."""
    if images.dim() != 4 or isinstance(padding, str):
        return None
    sizes = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(
            images.shape[2:], *map(_pair, (kernel, stride, padding, dilation)), strict=True
        )
    ]
    return (len(images), channels, *sizes) if min(sizes) > 0 else None


def _pair(size: Any) -> Sequence[int]:
    """Returns a size for rows and one for columns, of which torch takes one for both."""
    return (size, size) if isinstance(size, int) else size


_SHAPE_RULES: Mapping[Any, Callable[..., tuple[int, ...] | None]] = {
    F.conv2d: _convolution_shape,
    F.max_pool2d: _pool_shape,
    torch.max_pool2d: _pool_shape,
}


def count_size(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> Size | None:
    """Counts the size of the model of `build` for one input; None if the meta device cannot."""
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
    """Refuses, by a FedsimError about `content`, a model whose known `size` exceeds the memory."""
    if size is not None:
        memory.check(_COPIES * size.state, content, "use a smaller model")


def check_batch(size: Size | None, key: str, images: int, device: torch.device) -> None:
    """Refuses, by a FedsimError that names `key`, `images` whose gradient is too large.

    That is if it and the model exceed the memory of `device`; a `size` of None passes.
    """
    if size is not None:
        memory.check(
            _COPIES * size.state + 2 * images * size.image,
            f"{key}: the model's weights and a gradient of {number_of(images, 'image')}",
            "use fewer images at a time, or a smaller model",
            device,
        )


def _activation_bytes(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Returns the bytes of all layers' outputs for one image."""
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
