"""Leaves out what is slow unless --run-slow asks for it; lets a module attack without workers.

The suite runs in as many processes as there are cores (at most 4), so each computes on one thread;
processes that tests start inherit it, since the number of threads decides the last bits of a sum.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Generator, Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import pytest
import torch

from fedsim.data import bundled

LEFT_OUT = {"slow", "by_hand"}
"""Marks without which the rest takes minutes on two cores; pyproject.toml says what each means."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run slow and by_hand tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: to search it for garbage takes a third of the time of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-slow"):
        left_out = {
            item for item in items if LEFT_OUT & {mark.name for mark in item.iter_markers()}
        }
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power, and waiting for the disk takes a run longer than its training.

    Processes that tests start do wait, and a test that breaks `os.fsync` finds it called.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _sets_are_read_once() -> Iterator[None]:
    """Reading and resizing a bundled set takes a third of a small run.

    What is kept stays as it was read: the split copies what it hands out.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_digits", "_faces", "_photos"):
            patch.setattr(bundled, name, functools.cache(getattr(bundled, name)))
        yield


@pytest.fixture(scope="module")
def attacks_here() -> Iterator[None]:
    """Runs of the module attack and score in this process, and start no workers."""
    import one_process

    with one_process.attacks_here():
        yield
