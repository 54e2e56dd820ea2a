"""What pages say of commands, plugins and functions, written from the program itself.

`python docs/site/reference.py` writes the tables that stand in the pages; the site has the rest.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import typer
from click import Command, Context, Group, Parameter
from pydantic import BaseModel

import fedsim
from fedsim.cli.commands import Kind, app
from fedsim.contracts import listing
from fedsim.contracts.plugins import parameters
from fedsim.report.glossary import terms

RESULTS = ("fedsim.results.record.Run", "fedsim.types.Observation", "fedsim.types.Reconstruction")
"""What the functions return, in the order of the page."""

WITH_A_PAGE = {"attacks", "defenses", "mechanisms"}
"""Kinds of plugins whose tables are docs/attacks.md, defenses.md and privacy-calculator.md."""

LONGEST_DEFAULT = 40
"""Characters of a default that fit into its column; longer are only those of whole sections."""


def commands() -> str:
    """Every command: its usage, its help, its options."""
    return "\n".join(part for found in _commands() for part in _command(*found))


def commands_in_short() -> str:
    """Every command, with the first sentence of its help."""
    return table(
        ("command", "what it does"),
        ((f"`{context.command_path}`", _first(command.help)) for command, context in _commands()),
    )


def _commands(within: tuple[Command, Context] | None = None) -> Iterator[tuple[Command, Context]]:
    """Yields each command that is no group."""
    if within is None:
        program = typer.main.get_command(app)
        within = program, Context(program, info_name="fedsim")
    command, context = within
    if not isinstance(command, Group):
        yield within
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        if not inner.hidden:
            yield from _commands((inner, Context(inner, parent=context, info_name=name)))


def _command(command: Command, context: Context) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"## {context.command_path}\n\n```text\n{usage}\n```\n"
    yield f"{prose(inspect.cleandoc(command.help or ''))}\n"
    options = [option for option in command.params if option.param_type_name == "option"]
    yield table(("option", "what it does"), (_option(each, context) for each in options))


def _first(text: str | None) -> str:
    """The first sentence of a help or a docstring."""
    whole = re.sub(r"\s+", " ", inspect.cleandoc(text or "").partition("\n\n")[0])
    return prose(re.split(r"(?<=[^.]\.) (?=[A-Z`])", whole)[0])


def _option(option: Parameter, context: Context) -> tuple[str, str]:
    """Its names and its help, as the command itself prints them."""
    names, text = option.get_help_record(context) or (", ".join(option.opts), "")
    return f"`{names.strip()}`", prose(text.replace("\\[", "["))  # typer escapes it for rich


def plugins() -> str:
    """What fedsim brings of each kind: name, summary, source, parameters."""
    parts = []
    for kind in get_args(Kind):
        parts.append(f"## {kind.capitalize()}\n")
        parts += [_plugin(row) for row in listing.rows([kind]) if row["package"] == "fedsim"]
    return "\n".join(parts)


def plugins_in_short() -> str:
    """What fedsim brings of each kind that has no page with a table of its own."""
    parts = []
    for kind in get_args(Kind):
        if kind in WITH_A_PAGE:
            continue
        own = [row for row in listing.rows([kind]) if row["package"] == "fedsim"]
        listed = ((f"`{row['name']}`", prose(row["summary"])) for row in own)
        parts.append(f"**{kind.capitalize()}**\n\n{table(('name', 'what it is'), listed)}")
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


def glossary() -> str:
    """The terms that a page of runs explains."""
    return table(
        ("term", "meaning"),
        ((f"**{prose(term.name)}**", prose(term.meaning)) for term in terms().values()),
    )


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


def python_in_short() -> str:
    """The public names of `fedsim`, with the first sentence of each."""
    return table(
        ("name", "what it is"),
        (
            (f"`fedsim.{name}`", _first(inspect.getdoc(getattr(fedsim, name))))
            for name in fedsim.__all__
        ),
    )


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
    head, *body = (f"| {' | '.join(map(_unpiped, row))} |\n" for row in [heads, *lines])
    return "".join([head, "|" + "---|" * len(heads) + "\n", *body])


def _unpiped(cell: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", cell)


IN_SHORT: Mapping[str, Callable[[], str]] = {
    "docs/commands.md": commands_in_short,
    "docs/plugins.md": plugins_in_short,
    "docs/python.md": python_in_short,
}
"""Page -> what stands in it below `HEADING`, for who reads it where there is no site."""
HEADING = "## In short\n\n"


def in_short(page: str, text: str) -> str:
    """The text of a page with the table of today."""
    return text.partition(HEADING)[0].rstrip() + f"\n\n{HEADING}{IN_SHORT[page]()}"


if __name__ == "__main__":
    for name in IN_SHORT:
        path = Path(__file__).parents[2] / name
        path.write_text(in_short(name, path.read_text(encoding="utf-8")), encoding="utf-8")
