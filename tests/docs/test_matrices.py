"""The matrices of all attacks and all defenses have a line for each plugin that fedsim brings."""

from __future__ import annotations

import re

import pytest
from doc_pages import read

from fedsim.contracts import plugins
from fedsim.contracts.attack import Attack
from fedsim.contracts.grant import Grant


def read_lines(page: str) -> dict[str, str]:
    """Returns the lines of a page's matrices by the plugin that they name, joined where several."""
    lines: dict[str, str] = {}
    for line in read(page).partition("\n## What stops what")[0].splitlines():
        if named := re.match(r"\| `(\w+)`", line):
            lines[named[1]] = f"{lines.get(named[1], '')}{line}\n"
    return lines


@pytest.mark.parametrize("kind", ["attacks", "defenses"])
def test_each_plugin_has_a_line_and_each_line_a_plugin(kind: str) -> None:
    ours = [each for each in plugins.list_installed(f"fedsim.{kind}") if each.package == "fedsim"]
    assert read_lines(f"docs/{kind}.md").keys() == {plugin.name for plugin in ours}


def test_a_line_names_all_that_its_attack_must_be_granted() -> None:
    least = Grant.least()
    lines = read_lines("docs/attacks.md")
    for plugin in plugins.list_installed("fedsim.attacks"):
        if plugin.package != "fedsim" or plugin.cls is None:
            continue
        assert issubclass(plugin.cls, Attack)
        for name, value in plugin.cls.needs:
            if value != getattr(least, name):
                assert f"`{name}: {value}`" in lines[plugin.name], (plugin.name, name, value)
