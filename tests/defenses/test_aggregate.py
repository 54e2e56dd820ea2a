"""Aggregate: the weighted mean, in the memory of one update."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from fedsim.testing.cases import stream
from fedsim.testing.defense import AggregationDefenseContract
from fedsim.types import FedsimError, Update
from fedsim_defenses.aggregate import Aggregate


def update(value: float, num_examples: int, **more: torch.Tensor) -> Update:
    return Update(
        tensors={"a": torch.full((2,), value), **more},
        num_examples=num_examples,
        buffers={"mean": torch.full((3,), 10 * value)},
    )


def test_the_mean_is_weighted_by_examples_also_of_buffers() -> None:
    combined = Aggregate().combine([update(1.0, 1), update(2.0, 2), update(-4.0, 5)])
    expected = (1 * 1 + 2 * 2 - 4 * 5) / 8
    torch.testing.assert_close(combined.tensors["a"], torch.full((2,), expected))
    torch.testing.assert_close(combined.buffers["mean"], torch.full((3,), 10 * expected))
    assert combined.num_examples == 8


def test_many_clients_agree_with_the_mean_in_double_precision() -> None:
    draw = stream()
    updates = [
        Update(tensors={"a": torch.randn(50, generator=draw)}, num_examples=1 + i % 7)
        for i in range(500)
    ]
    weights = torch.tensor([u.num_examples for u in updates], dtype=torch.float64)
    stacked = torch.stack([u.tensors["a"].double() for u in updates])
    expected = (weights[:, None] * stacked).sum(0) / weights.sum()
    found = Aggregate().combine(updates).tensors["a"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_integer_tensors_are_averaged_and_rounded() -> None:
    counters = [update(0.0, 1, n=torch.tensor(12)), update(0.0, 3, n=torch.tensor(13))]
    found = Aggregate().combine(counters).tensors["n"]
    assert found.dtype == torch.int64
    assert int(found) == 13  # 12.75


def test_only_one_update_is_alive_at_a_time() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def arriving() -> Iterator[Update]:
        for i in range(6):
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = torch.full((4,), float(i))
            alive.append(weakref.ref(tensor))
            yield Update(tensors={"a": tensor}, num_examples=1)
            del tensor

    assert float(Aggregate().combine(arriving()).tensors["a"][0]) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("updates", "cause"),
    [
        ([], "no client"),
        ([update(1.0, 0)], "at least 1"),
        ([update(1.0, 1), update(1.0, 1, b=torch.zeros(1))], "same model"),
        ([update(1.0, 1), Update(tensors={"a": torch.zeros(3)}, num_examples=1)], "same model"),
    ],
)
def test_what_is_refused(updates: list[Update], cause: str) -> None:
    with pytest.raises(FedsimError, match=cause):
        Aggregate().combine(updates)


def test_the_suite_tells_buffers_from_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Aggregate.combine

    def mixed(defense: Aggregate, updates: Iterable[Update]) -> Update:
        mean = honest(defense, updates)
        return replace(mean, tensors={**mean.tensors, **mean.buffers}, buffers={})

    class Suite(AggregationDefenseContract):
        def make(self) -> Aggregate:
            return Aggregate()

    monkeypatch.setattr(Aggregate, "combine", mixed)
    with pytest.raises(AssertionError):
        Suite().test_one_update_alone_comes_out_as_it_is()
    with pytest.raises(AssertionError):
        Suite().test_names_shapes_types_and_total()
