"""What the tests of several attacks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedsim_attacks import second_order


@pytest.fixture(autouse=True)
def no_remembered_choice() -> Iterator[None]:
    """Tests change what decides between the algorithms of a convolution."""
    second_order._fastest.cache_clear()
    yield
    second_order._fastest.cache_clear()
