"""TopK: what is sent, and that nothing is lost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.testing.cases import mixed, non_finite, same, stream
from fedsim_defenses.top_k import TopK


@settings(max_examples=40, deadline=None)
@given(
    ratio=st.sampled_from([0.001, 0.07, 0.1, 0.29, 0.5, 1.0]),
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    seed=st.integers(0, 2**20),
)
def test_nothing_is_lost_and_ceil_of_ratio_n_is_sent(
    ratio: float, sizes: list[int], seed: int
) -> None:
    rng = stream(seed)
    update = {str(i): torch.randn(size, generator=rng) for i, size in enumerate(sizes)}
    top = TopK(ratio=ratio)
    state = top.init(update, math.inf)
    for _ in range(3):
        sent, after = top.apply(update, state, rng)
        for name, tensor in update.items():
            assert torch.equal(sent[name] + after[name], tensor + state[name])
            assert not bool(((sent[name] != 0) & (after[name] != 0)).any())
        total = sum(sizes)
        values = torch.cat([*sent.values()])
        assert int((values != 0).sum()) == math.ceil(round(ratio * total, 9))
        if total and ratio < 1 and (values == 0).any():
            assert values[values != 0].abs().min() >= torch.cat([*after.values()]).abs().max()
        state = after


def test_a_steady_small_entry_is_sent_in_the_end() -> None:
    update = {"a": torch.tensor([1.0, 0.4])}
    top = TopK(ratio=0.5)
    state, total = top.init(update, math.inf), torch.zeros(2)
    sent_small = []
    for _ in range(10):
        sent, state = top.apply(update, state, stream())
        total += sent["a"]
        sent_small.append(float(sent["a"][1]))
    assert any(sent_small)
    torch.testing.assert_close(total + state["a"], 10 * update["a"])


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    update = {"a": torch.tensor([1.0, -1.0, 1.0, -1.0])}
    top = TopK(ratio=0.5)
    sent, memory = top.apply(update, top.init(update, math.inf), stream())
    assert sent["a"].tolist() == [1.0, -1.0, 0.0, 0.0]
    assert memory["a"].tolist() == [0.0, 0.0, 1.0, -1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_update_passes_and_leaves_the_memory_alone(value: float) -> None:
    top = TopK(ratio=0.1)
    _, memory = top.apply(mixed(), top.init(mixed(), math.inf), stream())
    bad = non_finite(value)
    sent, after = top.apply(bad, memory, stream())
    assert same(sent, bad)
    assert same(after, memory)
