"""Chooses the device that computes."""

from __future__ import annotations

import re

import torch

from fedsim.types import DEVICE_PATTERN, FedsimError


def resolve_device(device: str) -> str:
    """Returns `device`; `auto` becomes `cuda` where torch has it, else `cpu`.

    Raises:
        FedsimError: it is no name of a device, or a CUDA device is asked for and there is none.
    """
    if not re.fullmatch(DEVICE_PATTERN, device):
        raise FedsimError(f"device: {device!r} is none; use cpu, cuda, cuda:N or auto")
    available = torch.cuda.is_available()
    if device.startswith("cuda") and not available:
        raise FedsimError(f"device: {device} is not available here; use cpu or auto")
    return ("cuda" if available else "cpu") if device == "auto" else device
