"""Shows which likeness tells that a reconstructed picture is recognized, and at which value.

A picture counts as recognized if its truth is the nearest to it, by edges, among all truths and
2,000 other pictures. That is neither PSNR, SSIM nor HaarPSI. Pictures of 32 x 32 pixels are read
from the `reconstructions` below the folders that are named.

    python benchmarks/likeness.py RUN... --others cifar10-images.zip
"""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from fedsim.scoring.image import haarpsi, psnr, ssim

SHAPES = ((1, 32, 32), (3, 32, 32))


def edges(images: Tensor) -> Tensor:
    """Returns the unit-length differences of neighbouring pixels, (N, F)."""
    gray = F.avg_pool2d(images.mean(1, keepdim=True), 2)
    steps = gray[..., 1:, :-1] - gray[..., :-1, :-1], gray[..., :-1, 1:] - gray[..., :-1, :-1]
    return F.normalize(torch.cat(steps, 1).flatten(1))


def read_others(path: Path, count: int = 2000) -> Tensor:
    """Reads so many color images of an archive, (N, 3, 32, 32) in [0, 1]."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith((".png", ".jpg"))]
        chosen = np.random.default_rng(0).permutation(len(names))[:count]
        opened = [Image.open(io.BytesIO(archive.read(names[i]))).convert("RGB") for i in chosen]
    return (
        torch.stack([torch.from_numpy(np.array(each)) for each in opened]).permute(0, 3, 1, 2) / 255
    )


def read_pairs(folders: list[Path]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns answers and truths, (N, 3, 32, 32), each once, and their PSNR, SSIM and HaarPSI."""
    answers, truths, values = [], [], []
    seen: set[bytes] = set()
    for path in sorted(each for folder in folders for each in folder.rglob("*.safetensors")):
        if "reconstructions" not in path.parts or "control" in path.parts:
            continue
        saved = load_file(path)
        if not {"truth", "reconstruction"} <= saved.keys():
            continue
        answer, truth = saved["reconstruction"], saved["truth"]
        if tuple(truth.shape[1:]) not in SHAPES or answer.numpy().tobytes() in seen:
            continue
        seen.add(answer.numpy().tobytes())
        scores = [metric(answer, truth) for metric in (psnr, ssim, haarpsi)]
        values.append(torch.stack([each for each in scores if isinstance(each, Tensor)], 1))
        answers.append(answer.expand(-1, 3, -1, -1).float())
        truths.append(truth.expand(-1, 3, -1, -1).float())
    return torch.cat(answers), torch.cat(truths), torch.cat(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--others", type=Path, required=True)
    arguments = parser.parse_args()
    others = read_others(arguments.others)
    unrelated = haarpsi(others[:1000], others[1000:])
    assert isinstance(unrelated, Tensor)
    ends = unrelated.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    print("HaarPSI of unrelated pictures, 5%, 50%, 95%:", [round(float(each), 2) for each in ends])
    answers, truths, values = read_pairs(arguments.runs)
    pool = torch.cat([others, truths.flatten(1).unique(dim=0).reshape(-1, 3, 32, 32)])
    print(f"{len(answers)} answers, {len(pool) - len(others)} truths, {len(pool)} pictures")
    own = (edges(answers) * edges(truths)).sum(1, keepdim=True)
    # A tolerance: the truth itself is one of the pool.
    recognized = (edges(answers) @ edges(pool).T > own + 1e-5).sum(1) == 0
    _, structure, perceived = values.T
    for name, chosen in {
        "all": structure > -2,
        "SSIM >= 0.5": structure >= 0.5,
        "SSIM >= 0.5, HaarPSI >= 0.5": (structure >= 0.5) & (perceived >= 0.5),
        "SSIM >= 0.5, HaarPSI < 0.5": (structure >= 0.5) & (perceived < 0.5),
        "SSIM < 0.5, HaarPSI >= 0.5": (structure < 0.5) & (perceived >= 0.5),
        "SSIM < 0.5, HaarPSI < 0.5": (structure < 0.5) & (perceived < 0.5),
    }.items():
        print(f"{name:30s} recognized {int(recognized[chosen].sum())} of {int(chosen.sum())}")


if __name__ == "__main__":
    main()
