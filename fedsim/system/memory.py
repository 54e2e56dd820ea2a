"""This process's memory: kept between iterations, and its peak."""

from __future__ import annotations

import ctypes
import os
import resource
from functools import cache
from pathlib import Path

import torch

from fedsim.types import FedsimError

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


@cache
def limit() -> int:
    """Bytes that this process may use: the machine's, or what its control group or ulimit allows.

    Swap does not count. Where nothing is known it is 64 GiB.
    """
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (OSError, ValueError):
        found = [_UNKNOWN]
    found += _of_control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    found += [
        soft
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
        if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return min(found)


def check(needed: float, of: str, remedy: str, device: torch.device | None = None) -> None:
    """Refuse what does not fit the memory of the process, or of the accelerator `device`.

    Args:
        needed: bytes, as estimated.
        of: what takes them, with the key of the scenario in front.
        remedy: what to change.
        device: where it is to lie; by default in the process's memory.

    Raises:
        FedsimError: it does not fit.
    """
    have = limit()
    if device is not None and device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
    if needed > have:
        raise FedsimError(
            f"{of} take about {needed / _GIB:.1f} GiB, and there are {have / _GIB:.1f} GiB; "
            f"{remedy}"
        )


def _of_control_groups(listed: Path, root: Path) -> list[int]:
    """The limits of the process's control groups and of all that they lie in, versions 1 and 2."""
    try:
        lines = listed.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        home, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
        group = Path(path)
        for part in (group, *group.parents):
            try:
                said = home.joinpath(*part.parts[1:], name).read_text().strip()
            except OSError:
                continue
            if said.isdecimal():
                found.append(int(said))
    return found


_GIB = 1 << 30
_UNKNOWN = 64 * _GIB


def peak(device: torch.device) -> int:
    """Most bytes in use so far: of the accelerator's memory, or of the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
