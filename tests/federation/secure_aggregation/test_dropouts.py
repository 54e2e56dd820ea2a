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


def test_every_set_of_five_that_drops_out_at_any_stage() -> None:
    """At n = 5, t = 3: 5 stages, 32 sets each; 2 may be gone, so that 5 x 16 open."""
    terms, opened = of(5, 3 / 5), 0
    for stage in range(_STAGES):
        for size in range(6):
            for away in combinations(range(5), size):
                gone = [set(away) if at == stage else set() for at in range(_STAGES)]
                is_open = _outcome(terms, gone, length=3)
                assert is_open == (size <= 2), (stage, away)
                opened += is_open
    assert opened == 80


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.data())
def test_drops_at_several_stages(count: int, data: st.DataObject) -> None:
    """The sum opens if and only if a quorum is left at the end."""
    when = data.draw(st.lists(st.integers(0, _STAGES), min_size=count, max_size=count))
    gone = [{one for one, stage in enumerate(when) if stage == at} for at in range(_STAGES)]
    terms = of(count, data.draw(st.sampled_from([0.51, 2 / 3, 1.0])))
    left = count - sum(map(len, gone))
    assert _outcome(terms, gone) == (left >= terms.quorum)


@pytest.mark.parametrize(("count", "trials"), [(20, 4), (100, 1)])
def test_random_drops_among_many(count: int, trials: int) -> None:
    """With 100 clients, each has 14 neighbours: a few of whom may be gone."""
    stream = np.random.default_rng(count)
    for _ in range(trials):
        away = stream.permutation(count)[: count // 20]
        gone = [set(part.tolist()) for part in np.array_split(away, _STAGES)]
        assert _outcome(of(count), gone)


def test_with_100_clients_too_many_drops_fail_closed() -> None:
    assert not _outcome(of(100), [set(), set(), set(range(40)), set()])


@pytest.mark.parametrize("last", [[{4}], [(), {4}]])
def test_who_is_gone_after_its_vector_has_come_is_in_the_sum(last: list[set[int]]) -> None:
    inputs = vectors(5, 4)
    total = Sum(of(5), inputs).run((), (), (), *last)
    assert np.array_equal(total, added(inputs, range(5)))
