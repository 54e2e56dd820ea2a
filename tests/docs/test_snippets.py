"""Every block of code and every command of the pages is tried, as it is written.

What takes seconds is executed. What takes minutes is parsed down to the scenario that it resolves,
and executed with --run-slow, a page at a time.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, Block, anchors, blocks, commands, inline_commands, links, read
from doc_pages import spans as all_spans
from snippets import SCHEMATIC, check_block, fill

from fedsim.contracts import plugins

BLOCKS = {page: blocks(page, read(page)) for page in PAGES}
TRIED = [block for page in PAGES for block in (*BLOCKS[page], *inline_commands(page, read(page)))]
PATHS = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("fedsim", "attacks", "defenses", "benchmarks", "scenarios", "tests", "docs")
    for path in (ROOT / folder).rglob("*.*")
]
LIMIT = 120.0
"""Seconds after which a command that is still at work is ended."""

Placing = Callable[[list[Block]], Path]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placing:
    """Makes a folder in which a page's commands find what they name, and works in it."""

    def make(page: list[Block]) -> Path:
        fill(tmp_path, page)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("COLUMNS", "120")
        if any(block.language == "toml" for block in page):  # it installs a package
            monkeypatch.setattr(plugins, "_entry_points", cache(plugins._entry_points.__wrapped__))
        return tmp_path

    return make


@pytest.mark.parametrize("block", TRIED, ids=str)
def test_what_a_page_shows_works(block: Block, place: Placing) -> None:
    place(BLOCKS[block.page])
    check_block(block)


@pytest.mark.by_hand
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_one_after_another(page: str, place: Placing) -> None:
    """A command that is at work after `LIMIT` seconds, without an error, began as written.

    What reads the files of such a run, or images that are no part of the project, is passed over.
    """
    folder = place(BLOCKS[page])
    shell = [block for block in BLOCKS[page] if block.language in ("sh", "console")]
    for text in [command.text for block in shell for command in commands(block)]:
        program, *words = shlex.split(text)
        inputs = [word for word in words if word.startswith("runs/") or "cifar10" in word]
        missing = any("cifar10" in word or not (folder / word).exists() for word in inputs)
        if program not in ("fedsim", "python") or missing or SCHEMATIC.search(text):
            continue
        run = [sys.executable, *(["-m", "fedsim"] if program == "fedsim" else []), *words]
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        try:
            done = subprocess.run(
                run, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            continue
        assert done.returncode in ((0, 1) if "audit" in words else (0,)), (text, done.stderr)


BROKEN = {
    "wrong flag": ("sh", "fedsim run scenarios/quickstart.yaml --rounds 3", "--rounds"),
    "wrong key": ("sh", "fedsim run scenarios/quickstart.yaml --set training.round=3", "rounds"),
    "second of a line": ("sh", "fedsim list && fedsim lists", "No such command"),
    "wrong key of a mechanism": ("sh", "fedsim privacy delta gaussian a=1 --epsilon 1", "a"),
    "other output": (
        "console",
        "$ fedsim privacy delta gaussian sensitivity=1 sigma=2 --epsilon 1\nδ = 0.1",
        "0.0",
    ),
    "missing benchmark": ("sh", "python benchmarks/private.py speed", "no such script"),
    "unknown extra": ("sh", "pip install '.[tests]'", "tests"),
    "unknown program": ("sh", "fedsims run scenarios/quickstart.yaml", "unknown program"),
    "scenario without attacks": ("yaml", "name: x\ndata: {source: digits}", "attacks"),
    "wrong argument": ("python", "import fedsim\nfedsim.run('x', o=1)", "'o'"),
    "wrong result": ("python", ">>> 1 + 1\n3", "Got"),
    "unknown group": ("toml", '[project.entry-points."fedsim.attack"]\nx = "y:Z"', "fedsim.attack"),
    "code without a fence": ("indented", "    fedsim list", "unknown language"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_found(name: str, place: Placing) -> None:
    language, text, told = BROKEN[name]
    place([])
    with pytest.raises((Exception, pytest.fail.Exception), match=re.escape(told)):
        check_block(Block("docs/page.md", 1, language, text))


def test_blocks_are_found_wherever_they_stand() -> None:
    text = "a\n```sh\nfedsim list\n```\n\n- b\n\n  ```yaml\n  seed: 1\n  ```\n\nc\n\n    d"
    text += "\n\n- e\n\n    f"
    found = [(block.language, block.text) for block in blocks("page.md", text)]
    assert found == [("sh", "fedsim list"), ("yaml", "seed: 1"), ("indented", "    d")]
    (span,) = inline_commands("page.md", "use `fedsim\nlist attacks`, `x` \n```sh\n`pip y`\n```")
    assert span.text == "fedsim list attacks"


@pytest.mark.parametrize("page", [*PAGES, "llms.txt"])
def test_links_lead_somewhere(page: str) -> None:
    for target in links(read(page)):
        name, _, fragment = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if fragment:
            assert fragment in anchors(path.read_text(encoding="utf-8")), f"{page}: {target}"


def test_no_two_classes_of_the_tutorial_share_a_file_name() -> None:
    """The ε that its scenario asks for is refused of such folders."""
    names = re.findall(r"\w+\.jpg", read("docs/your-own-images.md").split("```")[1])
    assert len(names) > 2 and len(names) == len(set(names))


def test_the_index_leads_to_every_page() -> None:
    listed = {target.partition("#")[0] for target in links(read("docs/README.md"))}
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert listed >= pages - {"README.md"}


FILES = re.compile(r"[\w./-]+\.(py|yaml|md)\b")
MADE = {
    "README.md",
    "scenario.yaml",
    "first-layer.yaml",
    "random-mask.yaml",
    "photos.yaml",
    "TABLE.yaml",
    "my_attacks/__init__.py",
    "my_defenses/__init__.py",
}
"""Files that a user or a run makes."""


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page: str) -> None:
    """With their folders, or some of them, or by their names alone."""
    for span in all_spans(page, read(page)):
        for match in FILES.finditer(span.text):
            there = any(path.endswith(f"/{match[0]}") for path in PATHS)
            assert there or match[0] in MADE, f"{page}:{span.line}: {match[0]}"
