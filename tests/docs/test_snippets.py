"""Every block of code and every command of the pages is tried, as it is written.

What takes seconds is executed. What takes minutes is parsed down to the scenario that it resolves,
and executed with --run-slow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doc_checks import (
    SCHEMATIC,
    Workplace,
    check_block,
    concrete,
    execute,
    is_slow,
    is_slow_command,
    pictures,
    prepare,
)
from doc_pages import PAGES, ROOT, Block, anchors, blocks, commands, inline_commands, links, read
from doc_pages import spans as all_spans

from fedsim.contracts import plugins

BLOCKS = {page: blocks(page, read(page)) for page in PAGES}
INLINE = {page: inline_commands(page, read(page)) for page in PAGES}
TRIED = [block for page in PAGES for block in (*BLOCKS[page], *INLINE[page])]
PATHS = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("fedsim", "attacks", "defenses", "benchmarks", "scenarios", "tests", "docs")
    for path in (ROOT / folder).rglob("*.*")
]
LIMIT = 120.0
"""Seconds after which a command that is still at work is ended."""


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[Block]], Workplace]]:
    yield lambda page: Workplace(tmp_path, page, monkeypatch)
    plugins._entry_points.cache_clear()


Placing = Callable[[list[Block]], Workplace]


def test_the_pages_have_what_is_tried() -> None:
    assert len(PAGES) > 15
    assert len(TRIED) > 80
    assert {block.language for block in TRIED} >= {"python", "yaml", "toml", "sh", "inline"}


@pytest.mark.parametrize("block", TRIED, ids=str)
def test_what_a_page_shows_works(block: Block, place: Placing) -> None:
    check_block(block, place(BLOCKS[block.page]))


SLOW = {
    command.text: (block, command)
    for block in reversed(TRIED)
    if block.language in ("sh", "console", "inline")
    for written in commands(block)
    for command in concrete(written)
    if is_slow_command(command.text)
}
"""Each command once, as the first page has it."""


@pytest.mark.slow
@pytest.mark.parametrize("text", SLOW, ids=lambda text: text.replace("scenarios/", "")[:60])
def test_what_takes_minutes_runs_as_it_is_written(text: str, place: Placing) -> None:
    block, command = SLOW[text]
    workplace = place(BLOCKS[block.page])
    pictures(workplace.folder / "cifar10-images.zip")
    if not prepare(text, workplace, LIMIT):
        pytest.skip(f"reads the files of a run that takes more than {LIMIT:g} s")
    execute(text, command.output, workplace.folder, LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block in TRIED if block.language == "python" and is_slow(block)], ids=str
)
def test_python_that_takes_minutes_runs_as_it_is_written(block: Block, place: Placing) -> None:
    workplace = place(BLOCKS[block.page])
    (workplace.folder / "snippet.py").write_text(block.text, encoding="utf-8")
    execute("python snippet.py", None, workplace.folder, LIMIT)


def test_every_schematic_command_is_written_somewhere() -> None:
    shell = [block for block in TRIED if block.language in ("sh", "inline", "console")]
    written = {command.text for block in shell for command in commands(block)}
    assert set(SCHEMATIC) <= written


RECORDINGS = "runs/quickstart/observations/none"
BROKEN = {
    "wrong flag": ("sh", "fedsim run scenarios/quickstart.yaml --rounds 3", "--rounds"),
    "missing file": ("sh", "fedsim run scenarios/quick.yaml", "quick.yaml"),
    "wrong key": ("sh", "fedsim run scenarios/quickstart.yaml --set training.round=3", "rounds"),
    "wrong value": ("sh", "fedsim run scenarios/quickstart.yaml --set seed=x", "seed"),
    "wrong command": ("sh", "fedsim runs scenarios/quickstart.yaml", "No such command"),
    "wrong command in a sentence": ("inline", "fedsim chekc", "No such command"),
    "second of a line": ("sh", "fedsim list && fedsim lists", "No such command"),
    "unknown attack": (
        "sh",
        f"fedsim attack {RECORDINGS}/round-0001/client-0000-b1-t0.json --attack inverting",
        "inverting_gradients",
    ),
    "unknown grant": (
        "sh",
        f"fedsim attack {RECORDINGS}/round-0001/client-0000-b1-t0.json --attack idlg --grant x=y",
        "labels",
    ),
    "recording that no run leaves": (
        "sh",
        f"fedsim attack {RECORDINGS}/round-0002/client-0000-b1-t0.json --attack deep_leakage",
        "round-0002",
    ),
    "folder that no run fills": ("sh", "fedsim leaderboard runs/quick", "no scenario"),
    "wrong format": ("sh", "fedsim leaderboard runs/quickstart --format xml", "xml"),
    "wrong key of a mechanism": (
        "sh",
        "fedsim privacy delta gaussian scale=1 --epsilon 1",
        "scale",
    ),
    "other output": (
        "console",
        "$ fedsim privacy delta gaussian sensitivity=1 sigma=2 --epsilon 1\nδ = 0.1",
        "the page shows",
    ),
    "no command": ("sh", "# nothing", "no command"),
    "wrong flag of a benchmark": ("sh", "python benchmarks/privacy.py speed --pts 3", "refused"),
    "missing benchmark": ("sh", "python benchmarks/private.py speed", "no such script"),
    "missing scenario of a benchmark": (
        "sh",
        "python benchmarks/planting.py scenarios/table2.yaml",
        "scenarios/table2.yaml",
    ),
    "unknown extra": ("sh", "pip install '.[tests]'", "tests"),
    "missing test": ("inline", "pytest tests/test_nothing.py", "test_nothing"),
    "unknown program": ("sh", "fedsims run scenarios/quickstart.yaml", "unknown program"),
    "wrong section": ("yaml", "trainings: {rounds: 3}", "training"),
    "wrong key of a section": ("yaml", "training: {round: 3}", "rounds"),
    "unknown defense": ("yaml", "defenses: {noise: [gaussian_noises]}", "gaussian_noise"),
    "scenario without attacks": ("yaml", "name: x\ndata: {source: digits}", "attacks"),
    "wrong import": ("python", "from fedsim import runs", "runs"),
    "wrong import of a long one": ("python", "from fedsim import runs\nfedsim.run('x')", "runs"),
    "wrong argument of a long one": ("python", "import fedsim\nfedsim.run('x', o=1)", "'o'"),
    "wrong attribute of a long one": ("python", "import fedsim\nfedsim.run('x').y(fedsim.z)", "z"),
    "wrong result": ("python", ">>> 1 + 1\n3", "Got"),
    "unknown group": ("toml", '[project.entry-points."fedsim.attack"]\nx = "y:Z"', "fedsim.attack"),
    "unknown language": ("bash", "fedsim list", "unknown language"),
    "code without a fence": ("indented", "    fedsim list", "unknown language"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_found(name: str, place: Placing) -> None:
    language, text, told = BROKEN[name]
    with pytest.raises(Exception, match=re.escape(told)):
        check_block(Block("docs/page.md", 1, language, text), place([]))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("class Laplace(KnownMechanism):\n    curve = LaplaceCurves", "not in class Laplace"),
        ("class Laplaces(KnownMechanism):\n    curve = LaplaceCurve", "no class Laplaces"),
    ],
)
def test_a_class_that_is_quoted_wrongly_is_found(said: str, told: str, place: Placing) -> None:
    with pytest.raises(AssertionError, match=told):
        check_block(Block("docs/privacy-calculator.md", 1, "python", said), place([]))


def test_blocks_are_found_wherever_they_stand() -> None:
    text = "a\n```sh\nfedsim list\n```\n\n- b\n\n  ```yaml\n  seed: 1\n  ```\n\nc\n\n    d"
    text += "\n\n- e\n\n    f"
    found = [(block.language, block.text) for block in blocks("page.md", text)]
    assert found == [("sh", "fedsim list"), ("yaml", "seed: 1"), ("indented", "    d")]
    (span,) = inline_commands("page.md", "use `fedsim\nlist attacks`, `x` \n```sh\n`pip y`\n```")
    assert span.text == "fedsim list attacks"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in links(read(page)):
        name, _, fragment = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if fragment:
            assert fragment in anchors(path.read_text(encoding="utf-8")), f"{page}: {target}"


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
