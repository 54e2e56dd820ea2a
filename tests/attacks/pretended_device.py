"""A device that is not the processor, on a machine that has no other.

Tensors there are wrappers of ones in CPU memory, and torch is told that they lie elsewhere: an
operation on some of there and some of here fails as it does on a GPU. Only that is shown: kernels
are the processor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import adam, optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "lazy"
"""A type of device that torch names and that needs no driver; autograd serves it like the CPU."""
_COPIES = {"_to_copy", "copy_", "index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations between devices: copies, and indices, which may lie here."""


class _There(Tensor):
    """A tensor on the pretended device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> _There:
        made: _There = Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(DEVICE, 0),
        )
        made.here = here
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(function, args, kwargs or {})


class _Devices(TorchDispatchMode):
    """Makes tensors there where they are asked for."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(function, args, kwargs or {})


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, tensors may be moved to `DEVICE` and back."""
    fused = [*_foreach_utils._get_fused_kernels_supported_devices(), DEVICE]
    for module in (_foreach_utils, adam, optimizer):
        name = "_get_fused_kernels_supported_devices"
        monkeypatch.setattr(module, name, lambda: fused, raising=False)
    tensor = torch.tensor

    # Both read values on the processor, past any mode.
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        found = tensor(*args, **kwargs)
        return found if device is None else found.to(device)

    def like(self: Tensor, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return tensor(data, dtype=dtype or self.dtype).to(device or self.device)

    monkeypatch.setattr(torch, "tensor", made)
    monkeypatch.setattr(Tensor, "new_tensor", like)
    with _Devices():
        yield


def here_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """What computes in CPU memory alone, without the pretence: some of torch does not bear it."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return plain


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    there = [each for each in tensors if isinstance(each, _There)]
    name = function.overloadpacket.__name__
    here = [each for each in tensors if not isinstance(each, _There) and each.ndim]
    if there and here and name not in _COPIES:
        raise RuntimeError(f"Expected all tensors to be on the same device: {function}")
    if (device := kwargs.get("device")) is not None:
        result_there = torch.device(device).type == DEVICE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    else:
        result_there = isinstance(args[0], _There) if name == "copy_" else bool(there)
    args, kwargs = tree_map(_here, (args, kwargs))
    found = function(*args, **kwargs)
    if not result_there:
        return found
    known = {id(each.here): each for each in there}
    return tree_map(lambda t: known.get(id(t), _There(t)) if isinstance(t, Tensor) else t, found)


def _here(value: Any) -> Any:
    return value.here if isinstance(value, _There) else value
