"""The pages of formats describe every field that a run and a leaderboard write."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.contracts.grant import Grant
from fedsim.report import leaderboard_rows, render
from fedsim.results.lines import ClaimOf
from fedsim.results.record import Run
from fedsim.scoring import METRICS
from fedsim.types import PrivacyClaim

pytestmark = pytest.mark.usefixtures("attacks_here")

DOCS = Path(__file__).parents[2] / "docs"
THREATS = DOCS / "threat-models.md"
OPEN = {"variant", "parameters", "stack", "packages"}
"""What holds names that are not fedsim's."""

BASE: dict[str, Any] = {
    "seed": 3,
    "training": {"rounds": 1, "local": {"batch_size": 2, "lr": 0.1}},
    "defenses": {"none": []},
    "observe": {"clients": [0], "batch_sizes": [2], "trials": 2},
}
IMAGES = {
    **BASE,
    "name": "images",
    "data": {"source": {"name": "digits", "size": 12}, "clients": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "attacks": ["label_inference", {"name": "idlg", "iterations": 2}],
}
ROWS = {
    **BASE,
    "name": "rows",
    "data": {"source": "breast_cancer", "clients": 3},
    "learner": {"name": "least_squares", "columns": 60},
    "attacks": ["membership_inference"],
    "training": {"rounds": 1},
    "observe": {"clients": [0], "batch_sizes": [8], "trials": 2},
    "knowledge": {"rows": "others"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    out = tmp_path_factory.mktemp("runs")
    return [fedsim.run(each, out=out / each["name"], workers=1) for each in (IMAGES, ROWS)]


def section(start: str) -> str:
    """The text below the heading that starts so, on one of the pages."""
    pages = [path.read_text(encoding="utf-8") for path in DOCS.glob("formats*.md")]
    parts = [part for text in pages for part in text.split("\n## ")[1:]]
    (match,) = [part for part in parts if part.startswith(start)]
    return match


def described(text: str) -> set[str]:
    """Every name in backticks, and every part of one with dots; and the grants, if it names them.

    Those are described once, where their values are.
    """
    names = set(re.findall(r"`([^`\n]+)`", text))
    if "knowledge" in names:
        names |= granted()
    return names | {part for name in names for part in name.split(".")}


def granted() -> set[str]:
    return set(re.findall(r"^- `knowledge\.(\w+)`", THREATS.read_text("utf-8"), re.MULTILINE))


def keys(value: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """(the field that it is part of, its own name) of all that is nested in `value`."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield above or name, name
            if name not in OPEN:
                yield from keys(inner, above or name)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, above)


def test_every_grant_is_described_where_attackers_are() -> None:
    assert granted() == set(Grant.values()), f"describe each in a line of {THREATS.name}"


def test_every_field_of_a_row_is_described_where_it_belongs(runs: list[Run]) -> None:
    """In the line of the table that its first part has: a field of one is not that of another."""
    table = [text for text in section("`results.jsonl`").splitlines() if text.startswith("| `")]
    by_field: dict[str, set[str]] = {}
    for text in table:
        for name in re.findall(r"`([^`]+)`", text.split(" | ")[0]):
            by_field.setdefault(name.split(".")[0], set()).update(described(text))
    metrics = by_field["metrics"]
    assert sorted(set(METRICS) - metrics) == []
    written: set[str] = set()
    for run in runs:
        for row in run.rows():
            for field, name in keys(row):
                written.add(field)
                assert field in by_field, field
                same = metrics if field in ("per_image", "baseline", "control") else set()
                assert name in by_field[field] | same, (field, name)
    assert written == set(by_field), "what is described and not written"


def test_every_field_of_a_round_and_of_the_record_is_described(runs: list[Run]) -> None:
    of_round, of_record = described(section("`rounds.jsonl`")), described(section("`record.json`"))
    of_knowledge = described(section("`results.jsonl`"))
    for run in runs:
        assert run.rounds()
        for row in run.rounds():
            assert sorted({name for _, name in keys(row)} - of_round) == []
        record = json.loads((run.out / "record.json").read_text(encoding="utf-8"))
        assert sorted(set(record.pop("knowledge")) - of_knowledge) == []
        assert sorted({name for _, name in keys(record)} - of_record) == []


def test_every_field_of_a_leaderboard_is_described(runs: list[Run]) -> None:
    allowed = described(section("`fedsim leaderboard`")) | described(section("Judgements"))
    rows = leaderboard_rows([run.out for run in runs])
    document = json.loads(render(rows, "json"))
    assert len(document["rows"]) == 3
    names = {name for _, name in keys(document)} - set(METRICS)
    assert sorted(names - allowed) == []
    parts = r"_(mean|low|high|median|std|min|max|worst|baseline|count|n)$"
    columns = next(csv.reader(io.StringIO(render(rows, "csv"))))
    for column in columns:
        assert column in allowed or re.sub(parts, "", column) in allowed | set(METRICS), column


def test_a_replay_is_described(runs: list[Run]) -> None:
    _, row = fedsim.attack(runs[0].observations()[0], "label_inference")
    known = described(section("`results.jsonl`"))
    assert "missing" in known
    assert sorted({name for _, name in keys(row)} - known) == []


def test_a_row_keeps_every_field_of_a_claim() -> None:
    assert {field.name for field in fields(PrivacyClaim)} <= ClaimOf.model_fields.keys()
