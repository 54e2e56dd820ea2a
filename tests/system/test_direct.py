"""What is written past the page cache is what was given, on file systems that refuse it, too."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path

import pytest

from fedsim.system import direct

SIZES = [0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 * (1 << 20) + 5]


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)  # noqa: S311 - no secret


def written(path: Path, pieces: list[bytes]) -> bytes:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        direct.write(handle, pieces)
    finally:
        os.close(handle)
    return path.read_bytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_it_reads_as_it_was_written(size: int, cut: int, tmp_path: Path) -> None:
    content = noise(size, size)
    pieces = [content[place : place + size // cut + 1] for place in range(0, size, size // cut + 1)]
    assert written(tmp_path / "file", pieces) == content


def test_a_refusal_in_the_middle_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write is cut short, and those behind it are refused as long as they are direct."""
    content, real, calls = noise(0, (1 << 20) + 9), os.write, list[int]()

    def write(handle: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(handle, data[:4096])
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)
    assert written(tmp_path / "file", [content]) == content
    assert calls[0] == 1 << 20 and calls[1] == (1 << 20) - 4096


def test_a_system_without_it_writes_as_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "fcntl", None)
    content = noise(1, 5 << 20)
    assert written(tmp_path / "file", [content]) == content
