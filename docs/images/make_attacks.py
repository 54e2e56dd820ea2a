"""Draw docs/images/attacks.png from finished runs of table3-small and table3-local-small.

    fedsim run scenarios/reconstruction/table3-small.yaml
    fedsim run scenarios/reconstruction/table3-local-small.yaml
    python docs/images/make_attacks.py runs/table3-small runs/table3-local-small

The first trial of every defense, of the first run that has it: the truth above, and below what each
attack made of the update. The pixels are the scored ones, enlarged and not rescaled.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from fedsim.attacking.jobs import reconstruction_path
from fedsim.recording.files import read_tensors
from fedsim.results.record import Row, Run


def main(folders: list[Path]) -> None:
    cells: dict[tuple[str, str], tuple[Path, Row]] = {}
    for folder in folders:
        for row in Run(folder).rows():
            if row["trial"] == 0:
                cells.setdefault((row["defense"]["name"], row["attack"]["label"]), (folder, row))
    stacks = list(dict.fromkeys(stack for stack, _ in cells))
    labels = list(dict.fromkeys(label for _, label in cells))
    count = next(iter(cells.values()))[1]["batch_size"]
    figure = plt.figure(figsize=(0.55 * count * len(stacks) + 1.6, 0.66 * (len(labels) + 1)))
    parts = figure.add_gridspec(1, len(stacks), left=0.13, right=0.995, top=0.93, bottom=0.01)
    for number, stack in enumerate(stacks):
        grid = parts[number].subgridspec(len(labels) + 1, count, wspace=0.05, hspace=0.05)
        for line, label in enumerate(["truth", *labels]):
            folder, row = cells[stack, labels[max(line - 1, 0)]]
            path = reconstruction_path(folder, row["attack"]["label"], row["observation"])
            found = read_tensors(path) if row["status"] == "ok" else {}
            images = found.get("reconstruction" if line else "truth")
            for index in range(count):
                axes = figure.add_subplot(grid[line, index])
                axes.set(xticks=[], yticks=[])
                if images is not None:
                    image = images[index].permute(1, 2, 0).squeeze(2)
                    axes.imshow(image, cmap="gray", vmin=0, vmax=1)
                if not number and not index:
                    axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
                if not line and not index:
                    axes.set_title(stack, loc="left", fontsize=10)
    figure.savefig(Path(__file__).with_name("attacks.png"), dpi=130)


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
