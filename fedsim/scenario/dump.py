"""Writes a resolved scenario as YAML that loads to an equal one."""

from __future__ import annotations

import re

import yaml

from fedsim.scenario.model import Scenario
from fedsim.scenario.resolve import as_written


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 would read as a number, as well as YAML 1.1's."""

    def ignore_aliases(self, data: object) -> bool:
        # Anchors would make the text depend on which equal values are one object.
        return True


# PyYAML asks the resolvers of a text's first character, hence the list below the pattern.
_Dumper.add_implicit_resolver(
    "fedsim:number",
    re.compile(r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    list("-+.0123456789"),
)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML escapes line separators and the like only within double quotes.
    plain = all(character.isprintable() or character == "\n" for character in text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def dump(scenario: Scenario) -> str:
    """Returns the scenario as YAML, in the order of the model. Same scenario, same text.

    The text of a resolved scenario loads to an equal scenario, under YAML 1.1 readers too.
    """
    return yaml.dump(
        as_written(scenario), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
