"""Chooses the device that computes, and moves what it computes with."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.types import DEVICE_PATTERN, FedsimError

T = TypeVar("T")


def resolve_device(device: str) -> str:
    """Returns `device`, and for `auto` the text `cuda` where PyTorch finds CUDA, else `cpu`.

    A FedsimError refuses all but `cpu`, `cuda`, `cuda:N` (N unchecked) and `auto`, or missing CUDA.
    """
    if not re.fullmatch(DEVICE_PATTERN, device):
        raise FedsimError(f"device: {device!r} is none; use cpu, cuda, cuda:N or auto")
    available = torch.cuda.is_available()
    if device.startswith("cuda") and not available:
        raise FedsimError(f"device: {device} is not available here; use cpu or auto")
    return ("cuda" if available else "cpu") if device == "auto" else device


def compute_exactly(device: str | torch.device) -> None:
    """Turns TF32 off and makes cuDNN repeatable in this process, unless `device` is a CPU."""
    if torch.device(device).type == "cpu":
        return
    # TF32 rounds inputs of convolutions to ten bits: an attack that explains an update up to
    # rounding would meet a thousand times the error.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def move_tensors(value: T, device: str | torch.device, but: Collection[str] = ()) -> T:
    """Returns a copy of the dataclass instance `value` with its tensors on `device`.

    Mappings of tensors alone, nested dataclasses and tuples of dataclasses move, too. Fields of
    `value` itself that `but` names stay as they are.
    """
    assert is_dataclass(value) and not isinstance(value, type)
    found: dict[str, Any] = {}
    for field in fields(value):
        own = getattr(value, field.name)
        if field.name in but:
            continue
        if isinstance(own, Tensor):
            found[field.name] = own.to(device)
        elif isinstance(own, Mapping) and own and all(map(torch.is_tensor, own.values())):
            found[field.name] = {key: tensor.to(device) for key, tensor in own.items()}
        elif is_dataclass(own) and not isinstance(own, type):
            found[field.name] = move_tensors(own, device)
        elif isinstance(own, tuple) and own and all(map(is_dataclass, own)):
            found[field.name] = tuple(move_tensors(each, device) for each in own)
    return replace(value, **found)
