"""What a dossier consists of: chapters of plain blocks, of which each form of it sets every one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Heading:
    """Heads a part of a chapter."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Says something in sentences."""

    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Notice:
    """Warns of what the reader must not overlook."""

    kind: ClassVar[str] = "notice"
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Points:
    """Lists sentences."""

    kind: ClassVar[str] = "points"
    items: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Lists names with their values."""

    kind: ClassVar[str] = "facts"
    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Sets cells of text in rows; the first column names the row."""

    kind: ClassVar[str] = "table"
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    widths: tuple[float, ...]
    """Share of the width that each column gets; only their ratios count."""
    note: str = ""


@dataclass(frozen=True)
class Commands:
    """Shows commands, each with what it is for; a command is a sequence of quoted words."""

    kind: ClassVar[str] = "commands"
    items: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Literal:
    """Shows text as it is, line by line."""

    kind: ClassVar[str] = "literal"
    text: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Holds an image and what an attack made of it, as PNG files."""

    truth: bytes
    reconstruction: bytes
    caption: str


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Shows pairs of images."""

    kind: ClassVar[str] = "pictures"
    title: str
    pairs: tuple[Pair, ...]
    side: int
    """Width of an image on the page, in CSS pixels."""


Block = Heading | Paragraph | Notice | Points | Facts | Table | Commands | Literal | Pictures


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """Holds one numbered part of the dossier."""

    title: str
    blocks: tuple[Block, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Document:
    """Holds the whole dossier."""

    title: str
    subtitle: str
    chapters: tuple[Chapter, ...]


_WIDTH = 100
"""A line of a command has at most so many characters, if its words allow it."""


def command_lines(words: tuple[str, ...]) -> list[str]:
    r"""Breaks a command between words, with a backslash at the end of each line but the last.

    An option stays with its value.

    >>> print(*command_lines(("fedsim", "run", "a" * 50, "--set", "b" * 40)), sep="\n")
    fedsim run aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa \
      --set bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
    """
    lines = [""]
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and not word.startswith("--"):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    for word in joined:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines


def sentence(text: str) -> str:
    """Makes a sentence of `text`: a capital at its beginning, a stop at its end, no backticks."""
    text = text.replace("`", "")
    # Greek letters stay: a capital ε is another symbol.
    first = text[:1].upper() if text[:1].isascii() else text[:1]
    return f"{first}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")
