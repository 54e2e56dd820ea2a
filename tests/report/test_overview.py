"""Pictures hold the scored pixels; the overview shows the same images behind every defense."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from synthetic_run import write_run

from fedsim.recording.files import read_tensors, write_tensors
from fedsim.report import ReportError, save_grid, save_grids, save_overview
from fedsim.report.pictures import (
    _choose_defenses,
    _choose_victims,
    _ShownDefense,
    reconstruction_file,
)
from fedsim.results.lines import ControlOf, ResultRow
from fedsim.results.reading import load_runs
from fedsim.scoring import ScoringError, psnr


def defenses_of(folder: Path) -> dict[str, _ShownDefense]:
    return {each.row.defense: each for each in _choose_defenses(load_runs([folder]))}


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
    defenses = defenses_of(folder)
    victims = _choose_victims(defenses["none"].recoveries)
    for victim in victims:
        for stack in ("none", "pruning"):  # behind dp a trial of the attack that is shown failed
            found = defenses[stack].find(victim)
            assert found is not None
            assert found.psnr == pytest.approx(float(psnr(found.image[None], victim.truth[None])))
    for path in folder.glob("reconstructions/pruning/*/round-*/*-b1-*.safetensors"):
        tensors = dict(read_tensors(path))
        write_tensors(path, {**tensors, "truth": torch.zeros_like(tensors["truth"])})
    assert defenses_of(folder)["pruning"].find(victims[0]) is None
    assert save_overview(folder) is not None


def test_of_many_images_the_worst_the_median_and_the_best_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path, stacks=["none"], trials=5)
    recoveries = defenses_of(folder)["none"].recoveries
    values = sorted(each.psnr for each in recoveries)
    victims = _choose_victims(recoveries)
    assert len(values) == 5
    assert [each.psnr for each in victims] == [values[0], values[2], values[-1]]


def test_a_prior_that_draws_the_same_from_any_update_is_not_shown(run_folder: Path) -> None:
    """While another attack sees something of the update, whatever its mean."""
    (run,) = load_runs([run_folder])

    def as_control(row: ResultRow, label: str) -> ResultRow:
        if row.attack.label != label or not row.ok:
            return row
        return row.model_copy(update={"control": ControlOf(other_update=row.metrics)})

    rows = [as_control(row, "inverting_gradients") for row in run.rows]
    assert _choose_defenses([run])[0].row.attack == "inverting_gradients"
    assert _choose_defenses([replace(run, rows=rows)])[0].row.attack == "deep_leakage"


def test_a_sweep_shows_the_same_images_of_every_variant(tmp_path: Path) -> None:
    stacks = ("none", "pruning")
    for rate in (0.1, 0.01):
        variant = {"training.local.lr": rate}
        write_run(tmp_path / f"lr={rate}", variant=variant, stacks=stacks, trials=2)
    defenses = _choose_defenses(load_runs([tmp_path]))
    assert [(each.row.variant, each.row.defense) for each in defenses] == [
        (f"training.local.lr={rate}", name) for rate in (0.01, 0.1) for name in stacks
    ]
    for victim in _choose_victims(defenses[0].recoveries):
        assert all(each.find(victim) for each in defenses)
    paths = [save_overview(tmp_path), save_overview(tmp_path / "lr=0.1")]
    whole, one = [Image.open(path).height for path in paths if path]
    assert whole > 1.5 * one, "a row for each defense of each variant"


def test_another_clients_same_image_is_not_shown_for_it(run_folder: Path) -> None:
    """An image may lie with two clients; a sum of all clients' updates is of each of them."""
    victim = _choose_victims(defenses_of(run_folder)["none"].recoveries)[0]
    for client, there in ((victim.client, True), (victim.client + 1, False), (-1, True)):
        assert replace(victim, client=client).is_of(victim) is there


def test_grid_places_truth_above_reconstruction(tmp_path: Path) -> None:
    truth = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    reconstruction = 1 - truth
    path = tmp_path / "grid.png"
    save_grid(path, truth, reconstruction)
    pixels = np.asarray(Image.open(path))  # each pixel is a square of side 8
    assert pixels.shape == (2 * 64 + 2, 3 * 64 + 2 * 2, 3)
    second = pixels[:64, 66:130]
    assert np.array_equal(second[::8, ::8], (truth[1] * 255).round().byte().permute(1, 2, 0))
    assert np.array_equal(second[7::8, 7::8], second[::8, ::8])
    below = (reconstruction[2] * 255).round().byte().permute(1, 2, 0)
    assert np.array_equal(pixels[66:, 132:][::8, ::8], below)


def test_a_grid_of_what_are_no_pairs_of_images_is_refused(tmp_path: Path) -> None:
    good = torch.zeros(1, 3, 4, 4)
    with pytest.raises(ScoringError, match="in \\[0, 1\\]"):
        save_grid(tmp_path / "x.png", good, good + 2)
    with pytest.raises(ReportError, match="gray or RGB"):
        save_grid(tmp_path / "x.png", good[:, :2], good[:, :2])
    with pytest.raises(ReportError, match="pairs"):
        save_grid(tmp_path / "x.png", good, good[:, :, :2])
    assert not (tmp_path / "x.png").exists()


def test_every_reconstruction_of_a_run_gets_its_grid(run_folder: Path) -> None:
    tensors = sorted(run_folder.rglob("inverting_gradients/*/*.safetensors"))
    assert save_grids(run_folder) >= len(tensors) > 0
    assert all(path.with_suffix(".png").is_file() for path in tensors)
    labels_only = sorted(run_folder.rglob("label_inference/*/*.safetensors"))
    assert labels_only
    assert not any(path.with_suffix(".png").exists() for path in labels_only)


def test_a_row_cannot_name_a_file_outside_its_run(run_folder: Path, tmp_path: Path) -> None:
    row = load_runs([run_folder])[0].rows[0]
    assert reconstruction_file(run_folder, row) is not None
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"")
    escape = row.model_copy(update={"observation": f"../../../../../../{tmp_path}/secret"})
    assert reconstruction_file(run_folder, escape) is None
    for name in (f"none/{tmp_path}/secret", "a\0b", "x" * 5000, ""):
        strange = row.model_copy(update={"observation": name})
        assert reconstruction_file(run_folder, strange) is None
