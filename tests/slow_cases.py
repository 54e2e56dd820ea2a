"""Parameters of a test of which only some are worth the seconds that each takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def slow_but(quick: Iterable[str], cases: Iterable[str] | Mapping[str, Any]) -> list[Any]:
    """Returns each of `cases` under its name as a parameter, slow unless it is in `quick`."""
    kept = set(quick)
    named = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    assert kept <= set(named), f"no such cases: {kept - set(named)}"
    return [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (name not in kept))
        for name, case in named.items()
    ]
