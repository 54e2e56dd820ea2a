"""The grants: their order, what only the victim knows, and what a report says of each."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedsim.contracts.grant import Grant

LISTED = {
    "labels": ("none", "inferred", "known"),
    "bn": ("none", "running", "inferred", "exact"),
    "features": ("none", "known"),
    "rows": ("none", "others"),
    "public": ("none", "test"),
}
"""What rows of `results.jsonl` have had, in this order; what is new follows."""


def test_values_are_in_order_from_least_to_most() -> None:
    assert list(Grant.values().items())[: len(LISTED)] == list(LISTED.items())
    assert all(values[0] == "none" for values in Grant.values().values())


@pytest.mark.parametrize("wrong", [{"labels": "all"}, {"label": "known"}, {"rows": None}])
def test_what_cannot_be_granted_is_refused(wrong: dict[str, str]) -> None:
    for make in (Grant, Grant.least):
        with pytest.raises(ValidationError):
            make(**wrong)


def test_what_is_lacking_is_told_one_at_a_time_in_their_order() -> None:
    assert Grant().lacks(Grant.least()) is None
    assert Grant.most().lacks(Grant.most()) is None
    assert Grant().lacks(Grant.most()) == (
        "needs knowledge.labels: known (of `fedsim attack`: --grant labels=known), and what is "
        "granted is inferred"
    )
    told = Grant(labels="known", bn="exact", features="known").lacks(Grant.most())
    assert told is not None
    assert told.startswith("needs knowledge.rows: others")


def test_what_only_the_victim_knows_is_told() -> None:
    secrets = ["labels=known", "bn=exact", "features=known", "rows=others"]
    assert Grant.most().from_truth()[:4] == secrets
    assert Grant(labels="inferred", bn="inferred", public="test").from_truth() == []


def test_every_value_has_its_words() -> None:
    for name, values in Grant.values().items():
        meaning = Grant.meanings()[name]
        assert len(meaning.words) == len(values)
        assert all(meaning.words[1:]), "what is granted is said"
        assert meaning.from_truth in (None, *values[1:])
    assert Grant.meanings("images").keys() ^ Grant.meanings("rows").keys() == set(Grant.values())
    assert "rows" in Grant.meanings("rows")
    assert "labels" in Grant.meanings("images")
