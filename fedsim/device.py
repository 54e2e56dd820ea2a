"""Which device computes."""

from __future__ import annotations

import torch

from fedsim.types import FedsimError


def resolve_device(device: str) -> str:
    """`auto` -> `cuda` where torch has it, else `cpu`.

    Raises:
        FedsimError: a CUDA device is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if device.startswith("cuda") and not available:
        raise FedsimError(f"device: {device} is not available here; use cpu or auto")
    return ("cuda" if available else "cpu") if device == "auto" else device
