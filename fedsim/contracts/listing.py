"""Lists the installed plugins, as `fedsim list` shows them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fedsim.contracts import plugins

Row = dict[str, Any]


def rows(kinds: Sequence[str]) -> list[Row]:
    """Returns a dictionary for each installed plugin of `kinds` (`attacks`), broken or not.

    They follow the order of `kinds`, then names. Keys are kind, name, package, version, summary,
    paper, parameters (a list, each with the fields of `plugins.Parameter`) and error (None, or why
    the plugin cannot be used). An unknown kind is a PluginError.
    """
    return [
        {
            "kind": kind,
            "name": plugin.name,
            "package": plugin.package,
            "version": plugin.version,
            "summary": plugin.summary,
            "paper": plugin.cls.paper if plugin.cls else "",
            "parameters": [asdict(parameter) for parameter in plugin.parameters],
            "error": plugin.error,
        }
        for kind in kinds
        for plugin in plugins.list_installed(f"fedsim.{kind}")
    ]


def render(found: Sequence[Row], width: int = 80) -> str:
    """Renders what `rows` returned as text for a terminal, its lines at most `width` characters."""
    blocks: list[str] = []
    kind = None
    for row in found:
        if row["kind"] != kind:
            kind = row["kind"]
            blocks.append(kind.upper())
        blocks.append("\n".join(_block(row, width)))
    return "\n\n".join(blocks) + "\n"


def _block(row: Row, width: int) -> list[str]:
    lines = wrap_text(f"{row['name']}  ({row['package']} {row['version']})", width, 0)
    if row["error"]:
        return [*lines, *wrap_text(f"BROKEN: {row['error']}", width, 4)]
    for text in filter(None, (row["summary"], row["paper"])):
        lines += wrap_text(text, width, 4)
    return [*lines, *key_table(row["parameters"], width)]


def key_table(parameters: Sequence[Row], width: int = 80) -> list[str]:
    """Renders the `parameters` of one row of `rows` as lines of at most `width` characters."""
    table = []
    for each in parameters:
        default = "required" if each["required"] else f"= {json.dumps(each['default'])}"
        kind = f"{each['type']}: {each['range']}".removesuffix(": ")
        table.append((each["name"], default, kind, each["description"]))
    names, defaults = (max((len(cells[i]) for cells in table), default=0) for i in (0, 1))
    lines = []
    for name, default, kind, description in table:
        head = f"{name.ljust(names)}  {default.ljust(defaults)}  {kind}"
        # Where the aligned columns do not fit, this line goes without them.
        if len(head) + 6 > width:
            head = f"{name}  {default}  {kind}"
        lines += wrap_text(head, width, 6)
        lines += wrap_text(description, width, 10)
    return lines


def wrap_text(text: str, width: int, indent: int) -> list[str]:
    """Wraps `text` to lines of `width` characters, none if it is empty.

    They are indented by `indent` spaces, and by 2 more from the second on.
    """
    return textwrap.wrap(
        text.rstrip(),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_on_hyphens=False,
    )
