"""What a model takes of memory, counted before it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.system import memory
from fedsim.types import FedsimError
from fedsim.words import number_of

_COPIES = 4
"""Of the parameters, at the least: the server's, the client's, a gradient and an update."""


@dataclass(frozen=True)
class Size:
    """Bytes, as counted on a model without storage."""

    state: int
    """Of parameters and buffers."""
    image: int
    """Of what the layers compute of one image, which its gradient needs."""


def counted(build: Callable[[], nn.Module], input_shape: tuple[int, int, int]) -> Size | None:
    """The size of what `build` makes; None if it makes nothing on torch's meta device.

    Raises:
        FedsimError: as `build`.
    """
    try:
        with torch.device("meta"), torch.no_grad():
            model = build()
            state = sum(_bytes(t) for t in (*model.parameters(), *model.buffers()))
            return Size(state=state, image=_computed(model, input_shape))
    except FedsimError:
        raise
    except Exception:  # a third party's model may need real numbers: then it is built uncounted
        return None


def check(size: Size | None, of: str = "the model's weights") -> None:
    """Refuse a model that does not fit the memory.

    Raises:
        FedsimError: it does not fit.
    """
    if size is not None:
        memory.check(_COPIES * size.state, of, "use a smaller model")


def check_batch(size: Size | None, key: str, images: int, device: torch.device) -> None:
    """Refuse a batch of so many `images` that its gradient does not fit beside the model.

    `key` is the scenario's that says so.

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


def _computed(model: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Bytes of all layers' outputs for one image."""
    found = 0

    def count(_: nn.Module, __: object, output: object) -> None:
        nonlocal found
        found += _bytes(output) if isinstance(output, Tensor) else 0

    for part in model.modules():
        if not any(part.children()):
            part.register_forward_hook(count)
    model.eval()(torch.empty(1, *input_shape))
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
