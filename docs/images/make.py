"""Draw docs/images/reconstructions.png from a finished quickstart run.

    fedsim run scenarios/quickstart.yaml && python docs/images/make.py runs/quickstart

Each column is one client's batch of one image: the truth above, and below what the strongest attack
on that defense made of the update. The pixels are the scored ones, enlarged and not rescaled.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor

from fedsim.record import Row, Run
from fedsim.recording import read_tensors


def strongest(rows: list[Row], stack: str) -> list[Row]:
    """The rows of the attack with the highest mean PSNR on `stack`, at batch size 1."""
    own = [r for r in rows if r["defense"]["name"] == stack and r["batch_size"] == 1]
    ok = [r for r in own if r["status"] == "ok" and r["metrics"]["psnr"] is not None]
    by_attack: dict[str, list[Row]] = {}
    for row in ok:
        by_attack.setdefault(row["attack"]["label"], []).append(row)
    return max(by_attack.values(), key=lambda rs: sum(r["metrics"]["psnr"] for r in rs) / len(rs))


def show(axes: Axes, image: Tensor, caption: str = "") -> None:
    axes.imshow(image.permute(1, 2, 0).squeeze(2), cmap="gray", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(caption, fontsize=9, labelpad=4)


def main(folder: Path) -> None:
    run = Run(folder)
    rows = run.rows()
    stacks = list(dict.fromkeys(row["defense"]["name"] for row in rows))
    chosen = {stack: strongest(rows, stack) for stack in stacks}
    trials = max(len(found) for found in chosen.values())
    figure, axes = plt.subplots(
        2, len(stacks) * trials, figsize=(1.25 * len(stacks) * trials, 3.1), squeeze=False
    )
    for position, (stack, found) in enumerate(chosen.items()):
        for trial, row in enumerate(found):
            column = position * trials + trial
            path = folder / "reconstructions" / stack / row["attack"]["label"]
            tensors = read_tensors(path / f"{row['observation'].partition('/')[2]}.safetensors")
            shown = 0
            show(axes[0][column], tensors["truth"][shown])
            show(
                axes[1][column],
                tensors["reconstruction"][shown],
                f"{row['per_image']['psnr'][shown]:.1f} dB",
            )
            if trial == 0:
                axes[0][column].set_title(
                    f"{stack}\n{row['attack']['label']}", fontsize=9, loc="left"
                )
    axes[0][0].set_ylabel("truth", fontsize=9)
    axes[1][0].set_ylabel("recovered", fontsize=9)
    figure.tight_layout(pad=0.6)
    target = Path(__file__).with_name("reconstructions.png")
    figure.savefig(target, dpi=110)
    print(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
