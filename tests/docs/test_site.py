"""The site of the pages: it builds, says all that the program has, and asks the network nothing."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

import pytest
import typer
from doc_pages import PAGES, ROOT, read

import fedsim
from fedsim.cli.commands import Kind, app
from fedsim.contracts import listing

for needed in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
    pytest.importorskip(needed, reason="pip install -e '.[docs]'")

sys.path.insert(0, str(ROOT / "docs/site"))
import reference  # noqa: E402 - it is beside the site's configuration

LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("img", "srcset"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("source", "srcset"),
    ("video", "src"),
    ("object", "data"),
    ("embed", "src"),
}
"""Attributes whose target a browser loads by itself; links that a reader follows are not among."""


class Page(HTMLParser):
    """A page's anchors, links, what it loads, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value or "")
            elif (tag, name) in LOADED:
                self.loads.append(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What `.ci/run` does of the pages below `source`."""
    words = ["-W", "-q", "-c", str(source / "docs/site"), str(source), str(out)]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        check=False,
    )


pytestmark = pytest.mark.slow  # Sphinx takes most of half a minute.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_page_is_there_and_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    linked = set(pages[site / "index.html"].links)
    for page in PAGES:
        name = page.replace(".md", ".html")
        assert site / name in pages
        assert name in linked or page == "README.md", page


def test_nothing_is_loaded_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert page.loads, path
        for target in page.loads:
            assert not re.match(r"\w+:|//", target) or target.startswith("data:"), (path, target)
    for path in site.rglob("*.css"):
        told = re.findall(
            r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")]*)", path.read_text("utf-8")
        )
        assert not told, (path, told)


def test_every_link_within_the_site_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in (*page.links, *page.loads):
            if re.match(r"\w+:", link):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            assert target.exists(), (path, link)
            if anchor and target in pages:
                assert anchor in pages[target].anchors, (path, link)


def leaves(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    """Every command below a group, with the words that call it."""
    if not hasattr(command, "commands"):
        yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, f"{words} {name}")


def test_every_command_is_explained(site: Path, pages: dict[Path, Page]) -> None:
    text = pages[site / "docs/commands.html"].text
    found = dict(leaves(typer.main.get_command(app), "fedsim"))
    assert len(found) > 12
    for words, command in found.items():
        part = re.split(rf"^{words}\b", text, flags=re.MULTILINE)
        assert len(part) > 1, words
        for option in command.params:
            if option.param_type_name == "option":
                assert any(option.opts[0] in each for each in part[1:]), (words, option.opts)


def test_every_plugin_and_parameter_is_listed(site: Path, pages: dict[Path, Page]) -> None:
    text = pages[site / "docs/plugins.html"].text
    rows = [row for row in listing.rows(list(get_args(Kind))) if row["package"] == "fedsim"]
    assert len(rows) > 40
    for row in rows:
        assert row["summary"].replace("`", "") in text, row["name"]
        # Not split, since a parameter may have the plugin's own name.
        headed = re.finditer(rf"^{row['name']}\b", text, flags=re.MULTILINE)
        part = [text[match.end() :] for match in headed]
        for each in row["parameters"]:
            named = re.compile(rf"^{each['name']}$", flags=re.MULTILINE)
            assert any(named.search(one) for one in part), (row["name"], each["name"])


def test_every_public_name_is_explained(site: Path, pages: dict[Path, Page]) -> None:
    text = " ".join(pages[site / "docs/python.html"].text.split())
    for name in fedsim.__all__:
        thing = getattr(fedsim, name)
        first = (inspect.getdoc(thing) or "").partition("\n")[0].replace("`", "")
        assert first and first in text, name
        for each in inspect.signature(thing).parameters:
            assert re.search(rf"\b{each}\b", text), (name, each)


@pytest.mark.parametrize("page", reference.IN_SHORT)
def test_the_table_of_a_page_is_that_of_the_program(page: str) -> None:
    assert read(page) == reference.in_short(page, read(page)), "run: python docs/site/reference.py"
