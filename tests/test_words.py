"""A noun follows its number."""

from __future__ import annotations

import pytest

from fedsim.words import number_of


@pytest.mark.parametrize(
    ("count", "words", "told"),
    [
        (0, ("image",), "0 images"),
        (1, ("image",), "1 image"),
        (2, ("image",), "2 images"),
        (1, ("batch", "batches"), "1 batch"),
        (12345, ("batch", "batches"), "12,345 batches"),
    ],
)
def test_a_noun_follows_its_number(count: int, words: tuple[str, ...], told: str) -> None:
    assert number_of(count, *words) == told
