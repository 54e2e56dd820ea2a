"""What a Markdown page holds that can be tried: blocks of code, commands, links, paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "AGENTS.md"),
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
PROGRAMS = {"fedsim", "python", "pytest", "pip", "bash", "ruff", "mypy", "sphinx-build"}


@dataclass(frozen=True)
class Block:
    """A piece of code that a page shows."""

    page: str
    line: int
    language: str
    """What its fence says; `indented` of code without a fence, `inline` of a span in a sentence."""
    text: str

    def __str__(self) -> str:
        """Where it stands."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line that a reader may type, and the output that the page shows below it, if any."""

    text: str
    output: str | None = None


def read(page: str) -> str:
    """The text of a page of the project."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, text: str) -> list[Block]:
    """Every fenced or indented block of code, in order."""
    found, fence, start, before, in_list = [], None, 0, "", False
    body: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        opened = re.match(r"( *)```(\S*)$", line)
        if fence is not None and opened:
            inside = "\n".join(each.removeprefix(fence[0]) for each in body)
            found.append(Block(page, start, fence[1], inside))
            fence = None
        elif fence is not None:
            body.append(line)
        elif opened:
            fence, start, body = (opened[1], opened[2]), number, []
        elif line.startswith("    ") and not before and not in_list:
            found.append(Block(page, number, "indented", line))
        elif line and not line.startswith(" "):
            in_list = bool(re.match(r"[-*] |\d+\. ", line))
        before = line.strip()
    assert fence is None, f"{page}:{start}: a fence that is not closed"
    return found


def prose(text: str) -> str:
    """A page without its fenced blocks, as many lines long."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    return re.sub(r"^ *```.*?^ *```$", blank, text, flags=re.DOTALL | re.MULTILINE)


def spans(page: str, text: str) -> Iterator[Block]:
    """Every span of code within a sentence; one may go on in the next line."""
    sentences = prose(text)
    for match in re.finditer(r"`([^`]+)`", sentences):
        line = 1 + sentences[: match.start()].count("\n")
        inside = re.sub(r"\s+", " ", match[1]).replace(r"\|", "|")
        yield Block(page, line, "inline", inside)


def inline_commands(page: str, text: str) -> list[Block]:
    """The spans that are commands."""
    found = [(span, span.text.split(" ")) for span in spans(page, text)]
    return [span for span, words in found if len(words) > 1 and words[0] in PROGRAMS]


def commands(block: Block) -> list[Command]:
    """The commands of a block of shell, of a console with its output, or of a span."""
    joined = re.sub(r"\\\n\s*", "", block.text)
    if block.language == "console":
        parts = re.split(r"^\$ ", joined, flags=re.MULTILINE)
        assert not parts[0].strip(), f"{block}: output before any command"
        told = [part.partition("\n") for part in parts[1:]]
        return [Command(text, output) for text, _, output in told]
    lines = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.split("\n")]
    return [Command(part.strip()) for line in lines if line for part in line.split("&&")]


def anchors(text: str) -> set[str]:
    """The fragments that the headings of a page make, as the usual renderers do."""
    titles = re.findall(r"^#+ (.+)$", prose(text), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def links(text: str) -> list[str]:
    """The targets of links and pictures, those on the web left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [target for target in found if "://" not in target]
