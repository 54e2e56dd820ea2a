"""Every fault of `mutations.py`, put back, is caught by fast tests."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutate import Mutation
from mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
PACKAGES = {"fedsim": "fedsim", "fedsim_attacks": "attacks", "fedsim_defenses": "defenses"}
FILES = ("tests", "docs", "scenarios", "pyproject.toml", "README.md", "constraints.txt")

by_name = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)


def test_each_mutation_applies_once_and_its_tests_are_there() -> None:
    texts = {m.file: (ROOT / m.file).read_text(encoding="utf-8") for m in MUTATIONS}
    trees = {file: ast.parse(text) for file, text in texts.items() if file.endswith(".py")}
    for mutation in MUTATIONS:
        if mutation.file in trees:
            mutation.locate(trees[mutation.file])
        else:
            assert mutation.apply(texts[mutation.file]) != texts[mutation.file]
        for test in mutation.tests:
            assert (ROOT / test.partition("::")[0]).exists()


@pytest.mark.by_hand
@by_name
def test_the_mutation_is_killed(mutation: Mutation, tmp_path: Path) -> None:
    copy = tmp_path / "project"
    _copy(copy)
    changed = copy / mutation.file
    text = changed.read_text(encoding="utf-8")
    changed.write_text(mutation.apply(text), encoding="utf-8")
    done = _pytest(copy, mutation.tests)
    said = done.stdout[-4000:]
    assert done.returncode != 0, f"survived: {mutation.name}"
    # A source that no longer imports proves nothing of the tests.
    assert done.returncode == 1 and " failed" in said, said


@pytest.mark.by_hand
def test_without_a_mutation_the_copy_passes(tmp_path: Path) -> None:
    """Or else every mutation would count as killed."""
    copy = tmp_path / "project"
    _copy(copy)
    tests = sorted({test for mutation in MUTATIONS for test in mutation.tests})
    done = _pytest(copy, tests)
    assert done.returncode == 0, done.stdout[-4000:]


def _copy(to: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
    for name in (*PACKAGES.values(), *FILES):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=ignored)
        else:
            shutil.copy(source, to / name)
    (to / "packages").mkdir()
    for package, folder in PACKAGES.items():
        (to / "packages" / package).symlink_to(to / folder)


def _pytest(copy: Path, tests: tuple[str, ...] | list[str]) -> subprocess.CompletedProcess[str]:
    # The copy's packages come before the installed ones, in children too.
    environment = {**os.environ, "PYTHONPATH": str(copy / "packages")}
    options = ["-q", "-x", "-n0", "-p", "no:cacheprovider", "--run-slow", "-m", "not by_hand"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
