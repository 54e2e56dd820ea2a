"""One meaning, one name: the rule sheet of names as far as a program can ask for it."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_type_name_means_one_thing_in_the_product() -> None:
    places = collections.defaultdict(list)
    for room in ("fedsim", "attacks", "defenses"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
