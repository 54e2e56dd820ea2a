"""What is installed, as `fedsim list` shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fedsim.contracts import plugins

Row = dict[str, Any]


def rows(kinds: Sequence[str]) -> list[Row]:
    """Every plugin of `kinds` (such as `attacks`; see `plugins.GROUPS`), also broken ones.

    A row has kind, name, package, version, summary, paper, parameters (name, type, default,
    required, range, description) and error (None, or why the plugin cannot be used).
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
        for plugin in plugins.installed(f"fedsim.{kind}")
    ]


def render(found: Sequence[Row]) -> str:
    """`found` as text for a terminal."""
    blocks: list[str] = []
    kind = None
    for row in found:
        if row["kind"] != kind:
            kind = row["kind"]
            blocks.append(kind.upper())
        blocks.append("\n".join(_block(row)))
    return "\n\n".join(blocks) + "\n"


def _block(row: Row) -> list[str]:
    lines = [f"{row['name']}  ({row['package']} {row['version']})"]
    if row["error"]:
        return [*lines, f"    BROKEN: {row['error']}"]
    lines += [f"    {text}" for text in (row["summary"], row["paper"]) if text]
    return [*lines, *key_table(row["parameters"])]


def key_table(parameters: Sequence[Row]) -> list[str]:
    """Parameters as aligned lines of text: name, default, type and range, description."""
    table = [_parameter(parameter) for parameter in parameters]
    widths = [max(len(cells[column]) for cells in table) for column in range(3)] if table else []
    lines = []
    for cells in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append(f"      {'  '.join([*padded, *cells[3:]])}".rstrip())
    return lines


def _parameter(parameter: Row) -> tuple[str, str, str, str]:
    default = "required" if parameter["required"] else f"= {json.dumps(parameter['default'])}"
    kind = f"{parameter['type']}: {parameter['range']}".removesuffix(": ")
    return parameter["name"], default, kind, parameter["description"]
