"""Pictures hold the scored pixels, in order, and nothing else."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.report import ReportError, save_grid, save_grids
from fedsim.report.pictures import _Pair, reconstruction_file
from fedsim.results.reading import load_runs
from fedsim.scoring import ScoringError


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


def test_data_addresses_hold_one_pixel_per_pixel() -> None:
    own = torch.randint(256, (5, 7, 3), generator=torch.Generator().manual_seed(0)).byte()
    pair = _Pair(pixels=(own, 255 - own), psnr=0.0)
    for uri, image in ((pair.truth, own), (pair.reconstruction, 255 - own)):
        content = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), image)


def test_refused(tmp_path: Path) -> None:
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
