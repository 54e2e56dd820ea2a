"""A device that is not the processor, on a machine that has no other.

Tensors there are wrappers of ones in CPU memory, and torch is told that they lie elsewhere: an
operation on some of there and some of here fails as on a GPU. Only that is shown: kernels are the
processor's, and so are generators.
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
_COPIES = {"_to_copy", "copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations whose indices may lie here where what they are of lies there."""
_JOINING = {"stack", "cat"}
"""Operations for which a number here is one tensor more, and no number."""


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
    here = [each for each in tensors if not isinstance(each, _There)]
    if there and here and name not in _COPIES and _collide(name, args, here):
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


def _collide(name: str, args: Any, here: list[Tensor]) -> bool:
    """Whether an operation on some of there and some of `here` fails: numbers may be read."""
    first = args[0] if args else None
    if isinstance(first, Tensor) and not isinstance(first, _There):
        written = name.endswith("_") or name in _INDEXING
        return written or bool(first.ndim) or any(each.ndim for each in here)
    if name in _INDEXING:
        values = [each for each in args[2:3] if isinstance(each, Tensor)]
        return any(each.ndim and not isinstance(each, _There) for each in values)
    return name in _JOINING or any(each.ndim for each in here)


def _here(value: Any) -> Any:
    return value.here if isinstance(value, _There) else value
