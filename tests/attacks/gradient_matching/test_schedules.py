"""Step sizes that fall."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fedsim_attacks.gradient_matching._drawing import half_cosine


@pytest.mark.parametrize("final", [0.0, 0.005, 1.0])
def test_half_cosine_known_answers(final: float) -> None:
    assert half_cosine(0.0, final) == pytest.approx(1)
    assert half_cosine(0.5, final) == pytest.approx((1 + final) / 2)
    assert half_cosine(1.0, final) == pytest.approx(final, abs=1e-15)


def test_half_cosine_falls() -> None:
    values = [half_cosine(i / 50, 0.1) for i in range(51)]
    assert all(later < earlier for earlier, later in pairwise(values))
