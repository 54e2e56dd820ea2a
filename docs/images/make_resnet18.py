"""Draw resnet18.png and public.png from what `fedsim attack RECORDING --out FOLDER` has left.

    python docs/images/make_resnet18.py docs/images/resnet18.png RUN RECORDING undefended=FOLDER \
        "noise of 0.01=FOLDER"

One batch: the truth above, and below what was made of its update, a line for each folder and each
image where it is nearest. The pixels are the scored ones, enlarged and not rescaled.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from scipy.optimize import linear_sum_assignment

from fedsim.recording.files import load_observation, read_tensors
from fedsim.recording.truth import load_truth


def main(picture: Path, run: Path, recording: Path, folders: dict[str, Path]) -> None:
    truth = load_truth(run, load_observation(recording).id).images
    lines = {"truth": truth}
    for label, folder in folders.items():
        images = read_tensors(folder / "reconstruction.safetensors")["images"]
        away = (truth[:, None] - images).square().flatten(2).mean(2)
        lines[label] = images[linear_sum_assignment(away)[1]]
    count = len(truth)
    size = (0.9 * count + 1.8, 0.95 * len(lines))
    figure, grid = plt.subplots(len(lines), count, figsize=size, squeeze=False)
    figure.subplots_adjust(0.32, 0.01, 0.99, 0.99, 0.04, 0.04)
    for axes, (label, images) in zip(grid, lines.items(), strict=True):
        axes[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
        for cell, image in zip(axes, images, strict=True):
            cell.imshow(image.permute(1, 2, 0), vmin=0, vmax=1)
            cell.set(xticks=[], yticks=[])
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    picture, run, recording, *attacks = sys.argv[1:]
    found = {label: Path(folder) for label, folder in (each.split("=") for each in attacks)}
    main(Path(picture), Path(run), Path(recording), found)
