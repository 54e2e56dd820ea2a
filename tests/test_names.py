"""One meaning, one name: the rule sheet of names as far as a program can ask for it."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_type_name_means_one_thing_in_the_product() -> None:
    """Classes and, beside a class, aliases such as `Side = Literal[...]`."""
    classes, aliases = collections.defaultdict(list), collections.defaultdict(list)
    for room in ("fedsim", "attacks", "defenses"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(str(path.relative_to(ROOT)))
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    aliases[node.targets[0].id].append(str(path.relative_to(ROOT)))
    places = {name: paths + aliases.get(name, []) for name, paths in classes.items()}
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
