"""docs/adding-an-attack.md word by word: its attack passes its tests, its scenario is accepted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedsim.scenario.resolve import resolve

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "adding-an-attack.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for block in blocks("python"):
        name = block.partition("\n")[0].removeprefix("# ")
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(block, encoding="utf-8")
    (tmp_path / "my_attacks" / "__init__.py").touch()
    return tmp_path


def run_tests(package: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=package,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_the_attack_of_the_page_passes_its_suite(package: Path) -> None:
    done = run_tests(package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout)


def test_the_suite_of_the_page_finds_what_is_wrong(package: Path) -> None:
    module = package / "my_attacks" / "first_layer.py"
    source = module.read_text(encoding="utf-8")
    assert ".clamp(0, 1)" in source
    module.write_text(source.replace(".clamp(0, 1)", " + torch.rand(1)"), encoding="utf-8")
    done = run_tests(package)
    assert done.returncode == 1
    for found in ("shape_and_range", "same_seed_same_result", "global_random_streams"):
        assert re.search(rf"FAILED .*{found}", done.stdout), done.stdout


def test_the_scenario_of_the_page_is_accepted() -> None:
    (block,) = blocks("yaml")
    document = yaml.safe_load(block)
    (name,) = document["attacks"]
    assert f'\n{name} = "my_attacks.first_layer:FirstLayer"' in blocks("toml")[0]
    assert resolve({**document, "attacks": []}).observe.trials == 10
