"""Whoever drops out, and whenever: the sum is right, or nothing is opened."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_support import Sum, added, of, vectors

from fedsim.federation.secure_aggregation.terms import AbortedError, Terms

_STAGES = 5


def _outcome(terms: Terms, gone: list[set[int]], length: int = 8) -> bool:
    """Whether the sum opened; a sum that opens is checked."""
    inputs = vectors(len(terms.participants), length)
    sum = Sum(terms, inputs)
    try:
        total = sum.run(*gone)
    except AbortedError:
        return False
    left = set(terms.participants) - gone[0] - gone[1] - gone[2]
    assert np.array_equal(total, added(inputs, left))
    return True


def test_every_set_of_four_that_drops_out_at_any_stage() -> None:
    """At n = 4, t = 3: 5 stages, 16 sets each; 1 may be gone, so that 5 x 5 open."""
    terms, opened = of(4, 3 / 4), 0
    for stage in range(_STAGES):
        for size in range(5):
            for away in combinations(range(4), size):
                gone = [set(away) if at == stage else set() for at in range(_STAGES)]
                is_open = _outcome(terms, gone, length=3)
                assert is_open == (size <= 1), (stage, away)
                opened += is_open
    assert opened == 25


@pytest.mark.parametrize(("gone", "is_open"), [(1, True), (8, False)])
def test_drops_from_a_ring(gone: int, is_open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 clients, each has 8 neighbours, of whom a few may be gone."""
    monkeypatch.setattr(Terms, "_degree", 8)
    assert not of(20).complete
    assert _outcome(of(20), [set(), set(), set(range(gone)), set(), {19}]) == is_open


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.data())
def test_drops_at_several_stages(count: int, data: st.DataObject) -> None:
    """The sum opens if and only if a quorum is left at the end."""
    when = data.draw(st.lists(st.integers(0, _STAGES), min_size=count, max_size=count))
    gone = [{one for one, stage in enumerate(when) if stage == at} for at in range(_STAGES)]
    terms = of(count, data.draw(st.sampled_from([0.51, 2 / 3, 1.0])))
    left = count - sum(map(len, gone))
    assert _outcome(terms, gone) == (left >= terms.quorum)
