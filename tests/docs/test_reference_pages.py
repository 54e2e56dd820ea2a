"""Pages on commands, plugins and functions say without the site what there is, and truly so."""

from __future__ import annotations

import re
import sys

import pytest
from doc_pages import ROOT, read

import fedsim
from fedsim.cli.commands import Kind
from fedsim.contracts import listing

sys.path.insert(0, str(ROOT / "docs/site"))
import reference


@pytest.mark.parametrize("page", reference.IN_SHORT)
def test_the_table_of_a_page_is_that_of_the_program(page: str) -> None:
    text = read(page)
    assert text == reference.in_short(page, text), "run: python docs/site/reference.py"
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    assert not [row for row in rows if not re.fullmatch(r"\| `[^`]+` \| .+\. \|", row)]


def test_the_tables_leave_out_nothing() -> None:
    told = {
        page: set(re.findall(r"^\| `([^`]+)`", read(page), re.M)) for page in reference.IN_SHORT
    }
    plugins = listing.rows([kind.value for kind in Kind])
    own = {row["name"] for row in plugins if row["package"] == "fedsim"}
    assert told["docs/plugins.md"] == own
    assert told["docs/python.md"] == {f"fedsim.{name}" for name in fedsim.__all__}
    assert {"fedsim run", "fedsim privacy audit", "fedsim node"} < told["docs/commands.md"]


def test_a_table_that_is_not_of_today_is_found() -> None:
    page = "docs/commands.md"
    old = read(page).replace("| `fedsim run` |", "| `fedsim ran` |")
    assert old != read(page) and reference.in_short(page, old) == read(page)
