"""Flower collects garbage while it aggregates; what was imported before is not worth looking at."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest
from sklearn import datasets


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _digits_are_read_once() -> Iterator[None]:
    """Every node and every server of a test reads them, which takes longer than its training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_digits", functools.cache(datasets.load_digits))
        yield
