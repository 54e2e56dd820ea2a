"""This process's memory: kept between iterations, and its peak."""

from __future__ import annotations

import ctypes
import resource
from functools import cache

import torch

# From glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 2**25
"""What glibc accepts on 64-bit machines."""


@cache
def keep_freed() -> bool:
    """Let the allocator keep what tensors free, for the next of them; whether it could be told to.

    By default glibc returns freed megabytes to the system at once, and every iteration of an attack
    pays for fresh pages of the same tensors: a fifth of its time on ConvNet. The peak stays, but
    the process holds it until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(kept and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))


def peak(device: torch.device) -> int:
    """Most bytes in use so far: of the accelerator's memory, or of the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
