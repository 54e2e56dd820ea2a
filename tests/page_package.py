"""The package that a page of the docs writes file by file, and its tests, run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of `language` of docs/`page`, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def write_package(page: str, package: str, folder: Path, suffix: str = "") -> Path:
    """Writes each Python block of `page` to the file that its first line names, and an `__init__`
    of `package`; returns `folder`. With a `suffix` to its name and those of its tests, the package
    stands beside others of the page."""
    for block in blocks(page, "python"):
        name = block.partition("\n")[0].removeprefix("# ")
        path = folder / name.replace(package, package + suffix)
        if path.parent.name == "tests":
            path = path.with_stem(path.stem + suffix)
        path.parent.mkdir(exist_ok=True)
        path.write_text(block.replace(package, package + suffix), encoding="utf-8")
    (folder / (package + suffix) / "__init__.py").touch()
    return folder


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
