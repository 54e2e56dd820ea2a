"""The baseline's bound on leverage against a mutual information that was integrated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsim.privacy.baselines import mutual_information_leverage
from fedsim.privacy.mechanisms import projection


@pytest.mark.parametrize("delta", [1e-200, 1e-9, 1e-3, 0.2, 0.9])
@pytest.mark.parametrize("r", [1, 40, 1000])
def test_the_divergence_is_what_it_may_be(delta: float, r: float) -> None:
    import mpmath as mp

    p = mp.mpf(mutual_information_leverage(delta, r))
    with mp.workdps(30 + int(-2 * math.log10(delta))):
        divergence = r * (p / (1 - p) + mp.log1p(-p)) / 2
        assert float(2 * divergence / mp.mpf(delta) ** 2) == pytest.approx(1, rel=1e-9)


def test_a_row_has_no_more_mutual_information_than_that() -> None:
    """A row that is there or not with equal probability: two normal laws in one dimension."""
    r, delta = 1, 0.3
    p = mutual_information_leverage(delta, r)
    x = np.linspace(-40, 40, 400_001)
    laws = [np.exp(-(x**2) / (2 * v)) / np.sqrt(2 * np.pi * v) for v in (1.0, 1 / (1 - p))]
    middle = sum(laws) / 2
    tiny = 1e-300
    information = sum(law * np.log((law + tiny) / (middle + tiny)) for law in laws).sum() / 2
    information *= x[1] - x[0]
    variation = np.maximum(laws[1] - laws[0], 0).sum() * (x[1] - x[0])
    assert variation == pytest.approx(float(np.exp(projection.log_delta(p, r, 0.0))), rel=1e-4)
    assert variation**2 / 2 <= information <= delta**2 / 2
