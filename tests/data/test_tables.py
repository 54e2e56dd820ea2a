"""Tables: rows of bounded norm from declared ranges, and what is wrong with a file, and where."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedsim.acceptance import describe_left_out
from fedsim.data import table as table_module
from fedsim.data.bundled_tables import BreastCancer, Diabetes, SyntheticTable
from fedsim.data.partition import partition
from fedsim.data.table import TableFile
from fedsim.scenario.model import Partition
from fedsim.types import FedsimError, Table

HEADER = "age,weight,note,sick,site\n"
FEATURES = [{"name": "age", "low": 0, "high": 100}, {"name": "weight", "low": 0, "high": 200}]
TARGET = {"name": "sick", "classes": ["no", "yes"]}


def lines(count: int = 20) -> list[str]:
    return [f"{5 * i},{10 * i},x,{'yes' if i % 2 else 'no'},{i // 2 % 2}\n" for i in range(count)]


def source(file: Path, body: list[str] | None = None, **changes: Any) -> TableFile:
    file.write_text(HEADER + "".join(lines() if body is None else body), encoding="utf-8")
    fields = {"path": str(file), "features": FEATURES, "target": TARGET, **changes}
    return TableFile.model_validate(fields)


def everything(table: Table) -> torch.Tensor:
    rows = torch.cat([table.train_rows, table.test_rows])
    return rows[rows[:, 0].argsort()]


def test_columns_are_scaled_by_their_declared_ranges(tmp_path: Path) -> None:
    table = source(tmp_path / "a.csv").load()
    rows = everything(table)
    expected = torch.arange(20, dtype=torch.float64) / 10 - 1
    torch.testing.assert_close(rows[:, 0], expected)
    torch.testing.assert_close(rows[:, 1], expected)
    assert bool((rows[:, 2] == 1).all()), "the intercept"
    assert rows[:, 3].tolist() == [-1.0, 1.0] * 10
    assert table.columns == ("age", "weight", "intercept", "sick")
    assert table.classes == ("no", "yes") and table.row_norm == 2
    assert len(table.train_rows) > len(table.test_rows) > 0


def test_a_column_of_categories_has_an_entry_for_each(tmp_path: Path) -> None:
    body = [f"{5 * i},{10 * i},{'abc'[i % 3]},{'yes' if i % 2 else 'no'},0\n" for i in range(20)]
    features = [FEATURES[0], {"name": "note", "categories": ["a", "b", "c"]}]
    table = source(tmp_path / "a.csv", body, features=features).load()
    assert table.columns == ("age", "note=a", "note=b", "note=c", "intercept", "sick")
    assert everything(table)[:3, 1:4].tolist() == [[1, -1, -1], [-1, 1, -1], [-1, -1, 1]]
    data = table.labelled()
    assert [column.width for column in data.columns] == [1, 3]
    inputs, labels = data.examples_at(torch.arange(3))
    assert inputs.dtype == torch.float32 and inputs.shape == (3, 4)
    assert inputs[:, 1:].sum(1).tolist() == [1, 1, 1] and bool((inputs >= 0).all())
    assert labels.tolist() == table.train_labels[:3].tolist()
    body[3] = "15,30,d,no,0\n"
    with pytest.raises(FedsimError, match=r"line 5, column 'note': 'd' is none of the categories"):
        source(tmp_path / "b.csv", body, features=features).load()
    twice = [{"name": "note", "categories": ["a", "a"]}]
    with pytest.raises(ValidationError, match="'a' is declared twice"):
        source(tmp_path / "c.csv", features=twice)


def test_a_model_needs_classes(tmp_path: Path) -> None:
    table = source(tmp_path / "a.csv", target=FEATURES[0], features=FEATURES[1:]).load()
    with pytest.raises(FedsimError, match=r"has the target 'age', a quantity.*declare"):
        table.labelled()


def test_one_row_more_changes_no_other_rows_split(tmp_path: Path) -> None:
    """A claim of one row's presence asks for it; the row may come anywhere, and may be a copy."""

    def split(body: list[str]) -> tuple[Counter[Any], Counter[Any]]:
        table = source(tmp_path / "a.csv", body).load()
        parts = table.train_rows, table.test_rows
        train, test = (Counter(tuple(row) for row in part.tolist()) for part in parts)
        return train, test

    body = [f"{i / 7},{i / 3},x,{'yes' if i % 3 else 'no'},0\n" for i in range(400)]
    train, test = split(body)
    assert 40 < test.total() < 120, "about a fifth"
    for at, row in ((0, "1.5,2.5,x,no,0\n"), (200, body[3]), (400, "99,1,x,yes,0\n")):
        more, others = split([*body[:at], row, *body[at:]])
        assert not train - more and not test - others
        assert (more - train).total() + (others - test).total() == 1


