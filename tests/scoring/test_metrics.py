"""The table of metrics keeps what it promises: directions, values without knowledge, headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedsim.scoring import COMPARABLE, METRICS, LpipsMetric, Metric
from fedsim.scoring.metrics import Compared, Pair

FORMATS = Path(__file__).parents[2] / "docs" / "formats.md"


class AbsoluteDifference(torch.nn.Module):
    """Stands in for a perceptual network: 0 for identical images."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).abs().flatten(1).mean(1)


LPIPS = LpipsMetric("alex", "0" * 64, AbsoluteDifference())


def pairs(what: Compared) -> tuple[Pair, Pair, Pair | None]:
    """A perfect answer, a poor one, and one that knows nothing of any data."""
    stream = torch.Generator().manual_seed(0)
    if what == "images":
        truth, other = (torch.rand(4, 3, 32, 32, generator=stream) for _ in range(2))
        return (
            Pair(claimed=truth, truth=truth, lpips=LPIPS),
            Pair(claimed=other, truth=truth, lpips=LPIPS),
            None,
        )
    if what == "features":
        truth, other = (torch.randn(4, 16, generator=stream).double() for _ in range(2))
        zero = torch.zeros_like(truth)
        return (
            Pair(claimed=truth, truth=truth, unordered=truth),
            Pair(claimed=other, truth=truth, unordered=other),
            Pair(claimed=zero, truth=truth, unordered=zero),
        )
    if what == "labels":
        truth = torch.tensor([0, 1, 2, 3])
        return Pair(claimed=truth, truth=truth), Pair(claimed=truth + 4, truth=truth), None
    if what == "rows":
        truth, other = (torch.rand(4, 6, generator=stream).double() * 2 - 1 for _ in range(2))
        return Pair(claimed=truth, truth=truth), Pair(claimed=other, truth=truth), None
    if what == "classes":
        truth = torch.eye(4)
        return Pair(claimed=truth, truth=truth), Pair(claimed=truth.flip(0), truth=truth), None
    members = torch.arange(4000) % 2 == 0
    coin = torch.rand(4000, generator=stream)
    return (
        Pair(claimed=members.double(), truth=members),
        Pair(claimed=-members.double(), truth=members),
        Pair(claimed=coin, truth=members),
    )


def value(metric: Metric, what: Compared, pair: Pair) -> float:
    value = metric.functions[what](pair)
    if isinstance(value, torch.Tensor):
        return float(value.mean())
    assert isinstance(value, float), value
    return value


CASES = [(metric, what) for metric in METRICS.values() for what in metric.functions]


@pytest.mark.parametrize(("metric", "what"), CASES, ids=lambda case: getattr(case, "name", case))
def test_a_perfect_answer_leaks_more_than_a_poor_one(metric: Metric, what: Compared) -> None:
    perfect, poor, _ = pairs(what)
    gain = metric.gain(value(metric, what, perfect), value(metric, what, poor))
    assert gain > 0.1
    assert metric.gain(0.25, 0.75) == (-0.5 if metric.larger_leaks else 0.5)


@pytest.mark.parametrize(("metric", "what"), CASES, ids=lambda case: getattr(case, "name", case))
def test_an_answer_that_knows_nothing_has_the_value_that_the_table_says(
    metric: Metric, what: Compared
) -> None:
    blind = pairs(what)[2]
    assert (metric.uninformed is None) == (blind is None)
    if blind is not None:
        assert value(metric, what, blind) == pytest.approx(metric.uninformed, abs=0.02)


def test_columns_have_headings_of_their_own_and_say_what_they_hold() -> None:
    shown = [metric for metric in METRICS.values() if metric.heading]
    assert len({metric.heading for metric in shown}) == len(shown)
    assert all(metric.meaning for metric in shown)
    assert all(metric.narrow == "early" for metric in METRICS.values() if not metric.heading)


def test_each_metric_is_described_in_the_formats() -> None:
    line = re.search(r"^\| `metrics` \|.*$", FORMATS.read_text(), re.MULTILINE)
    assert line
    assert [name for name in METRICS if f"`{name}`" not in line[0]] == []


def test_what_no_other_attack_can_be_compared_by_is_in_no_aggregate() -> None:
    assert set(METRICS) - set(COMPARABLE) == {"attack_loss"}
