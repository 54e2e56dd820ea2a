"""Whoever drops out, the sum is right or nothing is opened; and who is whose neighbour."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom
from sum_support import Sum, added, of, vectors

from fedsim.federation.secure_aggregation.terms import AbortedError, Terms, degree, least

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


@pytest.mark.parametrize("count", [2, 5, 99])
def test_of_few_clients_all_are_neighbours(count: int) -> None:
    terms, everyone = of(count), set(range(count))
    for one in range(count):
        assert set(terms.neighbours(one, everyone, b"keys")) == everyone - {one}
    assert terms.complete and terms.shares == terms.quorum


@pytest.mark.parametrize("count", [100, 301])
def test_of_many_it_is_a_ring_that_both_ends_know(count: int) -> None:
    terms, everyone = of(count), range(count)
    found = {one: terms.neighbours(one, everyone, b"keys") for one in everyone}
    size = degree(count, 2 / 3, 0.0)
    for one, neighbours in found.items():
        assert len(set(neighbours)) == size and one not in neighbours
        assert all(one in found[other] for other in neighbours)
    assert found != {one: terms.neighbours(one, everyone, b"other keys") for one in everyone}


@pytest.mark.parametrize(
    ("count", "colluding"), [(100, 0.0), (100, 0.05), (100, 0.1), (300, 0.1), (1000, 0.05)]
)
def test_the_degree_is_the_least_with_the_stated_chances(count: int, colluding: float) -> None:
    """Reckoned anew from the hypergeometric distribution's own terms."""

    fewest = least(count, 2 / 3) - 1

    def chances(size: int) -> tuple[float, float]:
        """Of collusion where the server leaves out as many honest clients as it may."""
        needed = least(size + 1, 2 / 3)
        bad, gone = math.floor(colluding * count), math.floor(0.05 * count)
        many, lost = needed - 1 - size // 2, size + 2 - needed
        seen = hypergeom.pmf(np.arange(many, size + 1), fewest, bad, size).sum()
        late = hypergeom.pmf(np.arange(lost, size + 1), count - 1, gone, size).sum()
        return count * seen if many >= 1 else 1.0, count * late

    size = degree(count, 2 / 3, colluding)
    if size == count - 1:
        return
    seen, late = chances(size)
    assert seen <= 2.0**-80 and late <= 2.0**-20
    assert size < fewest
    for smaller in range(4, size, 2):
        seen, late = chances(smaller)
        assert seen > 2.0**-80 or late > 2.0**-20


@pytest.mark.parametrize(("count", "threshold"), [(100, 0.75), (400, 0.6)])
def test_no_client_has_fewer_neighbours_because_others_published_no_keys(
    count: int, threshold: float
) -> None:
    """Else a share of them would be colluding that the threshold is not made for."""
    terms = Terms(
        session=b"", participants=tuple(range(count)), threshold=threshold, colluding=0.05
    )
    directory = range(terms.quorum)
    size = degree(count, threshold, 0.05)
    for one in (0, terms.quorum - 1):
        found = len(terms.neighbours(one, directory, b"keys"))
        assert found == (terms.quorum - 1 if terms.complete else size)
        assert terms.complete or terms.shares == least(size + 1, threshold)


def test_shared_noise_raises_the_quorum() -> None:
    terms = Terms(session=b"", participants=tuple(range(5)), threshold=0.6, fewest=5)
    assert terms.quorum == 5