def test_the_bound_does_not_depend_on_the_data(tmp_path: Path) -> None:
    """Other rows, also ones beyond the ranges, change neither the bound nor the scaling."""
    wild = [*lines(), "1e300,-5,x,no,0\n"]
    one, other = source(tmp_path / "a.csv").load(), source(tmp_path / "b.csv", wild).load()
    assert one.row_norm == other.row_norm
    rows = everything(other)
    assert rows[-1].tolist() == [1.0, -1.0, 1.0, -1.0]
    torch.testing.assert_close(rows[:-1], everything(one))


@pytest.mark.parametrize("norm", [0.3, 1.0, 1.7])
def test_longer_training_rows_are_scaled_down(tmp_path: Path, norm: float) -> None:
    free = source(tmp_path / "a.csv").load()
    held = source(tmp_path / "a.csv", row_norm=norm).load()
    assert held.row_norm == norm
    lengths = torch.linalg.vector_norm(held.train_rows, dim=1)
    assert bool((lengths <= norm).all()), "also after rounding"
    before = torch.linalg.vector_norm(free.train_rows, dim=1)
    torch.testing.assert_close(lengths, before.clamp(max=norm))
    directions = torch.nn.functional.cosine_similarity(free.train_rows, held.train_rows)
    torch.testing.assert_close(directions, torch.ones_like(directions))
    assert torch.equal(free.test_rows, held.test_rows)


def test_a_quantity_without_intercept(tmp_path: Path) -> None:
    target = {"name": "weight", "low": 0, "high": 100}
    table = source(tmp_path / "a.csv", target=target, features=FEATURES[:1], intercept=False).load()
    assert table.columns == ("age", "weight") and table.classes is None
    rows = everything(table)
    assert table.row_norm == math.sqrt(2)
    assert rows[-1].tolist() == pytest.approx([0.9, 1.0])
    assert not table.train_labels.any()


def test_clients_by_a_column(tmp_path: Path) -> None:
    table = source(tmp_path / "a.csv", client="site").load()
    parts = partition(table, Partition(name="natural"), 2, seed=0)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(table.train_rows)))
    assert table.client_of is not None
    for client, part in enumerate(parts):
        assert bool((table.client_of[part] == client).all())
    without = source(tmp_path / "a.csv").load()
    with pytest.raises(FedsimError, match="table with `client`"):
        partition(without, Partition(name="natural"), 2, seed=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2,x,no\n", "line 5: 4 values for 5 columns"),
        ("1,,x,no,0\n", r"line 5, column 'weight': '' is no finite number"),
        ("1,inf,x,no,0\n", r"line 5, column 'weight': 'inf'"),
        ("1,2,x,maybe,0\n", r"line 5, column 'sick': 'maybe' is none of the classes no and yes"),
        ("1,2,x,no,-1\n", r"line 5, column 'site': '-1' is no client"),
        (f"1,2,x,no,{'9' * 5000}\n", r"line 5, column 'site': '9{40}' is no client"),
        ('1,"2,x,no,0\n', "no CSV file"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    body = [*lines()[:3], line, *lines()[3:]]
    with pytest.raises(FedsimError, match=message):
        source(tmp_path / "a.csv", body, client="site").load()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": [{"name": "height", "low": 0, "high": 1}]}, "no column is called 'height'"),
        ({"path": "nowhere.csv"}, "nowhere.csv cannot be read .*correct `path`"),
    ],
)
def test_a_bad_schema_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FedsimError, match=message):
        source(tmp_path / "a.csv", **changes).load()


