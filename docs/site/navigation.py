"""The site's navigation, read from docs/README.md: its headings are the groups."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path


def groups(index: str) -> dict[str, list[str]]:
    """The pages under each second heading of the index, each where it is first linked as a whole.

    A page's name is its path from the repository's root, without `.md`.
    """
    pages: dict[str, list[str]] = {}
    listed = {"README", "docs/README"}
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        links = re.findall(r"\]\(([^)#\s]+)\.md\)", body)
        names = dict.fromkeys(posixpath.normpath(f"docs/{link}") for link in links)
        pages[title.strip()] = [name for name in names if name not in listed]
        listed.update(names)
    return pages


def toctrees(grouped: dict[str, list[str]]) -> str:
    """The groups as Sphinx's tables of contents, which the sidebar shows; the index comes first."""
    trees = [_toctree(["docs/README"])]
    trees += [_toctree(names, title) for title, names in grouped.items() if names]
    return "\n" + "\n".join(trees)


def without_folders(text: str, base: Path) -> str:
    """A page of the folder `base`, in which a link to a folder is its words: a site has no folders.

    Of a folder of tables, the words are followed by a link to each.
    """

    def words(link: re.Match[str]) -> str:
        folder = base / link[2]
        if not folder.is_dir():
            return link[0]
        tables = sorted(folder.glob("*.csv"))
        links = ", ".join(f"[{each.name}]({link[2].rstrip('/')}/{each.name})" for each in tables)
        return f"{link[1]} ({links})" if links else link[1]

    return re.sub(r"\[([^]]+)\]\(([^)#\s:]+)\)", words, text)


def _toctree(names: list[str], caption: str = "") -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, *(f"/{name}" for name in names), "```", ""])
