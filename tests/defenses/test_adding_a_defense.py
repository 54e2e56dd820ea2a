"""docs/adding-a-defense.md word by word: its defense passes its tests, its scenario is accepted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from page_package import blocks, run_tests, write_package

from fedsim.scenario.resolve import resolve

PAGE = "adding-a-defense.md"


FLAWS = [
    # A factor that keeps the mean makes updates longer than what is proven.
    ("                tensor,\n", "                tensor / self.share,\n", "proven_bound_holds"),
    ('Effect(removed="others")', "Effect()", "removed_entries_are_declared"),
    ("uniform(tensor.shape, rng)", "torch.rand(tensor.shape)", "same_stream_same_result"),
    ("        return before\n", '        return before.unproven("x")\n', "earns_no_privacy"),
]


@pytest.fixture(scope="module")
def flawed(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The suites of packages with one flaw each, run together: most of a run is its imports."""
    folder = tmp_path_factory.mktemp("flawed")
    for number, (right, wrong, _) in enumerate(FLAWS):
        write_package(PAGE, "my_defenses", folder, f"_{number}")
        module = folder / f"my_defenses_{number}" / "random_mask.py"
        source = module.read_text(encoding="utf-8")
        assert source.count(right) == 1
        module.write_text(source.replace(right, wrong), encoding="utf-8")
    return run_tests(folder)


@pytest.mark.slow
def test_the_defense_of_the_page_passes_its_suite(tmp_path: Path) -> None:
    done = run_tests(write_package(PAGE, "my_defenses", tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FLAWS)), ids=[found for _, _, found in FLAWS])
def test_the_suite_of_the_page_finds_what_is_wrong(
    number: int, flawed: subprocess.CompletedProcess[str]
) -> None:
    assert flawed.returncode == 1
    found = FLAWS[number][2]
    assert re.search(rf"FAILED tests/\S*_{number}\.py\S*{found}", flawed.stdout), flawed.stdout


def test_the_scenario_of_the_page_is_accepted() -> None:
    (block,) = blocks(PAGE, "yaml")
    document = yaml.safe_load(block)
    entry = 'random_mask = "my_defenses.random_mask:RandomMask"'
    assert f"\n{entry}\n" in blocks(PAGE, "toml")[0]
    used = {member["name"] for stack in document["defenses"].values() for member in stack}
    assert "random_mask" in used
    without = {
        name: [member for member in stack if member["name"] != "random_mask"]
        for name, stack in document["defenses"].items()
    }
    assert resolve({**document, "defenses": without}).observe.trials == 5
