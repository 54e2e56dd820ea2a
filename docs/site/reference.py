"""What the site says of commands, plugins and functions, written from the program itself."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import typer
from click import Command, Context, Group, Parameter
from pydantic import BaseModel

import fedsim
from fedsim.cli.commands import Kind, app
from fedsim.contracts import listing
from fedsim.contracts.plugins import parameters

RESULTS = ("fedsim.results.record.Run", "fedsim.types.Observation", "fedsim.types.Reconstruction")
"""What the functions return, in the order of the page."""

LONGEST_DEFAULT = 40
"""Characters of a default that fit into its column; longer are only those of whole sections."""


def commands() -> str:
    """Every command: its usage, its help, its options."""
    program = typer.main.get_command(app)
    return "\n".join(_commands(program, Context(program, info_name="fedsim")))


def _commands(command: Command, context: Context) -> Iterator[str]:
    if isinstance(command, Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            if not inner.hidden:
                yield from _commands(inner, Context(inner, parent=context, info_name=name))
        return
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"## {context.command_path}\n\n```text\n{usage}\n```\n"
    yield f"{prose(inspect.cleandoc(command.help or ''))}\n"
    options = [option for option in command.params if option.param_type_name == "option"]
    yield table(("option", "what it does"), (_option(each, context) for each in options))


def _option(option: Parameter, context: Context) -> tuple[str, str]:
    """Its names and its help, as the command itself prints them."""
    names, text = option.get_help_record(context) or (", ".join(option.opts), "")
    return f"`{names.strip()}`", prose(text.replace("\\[", "["))  # typer escapes it for rich


def plugins() -> str:
    """What fedsim brings of each kind: name, summary, source, parameters."""
    parts = []
    for kind in Kind:
        parts.append(f"## {kind.value.capitalize()}\n")
        parts += [_plugin(row) for row in listing.rows([kind.value]) if row["package"] == "fedsim"]
    return "\n".join(parts)


def _plugin(row: dict[str, Any]) -> str:
    lines = [f"### {row['name']}\n", f"{prose(row['summary'])}\n"]
    if row["paper"]:
        lines.append(f"Source: {prose(row['paper'])}.\n")
    return "\n".join([*lines, _fields(row["parameters"])])


def _fields(found: Sequence[dict[str, Any]]) -> str:
    """A table of parameters; the type and the range stand before what one means."""
    return table(
        ("parameter", "default", "meaning"),
        ((f"`{each['name']}`", _default(each), _meaning(each)) for each in found),
    )


def _default(parameter: dict[str, Any]) -> str:
    text = json.dumps(parameter["default"], ensure_ascii=False)
    if parameter["required"]:
        return "required"
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else "those of its keys"


def _meaning(parameter: dict[str, Any]) -> str:
    kind, allowed = parameter["type"], parameter["range"]
    if allowed.startswith((">", "<")):
        kind += " " + re.sub(r"([<>]=?) ", "\\1\N{NO-BREAK SPACE}", allowed)
    elif allowed:
        kind = f"one of {allowed}"
    return prose(": ".join(filter(None, (kind, parameter["description"]))))


def python() -> str:
    """The public names of `fedsim`, and the classes of what they return."""
    parts = []
    for name in fedsim.__all__:
        thing = getattr(fedsim, name)
        if inspect.isclass(thing) and issubclass(thing, BaseModel):
            found = [vars(each) for each in parameters(thing)]
            parts += [f"## fedsim.{name}\n", f"{prose(inspect.getdoc(thing) or '')}\n"]
            parts.append(_fields(found))
        else:
            parts.append(f"## fedsim.{name}\n\n{_rst(f'autofunction:: fedsim.{name}')}")
    for path in RESULTS:
        parts.append(f"## {path}\n\n{_rst(f'autoclass:: {path}()', ':members:')}")
    return "\n".join(parts)


def _rst(directive: str, *options: str) -> str:
    body = "\n".join([f".. {directive}", *(f"   {each}" for each in options)])
    return f"```{{eval-rst}}\n{body}\n```\n"


def prose(text: str) -> str:
    """Text of the program as Markdown: spans of code stay, every other sign is meant as it is."""
    parts = re.split(r"(`[^`]+`)", text)
    plain = [re.sub(r"([\\`*_{}\[\]<>|#$~])", r"\\\1", part) for part in parts[::2]]
    parts[::2] = plain
    return "".join(parts)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; without rows, nothing."""
    lines = [[re.sub(r"\s*\n\s*", " ", cell) for cell in row] for row in rows]
    if not lines:
        return ""
    ruled = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(_unpiped(cell) for cell in row)} |\n" for row in ruled)


def _unpiped(cell: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", cell)
