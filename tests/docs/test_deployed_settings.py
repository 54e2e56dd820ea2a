"""The table of deployed settings is what its script computes, and nobody typed an ε."""

from __future__ import annotations

import sys

from doc_pages import ROOT, read

sys.path.insert(0, str(ROOT / "docs/site"))
import settings


def test_the_page_has_the_table_that_the_script_writes() -> None:
    page = read("docs/deployed-settings.md")
    assert settings.write_table() in page
    assert settings.write_leaks() in page
