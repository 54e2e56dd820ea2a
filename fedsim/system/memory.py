"""Manages this process's memory: what it keeps between iterations, its limit and its peak."""

from __future__ import annotations

import ctypes
import os
import resource
from functools import cache
from pathlib import Path

import torch

from fedsim.types import FedsimError

# From glibc's <malloc.h>, and the largest threshold that it accepts on 64-bit machines.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 2**25


@cache
def keep_freed() -> bool:
    """Makes glibc keep freed memory for this process's next tensors; False where it cannot."""
    # glibc returns freed megabytes at once, and every iteration of an attack pays for fresh pages:
    # a fifth of its time on ConvNet.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(kept and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))


@cache
def limit() -> int:
    """Returns how many bytes this process may use, without swap, as at the first call.

    These are at most 64 GiB where the system does not tell its memory.
    """
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (OSError, ValueError):
        limits = [_DEFAULT_LIMIT]
    limits += _control_group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    limits += [
        soft
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
        if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return min(limits)


def check(needed: float, content: str, remedy: str, device: torch.device | None = None) -> None:
    """Refuses, by a FedsimError, what needs more than the whole memory, however much is in use.

    Args:
        needed: Estimated number of bytes.
        content: Plural words for what takes them, as `training.local.steps: 9 batches of 64
            images`.
        remedy: Words for what the user is to change.
        device: CUDA device whose memory counts; None or a CPU means this process's (`limit`).
    """
    available = limit()
    if device is not None and device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    if needed > available:
        raise FedsimError(
            f"{content} take about {needed / _GIB:.1f} GiB, and there are {available / _GIB:.1f} "
            f"GiB; {remedy}"
        )


def _control_group_limits(listed: Path, root: Path) -> list[int]:
    """Returns the limits of the process's control groups and their parents, versions 1 and 2."""
    try:
        lines = listed.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        # Version 1 has a line for each hierarchy with its controllers; version 2 one line without.
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        home, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
        group = Path(path)
        # The limit of any parent holds as well.
        for part in (group, *group.parents):
            try:
                value = home.joinpath(*part.parts[1:], name).read_text().strip()
            except OSError:
                continue
            # No limit reads `max`.
            if value.isdecimal():
                limits.append(int(value))
    return limits


_GIB = 1 << 30
_DEFAULT_LIMIT = 64 * _GIB


def peak(device: torch.device) -> int:
    """Returns the most bytes in use so far: PyTorch's on a CUDA `device`, else this process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts the peak in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
