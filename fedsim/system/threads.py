"""Fixes how many threads compute: a sum that is split over threads is rounded by their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import scipy.linalg  # noqa: F401 - a library that is loaded later would not be limited
import torch
from threadpoolctl import threadpool_limits


def fix(threads: int) -> None:
    """Makes this process compute on `threads` threads from now on, in PyTorch and BLAS."""
    threadpool_limits(threads)
    torch.set_num_threads(threads)


@contextmanager
def fix_within(threads: int) -> Iterator[None]:
    """Computes on `threads` threads in a `with` block, and afterwards on as many as before."""
    before = torch.get_num_threads()
    with threadpool_limits(threads):
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
