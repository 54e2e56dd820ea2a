"""The table of metrics keeps what it promises: directions, values without knowledge, headings."""

import pytest
import torch

from fedsim.contracts.metric import ScoredPair
from fedsim.contracts.target import METRICS, targets
from fedsim.scoring import LpipsMetric
from fedsim.targets.images import ImageAid
from fedsim.targets.rows import Rows


class AbsoluteDifference(torch.nn.Module):
    """Stands in for a perceptual network: 0 for identical images."""

    def forward(self, a, b):
        return (a - b).abs().flatten(1).mean(1)


LPIPS = LpipsMetric("alex", "0" * 64, AbsoluteDifference())


def pairs(what):
    """A perfect answer, a poor one, and one that knows nothing of any data."""
    stream = torch.Generator().manual_seed(0)
    aid = None
    perfect = None
    blind = None
    if what == "images":
        truth, poor = (torch.rand(4, 3, 32, 32, generator=stream) for _ in range(2))
        aid = ImageAid(lpips=LPIPS)
    elif what == "features":
        truth, poor = (torch.randn(4, 16, generator=stream).double() for _ in range(2))
        blind = torch.zeros_like(truth)
    elif what == "labels":
        truth = torch.tensor([0, 1, 2, 3])
        poor = truth + 4
    elif what == "rows":
        truth, poor = (torch.rand(4, 6, generator=stream).double() * 2 - 1 for _ in range(2))
    elif what == "records":
        truth, poor = (torch.rand(4, 5, generator=stream) for _ in range(2))
        aid = torch.tensor([0, 1, 1, 1, 2])
    elif what == "classes":
        truth = torch.eye(4)
        poor = truth.flip(0)
    elif what in ("client_class_shares", "client_column_shares"):
        truth = torch.tensor([[0.7, 0.3], [0.1, 0.9]])
        poor = truth.flip(1)
    elif what == "class_shares":
        truth = torch.tensor([0.7, 0.3])
        poor = truth.flip(0)
    elif what == "source":
        truth = torch.arange(1000) % 4
        perfect, aid = torch.eye(4)[truth], (torch.arange(1000) // 4 % 5, torch.ones(4, 5))
        poor, blind = perfect.roll(1, 1), torch.rand(1000, 4, generator=stream)
    else:
        truth = torch.arange(4000) % 2 == 0
        perfect, blind = truth.double(), torch.rand(4000, generator=stream)
        poor = -perfect

    def pair(claimed):
        unordered = claimed if what == "features" else None
        return ScoredPair(claimed=claimed, truth=truth, unordered=unordered, aid=aid)

    knows_nothing = None if blind is None else pair(blind)
    return pair(truth if perfect is None else perfect), pair(poor), knows_nothing


def value(metric, pair):
    return float(torch.as_tensor(metric.compute(pair), dtype=torch.float64).mean())


CASES = [
    (metric, part)
    for part, target in targets().items()
    for metric in target.metrics
    # Ends of intervals and counts stand beside a metric, and are none.
    if not metric.name.endswith(("_low", "_high", "_others", "_members", "_beyond_chance"))
]
CASES.append((Rows.classes, "classes"))


@pytest.mark.parametrize(("metric", "what"), CASES, ids=lambda case: getattr(case, "name", case))
def test_a_perfect_answer_leaks_more_than_a_poor_one(metric, what):
    perfect, poor, _ = pairs(what)
    gain = metric.gain(value(metric, perfect), value(metric, poor))
    assert gain > 0.1
    assert metric.gain(0.25, 0.75) == (-0.5 if metric.larger_leaks else 0.5)


@pytest.mark.parametrize(("metric", "what"), CASES, ids=lambda case: getattr(case, "name", case))
def test_an_answer_that_knows_nothing_has_the_value_that_the_table_says(metric, what):
    # Of a target whose ranking metric alone is the same for all data, the others have no value.
    blind = None if what == "source" and metric.uninformed is None else pairs(what)[2]
    assert (metric.uninformed is None) == (blind is None)
    if blind is not None:
        assert value(metric, blind) == pytest.approx(metric.uninformed, abs=0.02)


def test_columns_have_headings_of_their_own_and_say_what_they_hold():
    shown = [metric for metric in METRICS.values() if metric.heading]
    assert len({metric.heading for metric in shown}) == len(shown)
    assert all(metric.meaning for metric in shown)
    assert all(metric.narrow == "early" for metric in METRICS.values() if not metric.heading)
