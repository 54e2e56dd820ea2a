"""The curve of who was accused rightly and wrongly."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from fedsim.report.recovered import _rates
from fedsim.targets.membership import membership_auc


def area(rates: list[tuple[float, float]]) -> float:
    """Below the curve, by trapezoids."""
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(rates))


def test_the_area_below_the_curve_is_the_score() -> None:
    stream = torch.Generator().manual_seed(0)
    members = torch.rand(60, generator=stream) < 0.4
    for levels in (1, 2, 5, 1000):
        scores = torch.randint(levels, (60,), generator=stream).double() + members.double()
        scores[:3] = torch.tensor([math.inf, -math.inf, math.inf])
        rates = _rates(scores, members)
        assert rates[0] == (0, 0) and rates[-1] == (1, 1)
        assert math.isclose(area(rates), membership_auc(scores, members))


def test_equal_scores_are_one_point() -> None:
    assert _rates(torch.zeros(4), torch.tensor([True, False, True, False])) == [(0, 0), (1, 1)]
