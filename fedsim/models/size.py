"""Counts the memory that a model takes, before it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


def counted(build: Callable[[], nn.Module], input_shape: tuple[int, int, int]) -> Size | None:
    """Counts the size of what `build` makes; returns None if torch's meta device cannot make it.

    Raises:
        FedsimError: as `build`.
    """
    try:
        with torch.device("meta"), torch.no_grad():
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
