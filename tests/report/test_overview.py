"""The overview shows the same images behind every defense, by a stated choice."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from synthetic_run import STACKS, write_run

from fedsim.recording.files import read_tensors, write_tensors
from fedsim.report import save_overview
from fedsim.report.lineup import chosen, lineup, recovered, strongest
from fedsim.results.lines import ControlOf, Metrics
from fedsim.results.reading import load_runs
from fedsim.scoring import psnr


def test_a_picture_is_written(run_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    path = save_overview(folder)
    assert path == folder / "overview.png"
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert min(pixels.shape[:2]) > 300
    before = path.read_bytes()
    save_overview(folder)
    assert path.read_bytes() == before


def test_every_defense_shows_the_image_that_waschosen(run_folder: Path) -> None:
    (run,) = load_runs([run_folder])
    rows = [row for row in run.rows if row.batch_size == 1]
    for victim in chosen(run, strongest(rows, "none")):
        for stack in ("none", "pruning"):  # behind dp a trial of the attack that is shown failed
            found = recovered(run, strongest(rows, stack), victim)
            assert found is not None
            assert found.psnr == pytest.approx(float(psnr(found.image[None], victim.image[None])))


def test_of_many_images_the_worst_the_median_and_the_best_are_shown(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, stacks={"none": STACKS["none"]}, trials=5, batch_sizes=(1,), rounds=1
    )
    (run,) = load_runs([folder])
    rows = strongest(run.rows, "none")
    values = sorted(row.metrics["psnr"] for row in rows if row.metrics and row.metrics["psnr"])
    victims = chosen(run, rows)
    assert [v.psnr for v in victims] == pytest.approx([values[0], values[2], values[-1]], abs=1e-3)
    assert {v.of for v in victims} == {5}


def test_an_image_that_no_row_attacked_is_left_out(run_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    for path in folder.glob("reconstructions/pruning/*/round-*/*-b1-*.safetensors"):
        tensors = dict(read_tensors(path))
        write_tensors(path, {**tensors, "truth": torch.zeros_like(tensors["truth"])})
    (run,) = load_runs([folder])
    rows = [row for row in run.rows if row.batch_size == 1]
    victim = chosen(run, strongest(rows, "none"))[0]
    assert recovered(run, strongest(rows, "pruning"), victim) is None
    assert save_overview(folder) is not None


def test_nothing_is_drawn_where_no_image_wasrecovered(run_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    shutil.rmtree(folder / "reconstructions")
    assert save_overview(folder) is None
    assert not (folder / "overview.png").exists()


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
        write_run(
            tmp_path / f"lr={rate}",
            stacks=stacks,
            trials=2,
            batch_sizes=(1,),
            rounds=1,
            variant={"training.local.lr": rate},
        )
    shown = lineup(load_runs([tmp_path]))
    assert shown is not None
    assert [(behind.variant, behind.defense) for behind in shown.defenses] == [
        (f"training.local.lr={rate}", name) for rate in (0.01, 0.1) for name in stacks
    ]
    for victim in shown.victims:
        assert all(recovered(b.run, b.rows, victim) for b in shown.defenses)
    path = save_overview(tmp_path)
    assert path == tmp_path / "overview.png"
    one = save_overview(tmp_path / "lr=0.1")
    assert one is not None
    heights = [Image.open(p).height for p in (path, one)]
    assert heights[0] > 1.5 * heights[1], "a row for each defense of each variant"


def test_another_clients_same_image_is_not_shown_for_it(run_folder: Path) -> None:
    """An image may lie with two clients; a sum of all clients' updates is of each of them."""
    (run,) = load_runs([run_folder])
    rows = strongest([row for row in run.rows if row.batch_size == 1], "none")
    victim = chosen(run, rows)[0]
    for client, there in ((0, True), (1, False), (-1, True)):
        moved = [row.model_copy(update={"client": client}) for row in rows]
        assert (recovered(run, moved, victim) is not None) is there


def test_of_a_secure_sum_one_view_is_shown_and_not_two_mixed(run_folder: Path) -> None:
    """The sum of a round is shown as it was attacked, not the noise of a masked part of it."""
    (run,) = load_runs([run_folder])
    own = strongest([row for row in run.rows if row.batch_size == 1], "none")
    masked = [row.model_copy(update={"metrics": Metrics(psnr=5.0)}) for row in own]
    summed = [row.model_copy(update={"vantage": "aggregate", "client": -1}) for row in own]
    chosen_rows = strongest([*masked, *summed], "none")
    assert {row.vantage for row in chosen_rows} == {"aggregate"}
    assert len(chosen_rows) == len(summed)
