"""GradientPruning: exact counts, deterministic ties, idempotence."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.testing.cases import mixed, same, stream
from fedsim_defenses.gradient_pruning import GradientPruning


def pruned(update: dict[str, Tensor], **parameters: object) -> dict[str, Tensor]:
    return dict(GradientPruning(**parameters).apply(update, {}, stream())[0])


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.decimals(0, 1, places=3).filter(lambda value: value < 1),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
    levels=st.sampled_from([0, 1, 3]),
)
def test_exactly_floor_of_ratio_n_smallest_entries_become_zero(
    ratio: object, sizes: list[int], seed: int, levels: int
) -> None:
    rng = stream(seed)
    update = {str(i): torch.randn(size, generator=rng) for i, size in enumerate(sizes)}
    if levels:  # few distinct magnitudes: many ties
        update = {n: (t.sign() * (t.abs() * levels).ceil()) for n, t in update.items()}
    found = pruned(update, ratio=float(ratio))  # type: ignore[arg-type]
    before, after = torch.cat([*update.values()]), torch.cat([*found.values()])
    gone = (after == 0) & (before != 0)
    count = math.floor(Fraction(str(ratio)) * len(before))
    assert int(gone.sum()) == count - min(count, int((before == 0).sum()))
    assert torch.equal(after[~gone], before[~gone])
    if gone.any() and (~gone & (after != 0)).any():
        assert before[gone].abs().max() <= after[after != 0].abs().min()


def test_the_count_is_that_of_the_decimal_the_user_wrote() -> None:
    update = {"a": torch.arange(1.0, 101.0)}
    assert int((pruned(update, ratio=0.29)["a"] == 0).sum()) == 29  # 0.29 * 100 < 29 in binary


def test_of_equal_magnitudes_the_last_go_first() -> None:
    update = {"a": torch.tensor([1.0, -1.0]), "b": torch.tensor([5.0, 1.0, -1.0])}
    found = pruned(update, ratio=0.4)
    assert found["a"].tolist() == [1.0, -1.0]
    assert found["b"].tolist() == [5.0, 0.0, 0.0]


def test_the_scopes_differ() -> None:
    update = {"small": torch.tensor([1.0, 2.0]), "large": torch.tensor([30.0, 40.0])}
    everywhere = pruned(update, ratio=0.5)
    assert everywhere["small"].tolist() == [0.0, 0.0]
    assert everywhere["large"].tolist() == [30.0, 40.0]
    each = pruned(update, ratio=0.5, scope="tensor")
    assert each["small"].tolist() == [0.0, 2.0]
    assert each["large"].tolist() == [0.0, 40.0]


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.9, 0.999])
def test_pruning_twice_is_pruning_once(scope: str, ratio: float) -> None:
    once = pruned(mixed(), ratio=ratio, scope=scope)
    assert same(pruned(once, ratio=ratio, scope=scope), once)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_entries_that_are_not_finite_count_as_the_largest(value: float) -> None:
    found = pruned({"a": torch.tensor([5.0, value, 6.0, 7.0])}, ratio=0.75)
    assert same(found, {"a": torch.tensor([0.0, value, 0.0, 0.0])})


def test_eleven_million_entries() -> None:
    update = {"a": torch.randn(11_173_962, generator=stream())}
    found = pruned(update, ratio=0.9)
    assert int((found["a"] == 0).sum()) == 10_056_565
