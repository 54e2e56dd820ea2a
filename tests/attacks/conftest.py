"""What the tests of several attacks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedsim_attacks.fast_autograd import _second_order


@pytest.fixture(autouse=True)
def no_remembered_choice() -> Iterator[None]:
    """Tests change what decides between the algorithms of a convolution."""
    _second_order._fastest.cache_clear()
    yield
    _second_order._fastest.cache_clear()
