"""Every long file of the product says in docs/architecture.md why it is one, and no other does."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONG = 200
"""Lines from which on a file has to say why it is one."""


def test_every_long_file_says_why_it_is_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## Long files")[2].partition("\n## ")[0]
    named: set[str] = set()
    for line in section.splitlines():
        if line.startswith("| `"):
            files = re.findall(r"`([^`]+\.py)`", line.split("|")[1])
            folder = files[0].rpartition("/")[0]
            named |= {file if "/" in file else f"{folder}/{file}".strip("/") for file in files}
    long = {
        str(path.relative_to(ROOT / room))
        for room in ("fedsim", "attacks", "defenses")
        for path in (ROOT / room).rglob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) > LONG
    }
    assert sorted(long - named) == []
    assert sorted(named - long) == []
