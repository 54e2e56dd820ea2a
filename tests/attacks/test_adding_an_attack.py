"""docs/adding-an-attack.md word by word: its attack passes its tests, its scenario is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from page_package import blocks, run_tests, write_package

from fedsim.scenario.resolve import resolve

PAGE = "adding-an-attack.md"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(PAGE, "my_attacks", tmp_path)


@pytest.mark.slow
def test_the_attack_of_the_page_passes_its_suite(package: Path) -> None:
    done = run_tests(package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout)


@pytest.mark.slow
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
    (block,) = blocks(PAGE, "yaml")
    document = yaml.safe_load(block)
    (name,) = document["attacks"]
    assert f'\n{name} = "my_attacks.first_layer:FirstLayer"' in blocks(PAGE, "toml")[0]
    assert resolve({**document, "attacks": []}).observe.trials == 10