def test_columns_that_may_be_meant_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    wanted = source(file)
    assert wanted.load().left_out == ()
    file.write_text(
        "split,client," + HEADER + "".join(f"test,{i % 2},{line}" for i, line in enumerate(lines()))
    )
    assert [count for _, count in wanted.load().left_out] == [1, 1]
    (said,) = describe_left_out(wanted.load())
    assert "2 columns" in said and "`client: client`" in said and "`split`" in said
    used = TableFile.model_validate({**wanted.model_dump(), "client": "client"}).load()
    assert len(used.left_out) == 1 and used.client_of is not None
    assert describe_left_out(used.without_training()) == describe_left_out(used)


def test_a_line_has_a_bounded_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_LINE_CHARACTERS", 100)
    quoted = [*lines()[:3], f'"{"1" * 50}\n{"1" * 50}\n{"1" * 50}",2,x,no,0\n']
    with pytest.raises(FedsimError, match="column 'age'"):
        source(tmp_path / "a.csv", quoted).load()
    for long in (f"{'1' * 200},2,x,no,0\n", "1" * 101):
        with pytest.raises(FedsimError, match="line 5: more than 100 characters"):
            source(tmp_path / "a.csv", [*lines()[:3], long]).load()


def test_an_empty_file_and_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="no rows below"):
        source(tmp_path / "a.csv", []).load()
    wanted = source(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FedsimError, match="UTF-8"):
        wanted.load()
    (tmp_path / "a.csv").write_bytes(b"")
    with pytest.raises(FedsimError, match="there are none"):
        wanted.load()


@pytest.mark.parametrize(
    "changes",
    [
        {"features": [*FEATURES, FEATURES[0]]},
        {"features": [{"name": "age", "low": 1, "high": 1}]},
        {"target": {"name": "sick", "classes": ["yes", "yes"]}},
        {"row_norm": 0},
        {"features": []},
    ],
)
def test_a_schema_without_sense_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        source(tmp_path / "a.csv", **changes)


def test_the_bundled_tables() -> None:
    cancer, diabetes = BreastCancer().load(), Diabetes().load()
    assert cancer.train_rows.shape == (456, 32) and cancer.test_rows.shape == (113, 32)
    assert diabetes.train_rows.shape == (354, 12) and diabetes.test_rows.shape == (88, 12)
    assert cancer.row_norm == math.sqrt(32) and diabetes.row_norm == math.sqrt(12)
    # 212 malignant samples of 569, each class in its share in both splits.
    assert int((cancer.train_labels == 0).sum()) == 170
    assert int((cancer.test_rows[:, -1] < 0).sum()) == 42
    for table in (cancer, diabetes):
        assert float(torch.cat([table.train_rows, table.test_rows]).abs().max()) <= 1
        assert table.train_rows.dtype == torch.float64


def test_a_synthetic_table_is_of_the_size_and_the_bound_that_was_asked_for() -> None:
    source = SyntheticTable(rows=500, features=7, row_norm=0.9, intercept=False)
    table, again = source.load(), source.load()
    assert table.train_rows.shape == (400, 8) and table.test_rows.shape == (100, 8)
    assert float(torch.linalg.vector_norm(table.train_rows, dim=1).max()) <= 0.9
    assert torch.equal(table.train_rows, again.train_rows)
    other = SyntheticTable(rows=500, features=7, row_norm=0.9, intercept=False, draw=1).load()
    assert not torch.equal(table.train_rows, other.train_rows)
