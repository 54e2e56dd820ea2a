"""The site's navigation, read from docs/README.md: its headings are the groups."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path


def groups(index: str) -> dict[str, dict[str, str]]:
    """The pages under each second heading of the index, each where it is first linked as a whole.

    Of each page its name, the path from the repository's root without `.md`, and the link's words.
    """
    pages: dict[str, dict[str, str]] = {}
    listed = {"README", "docs/README"}
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        group = pages.setdefault(title.strip(), {})
        for words, link in re.findall(r"\[([^]]+)\]\(([^)#\s:]+)\.md\)", body):
            name = posixpath.normpath(f"docs/{link}")
            if name not in listed:
                group[name] = words
                listed.add(name)
    return pages


def toctrees(grouped: dict[str, dict[str, str]]) -> str:
    """The groups as Sphinx's tables of contents, which the sidebar shows; the index comes first."""
    trees = [_toctree({"docs/README": "Which page for whom"})]
    trees += [_toctree(pages, title) for title, pages in grouped.items() if pages]
    return "\n" + "\n".join(trees)


def without_folders(text: str, base: Path) -> str:
    """A page of the folder `base`: a link to a folder is its words, since a site has no folders."""

    def words(link: re.Match[str]) -> str:
        return link[1] if (base / link[2]).is_dir() else link[0]

    return re.sub(r"\[([^]]+)\]\(([^)#\s:]+)\)", words, text)


def _toctree(pages: dict[str, str], caption: str = "") -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    entries = [f"{words} </{name}>" for name, words in pages.items()]
    return "\n".join(["```{toctree}", *options, *entries, "```", ""])
