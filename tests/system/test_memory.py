"""The process's memory."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest
import torch

from fedsim.system import memory

FAULTS = """
import resource, numpy
from fedsim.system import memory
{call}
def round():
    kept = [numpy.ones(100_000 * n) for n in range(1, 20)]  # from the allocator that torch uses
for _ in range(3):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc: others have no mallopt")
def test_freed_memory_is_kept_for_the_next_tensors() -> None:
    def faults(call: str) -> int:
        command = [sys.executable, "-c", FAULTS.format(call=call)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("memory.keep_freed()") < 100 < 1000 < faults("")


def test_the_peak_is_the_processs() -> None:
    before = memory.peak(torch.device("cpu"))
    kept = torch.ones(2**20 + before // 4)
    assert memory.peak(torch.device("cpu")) >= before + kept.nbytes // 4
    assert memory.peak(torch.device("cpu")) <= 1024 * (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
