"""Flower collects garbage while it aggregates; what was imported before is not worth looking at."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
