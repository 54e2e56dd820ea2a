"""The overview shows the same images behind every defense, by a stated choice."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from synthetic_run import STACKS, write_run

from fedsim.recording.files import read_tensors, write_tensors
from fedsim.report import save_overview
from fedsim.report.overview import (
    DefendedTrials,
    choose_lineup,
    choose_victims,
    find_recovery,
    strongest,
)
from fedsim.results.lines import ControlOf, Metrics
from fedsim.results.reading import load_runs
from fedsim.scoring import psnr


def trials_of(folder: Path, stack: str = "none") -> DefendedTrials:
    """The strongest attack on batches of one image."""
    (run,) = load_runs([folder])
    rows = strongest([row for row in run.rows if row.batch_size == 1], stack)
    return DefendedTrials(folder=run.folder, variant="", defense=stack, rows=rows)


def test_a_picture_is_written_the_same_each_time(run_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    path = save_overview(folder)
    assert path == folder / "overview.png"
    assert min(np.asarray(Image.open(path).convert("RGB")).shape[:2]) > 300
    before = path.read_bytes()
    save_overview(folder)
    assert path.read_bytes() == before
    shutil.rmtree(folder / "reconstructions")
    assert save_overview(folder) is None


def test_every_defense_shows_the_chosen_images_unless_none_attacked_them(
    run_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    plain = trials_of(folder)
    victims = choose_victims(plain, plain.rows[0].round)
    for victim in victims:
        for stack in ("none", "pruning"):  # behind dp a trial of the attack that is shown failed
            recovery = find_recovery(trials_of(folder, stack), victim)
            assert recovery is not None
            image, value = recovery
            assert value == pytest.approx(float(psnr(image[None], victim.image[None])))
    for path in folder.glob("reconstructions/pruning/*/round-*/*-b1-*.safetensors"):
        tensors = dict(read_tensors(path))
        write_tensors(path, {**tensors, "truth": torch.zeros_like(tensors["truth"])})
    assert find_recovery(trials_of(folder, "pruning"), victims[0]) is None
    assert save_overview(folder) is not None


def test_of_many_images_the_worst_the_median_and_the_best_are_shown(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, stacks={"none": STACKS["none"]}, trials=5, batch_sizes=(1,), rounds=1
    )
    trials = trials_of(folder)
    values = sorted(row.metrics["psnr"] for row in trials.rows if row.metrics)  # type: ignore[type-var]
    victims = choose_victims(trials, 1)
    assert [v.psnr for v in victims] == pytest.approx([values[0], values[2], values[-1]], abs=1e-3)
    assert {v.of for v in victims} == {5}


def test_a_prior_that_draws_the_same_from_any_update_is_not_shown(run_folder: Path) -> None:
    """While another attack sees something of the update, whatever its mean."""
    (run,) = load_runs([run_folder])
    rows = []
    for row in run.rows:
        if row.attack.label == "inverting_gradients" and row.metrics and row.ok:
            row = row.model_copy(update={"control": ControlOf(other_update=row.metrics)})
        rows.append(row)
    assert strongest(run.rows, "none")[0].attack.label == "inverting_gradients"
    assert strongest(rows, "none")[0].attack.label == "deep_leakage"


def test_a_sweep_shows_the_same_images_of_every_variant(tmp_path: Path) -> None:
    stacks = {name: STACKS[name] for name in ("none", "pruning")}
    for rate in (0.1, 0.01):
        variant = {"training.local.lr": rate}
        case = {"stacks": stacks, "trials": 2, "batch_sizes": (1,), "rounds": 1}
        write_run(tmp_path / f"lr={rate}", variant=variant, **case)  # type: ignore[arg-type]
    shown = choose_lineup(load_runs([tmp_path]))
    assert shown is not None
    assert [(each.variant, each.defense) for each in shown.defenses] == [
        (f"training.local.lr={rate}", name) for rate in (0.01, 0.1) for name in stacks
    ]
    for victim in shown.victims:
        assert all(find_recovery(each, victim) for each in shown.defenses)
    paths = [save_overview(tmp_path), save_overview(tmp_path / "lr=0.1")]
    whole, one = [Image.open(path).height for path in paths if path]
    assert whole > 1.5 * one, "a row for each defense of each variant"


def test_another_clients_same_image_is_not_shown_for_it(run_folder: Path) -> None:
    """An image may lie with two clients; a sum of all clients' updates is of each of them."""
    trials = trials_of(run_folder)
    victim = choose_victims(trials, trials.rows[0].round)[0]
    for client, there in ((0, True), (1, False), (-1, True)):
        moved = [row.model_copy(update={"client": client}) for row in trials.rows]
        assert (find_recovery(replace(trials, rows=moved), victim) is not None) is there


def test_of_a_secure_sum_one_view_is_shown_and_not_two_mixed(run_folder: Path) -> None:
    """The sum of a round is shown as it was attacked, not the noise of a masked part of it."""
    own = trials_of(run_folder).rows
    masked = [row.model_copy(update={"metrics": Metrics(psnr=5.0)}) for row in own]
    summed = [row.model_copy(update={"vantage": "aggregate", "client": -1}) for row in own]
    rows = strongest([*masked, *summed], "none")
    assert {row.vantage for row in rows} == {"aggregate"} and len(rows) == len(summed)
