"""What a line of the leaderboard is of: content, and neither names nor the order of arguments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import answer_rows
import pytest
import torch

import fedsim
from fedsim.report import leaderboard_rows
from fedsim.report.content import Content
from fedsim.report.page import html_of
from fedsim.report.row import LeaderboardRow
from fedsim.results.reading import load_runs, measurements
from fedsim.scenario import expand
from fedsim.training.source import digest_of_inputs, load_dataset

Row = dict[str, Any]

METRICS = {"psnr": 12.0, "ssim": 0.2, "label_accuracy": 0.5}


def row(trial: int = 0, victim: str = "a", psnr: float = 12.0, **other: Any) -> Row:
    made = answer_rows.trial(psnr, trial=trial, defense="none")
    return made | {
        "scenario": "ward",
        "metrics": {**METRICS, "psnr": psnr},
        "baseline": {"name": "mean_image", **METRICS, "psnr": 10.0},
        "control": None,
        "observation": None,
        "utility": None,
        "privacy": None,
        "victims": [f"{victim}{trial}"],
        "cost": {"seconds": 1.0},
        **other,
    }


def written(
    folder: Path, rows: Sequence[Row], *, seed: int | None = 3, origin: str = "", **scenario: Any
) -> Path:
    """A run's folder; without a seed as of an assessment, which has no scenario."""
    answer_rows.save(folder, list(rows))
    if seed is not None:
        text = {"name": "ward", "seed": seed, "data": {"clients": 2}, **scenario}
        (folder / "scenario.yaml").write_text(json.dumps(text))
    (folder / "record.json").write_text(json.dumps({"scenario": "ward"}))
    if origin:
        plan = {"scenario": "ward", "variant": {}, "rounds": 0, "attack_runs": len(rows)}
        plan |= {"lines": 1, "resumable": False, "origin": origin}
        (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def shown(folders: Sequence[Path]) -> list[LeaderboardRow]:
    """The rows, which no order of the folders changes."""
    orders = [leaderboard_rows(order) for order in permutations(folders)]
    assert all(each == orders[0] for each in orders)
    pages = [html_of(Content(load_runs(order))) for order in permutations(folders)]
    assert len(set(pages)) == 1
    return orders[0]


def sources(rows: Sequence[LeaderboardRow]) -> list[tuple[str, int]]:
    return sorted((Path(folder).name, row.n) for row in rows for folder in row.folders)


def hospital(victim: str, trials: int = 3) -> list[Row]:
    return [row(trial, victim, 11 + ord(victim) % 7) for trial in range(trials)]


@pytest.mark.parametrize("seed", [3, None])
def test_runs_of_one_name_and_other_victims_are_all_shown(tmp_path: Path, seed: int | None) -> None:
    folders = [written(tmp_path / v, hospital(v), seed=seed) for v in "abc"]
    rows = shown(folders)
    assert sources(rows) == [("a", 3), ("b", 3), ("c", 3)]
    assert len({each.comparison for each in rows}) == 3, "neither pooled nor ranked together"
    for folder in folders:
        (alone,) = leaderboard_rows([folder])
        (own,) = [each for each in rows if each.folders == alone.folders]
        assert own.gain == alone.gain and own.independent == alone.independent


def test_a_partial_overlap_is_not_pooled(tmp_path: Path) -> None:
    """Of the second run one trial is equal, one is another and one has no counterpart."""
    first = [row(0, "a"), row(1, "a"), row(2, "a")]
    second = [row(0, "a"), row(1, "b", 17.0), row(3, "b", 18.0)]
    folders = [written(tmp_path / n, r) for n, r in (("a", first), ("b", second))]
    assert sources(shown(folders)) == [("a", 3), ("b", 3)]


def test_equal_rows_are_shown_once(tmp_path: Path) -> None:
    rows = hospital("a", 4)
    written(tmp_path / "a", rows)
    written(tmp_path / "b", hospital("b", 4))
    slower = [each | {"cost": {"seconds": 9.0}} for each in rows]
    written(tmp_path / "copied", slower)
    written(tmp_path / "cut", rows[:2])
    lines = shown([tmp_path / name for name in ("a", "b", "copied", "cut")])
    assert sorted(line.n for line in lines) == [4, 4]
    (alone,) = shown([tmp_path / "a", tmp_path / "cut"])
    assert (alone.n, alone.variant) == (4, ""), "a run that was copied before its end"


def test_seeds_are_pooled_and_other_data_under_another_seed_are_not(tmp_path: Path) -> None:
    one, other = "data:" + 64 * "1", "data:" + 64 * "2"
    written(tmp_path / "seed3", hospital("a"), seed=3, origin=one)
    written(tmp_path / "seed4", hospital("b"), seed=4, origin=one)
    (line,) = shown([tmp_path / "seed3", tmp_path / "seed4"])
    assert line.n == 6
    written(tmp_path / "elsewhere", hospital("c"), seed=5, origin=other)
    lines = shown([tmp_path / name for name in ("seed3", "seed4", "elsewhere")])
    assert sorted(each.n for each in lines) == [3, 6]
    assert {each.variant for each in lines} == {"data=111111111111", "data=222222222222"}


@pytest.mark.parametrize("apart", [{"seed": None, "origin": "recording:"}, {"seed": 3}])
def test_failures_alike_of_two_recordings_or_seeds_are_two(
    apart: dict[str, Any], tmp_path: Path
) -> None:
    """An attack that refuses both says the same of each, down to the last field."""
    lost = row(0, status="failed", reason="refused", metrics=None, victims=None, baseline=None)
    for number, name in enumerate(("one", "two")):
        case = {k: v + (name if k == "origin" else number) if v else v for k, v in apart.items()}
        written(tmp_path / name, [lost], **case)
    lines = shown([tmp_path / "one", tmp_path / "two"])
    assert sum(each.n for each in lines) == 2
    assert len(lines) == (2 if "origin" in apart else 1)


def test_rows_of_two_runs_in_one_file_hide_none(tmp_path: Path) -> None:
    (line,) = shown([written(tmp_path / "both", [*hospital("a"), *hospital("b"), *hospital("a")])])
    assert line.n == 6


def test_stacks_of_one_name_are_no_one_defense(tmp_path: Path) -> None:
    def defended(std: float) -> list[Row]:
        stack = {"name": "noise", "stack": [{"name": "gaussian_noise", "std": std}]}
        return [*hospital("a"), *(each | {"defense": stack} for each in hospital("a"))]

    for std in (0.1, 0.2):
        stacks = {"none": [], "noise": [{"name": "gaussian_noise", "std": std}]}
        written(tmp_path / str(std), defended(std), defenses=stacks)
    lines = shown([tmp_path / "0.1", tmp_path / "0.2"])
    assert len({line.comparison for line in lines}) == 2
    assert len(lines) == 4


def test_of_copies_the_one_with_the_weakest_claim_counts(tmp_path: Path) -> None:
    for name, epsilon in (("a", 8.0), ("b", 2.0)):
        written(tmp_path / name, [row(privacy={"epsilon": epsilon, "delta": 1e-5})])
    (line,) = shown([tmp_path / "a", tmp_path / "b"])
    assert (line.n, line.epsilon) == (1, 8.0)


def test_a_copy_of_a_run_that_went_on_hides_no_control(tmp_path: Path) -> None:
    ended = [row(0, control={"other_update": METRICS})]
    written(tmp_path / "a", ended)
    written(tmp_path / "b", [row(0)])
    (measured,) = measurements(load_runs([tmp_path / "b", tmp_path / "a"]))
    assert measured.other_update is not None


def test_a_run_without_rows_keeps_its_own_setting(tmp_path: Path) -> None:
    for name in ("1", "2"):
        origin = "data:" + 64 * name
        folder = written(tmp_path / name, [], origin=origin, attacks=[])
        rounds = {"defense": "none", "round": 1, "test_accuracy": 0.5 + int(name) / 10}
        (folder / "rounds.jsonl").write_text(json.dumps(rounds) + "\n")
    (scenario,) = Content(load_runs([tmp_path])).scenarios
    assert len({row.variant for row in scenario.utility}) == 2


SCENARIO: Row = {
    "name": "ward",
    "model": "lenet",
    "training": {"rounds": 1, "local": {"batch_size": 1, "lr": 0.1}},
    "defenses": {"none": []},
    "attacks": ["label_inference"],
    "observe": {"clients": [0], "batch_sizes": [1], "trials": 2},
}


def images(folder: Path, seed: int) -> Path:
    from PIL import Image

    pixels = torch.Generator().manual_seed(seed)
    for split, count in (("train", 12), ("test", 8)):
        for label in ("ill", "well"):
            place = folder / split / label
            place.mkdir(parents=True)
            for number in range(count // 2):
                image = torch.randint(256, (16, 16, 3), generator=pixels, dtype=torch.uint8)
                Image.fromarray(image.numpy()).save(place / f"{number}.png")
    return folder


@pytest.mark.usefixtures("attacks_here")
def test_two_hospitals_with_one_scenario_are_both_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same to the byte; the folder that it names is of each hospital's own."""
    wanted = SCENARIO | {
        "data": {"source": {"name": "image_folder", "path": "images"}, "clients": 2}
    }
    for site, seed in (("north", 1), ("south", 2)):
        monkeypatch.chdir(images(tmp_path / site / "images", seed).parent)
        fedsim.run(wanted, out=tmp_path / site / "run", workers=1)
    north, south = tmp_path / "north" / "run", tmp_path / "south" / "run"
    assert (north / "scenario.yaml").read_bytes() == (south / "scenario.yaml").read_bytes()
    lines = shown([north, south])
    assert sorted(folder for line in lines for folder in line.folders) == [str(north), str(south)]
    shutil.copytree(north, tmp_path / "copy")
    again = shown([north, south, tmp_path / "copy"])
    assert [line.n for line in again] == [line.n for line in lines]


@pytest.mark.parametrize("part", ["train_images", "train_labels", "test_images", "mean"])
def test_the_digest_of_data_is_of_their_content(part: str) -> None:
    (variant,) = expand(SCENARIO | {"data": {"source": "faces", "clients": 2}})
    data = load_dataset(variant.scenario)
    own = getattr(data, part)
    other = own.flip(0) if isinstance(own, torch.Tensor) else (0.25, *own[1:])
    changed = replace(data, **{part: other})  # type: ignore[arg-type]
    digests = {digest_of_inputs(variant.scenario, each) for each in (data, replace(data), changed)}
    assert len(digests) == 2
