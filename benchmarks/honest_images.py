"""Images from ordinary classifiers by an honest server, against rivals, at about equal time.

Victims, batches and defenses are those of `honest_features.py`, whose `train` must have run in OUT.
Nothing is planted or granted and labels are inferred. Every attack of a cell gets the same batches.
`equal labels` is of batches whose images have one class.

    python benchmarks/honest_images.py attack OUT [--only WORD ...] [--batches N]
                                              [--device cuda --workers 14]
    python benchmarks/honest_images.py table OUT > docs/results/honest-images.csv
    python benchmarks/honest_images.py picture OUT FILE

`attack` keeps a line for each batch and attack in OUT, with the images, and goes on where it ended.
A cell whose model is `resnet18-planted` has a malicious server and stands beside for comparison.
`picture` draws the first batch of some cells.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import honest_features as features
import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.recording.files import read_tensors, write_tensors
from fedsim.scoring import score, student_interval
from fedsim.scoring.guess import Guesser
from fedsim.system.device import move_tensors, resolve_device
from fedsim.types import GroundTruth, Observation

ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "factored_inversion": ("factored_inversion", {"iterations": 1000}),
    "inverting_gradients": ("inverting_gradients", {"iterations": 1000}),
    "grad_inversion": ("grad_inversion", {"iterations": 250}),
    "feature_inversion_pixels": (
        "feature_inversion",
        {"prior": "pixel", "iterations": 1000, "cosines": "weighted_mean"},
    ),
    "inverting_gradients, 2000": ("inverting_gradients", {"iterations": 2000}),
    "factored_inversion, long": ("factored_inversion", {"iterations": 4800}),
    "inverting_gradients, published": ("inverting_gradients", {}),
    "feature_inversion, published": ("feature_inversion", {}),
}
"""Of about equal time on a processor (2,000 of inverting_gradients in a ConvNet, which an iteration
of it takes half as long in), and as long as their authors have them. grad_inversion's
20,000 iterations of eight seeds each are not among them: they take ten minutes a batch on a GPU."""
EQUAL = "equal labels"
NAMED = ("factored_inversion", "inverting_gradients")
AS_LONG = ("factored_inversion", "inverting_gradients, 2000")
LONG = ("factored_inversion, long", "inverting_gradients, published")
Cell = tuple[str, int, int, str]
"""Victim, epochs, images, what stands in the way."""
GROUP = "resnet18-group"
CELLS: dict[Cell, tuple[str, ...]] = {
    **{(GROUP, epoch, count, "none"): NAMED for epoch in (0, 5) for count in (2, 4, 8)},
    **{(GROUP, 0, count, EQUAL): NAMED for count in (2, 4, 8)},
    **{
        (GROUP, 5, 2, way): NAMED
        for way in ("clip", "pruning 0.9", "8 bits", "noise 0.001", "noise 0.01", "noise 0.1")
    },
    (GROUP, 1, 4, "none"): NAMED,
    (GROUP, 0, 2, "5 steps"): NAMED,
    **{(GROUP, epoch, 16, "none"): NAMED for epoch in (0, 5)},
    **{("convnet", epoch, 4, "none"): AS_LONG for epoch in (0, 5)},
    **{(features.PLANTED, epoch, 4, "none"): NAMED for epoch in (0, 5)},
    **{(features.PLANTED, 0, count, "none"): NAMED for count in (2, 8)},
    **{(name, 5, 4, way): NAMED for way in features.TABLE3 for name in (GROUP, features.PLANTED)},
}
"""Each cell, and the attacks that try it; those `LONGER` are tried by more."""
LONGER: dict[Cell, tuple[str, ...]] = {
    **{
        (GROUP, epoch, 4, "none"): (
            "grad_inversion",
            "feature_inversion_pixels",
            *LONG,
            "feature_inversion, published",
        )
        for epoch in (0, 5)
    },
    **{(GROUP, epoch, count, "none"): LONG for epoch in (0, 5) for count in (2, 8)},
    **{("convnet", epoch, 4, "none"): ("feature_inversion_pixels",) for epoch in (0, 5)},
}
SHOWN: dict[Cell, str] = {
    (GROUP, 0, 4, "none"): "fresh, four classes",
    (GROUP, 0, 4, EQUAL): "fresh, one class",
    (GROUP, 5, 4, "none"): "after five epochs",
}
"""Cells of the picture, and their titles."""


def attackers(cell: Cell) -> tuple[str, ...]:
    """Names the attacks that try a cell."""
    return CELLS[cell] + LONGER.get(cell, ())


def rival_of(attack: str, cell: Cell) -> str:
    """Names what `attack` is compared with: a run of inverting_gradients."""
    if cell[0] == "convnet":
        return AS_LONG[1]
    return LONG[1] if attack == LONG[0] else NAMED[1]


def observed(
    out: Path, kept: dict[str, Tensor], cell: Cell, trial: int
) -> tuple[Observation, GroundTruth]:
    """The update of one batch of `cell`, and its truth."""
    name, epoch, count, way = cell
    if way != EQUAL:
        return features.observed(out, kept, cell, trial)
    classes = kept[str(features.MODELS[name][2])]
    stream = rng.generator(features.SEED, EQUAL, name, epoch, count, trial)
    own = (classes == trial % (int(classes.max()) + 1)).nonzero().flatten()
    chosen = own[torch.randperm(len(own), generator=stream)[:count]]
    return features.observed(out, kept, (name, epoch, count, "none"), trial, chosen)


def measured(
    attack: str, observation: Observation, truth: GroundTruth, trial: int, device: str
) -> tuple[dict[str, Any], Tensor]:
    """Scores one attack on one batch: its figures, and its images in the truth's order."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    found = solve(
        create(*ATTACKS[attack]), move_tensors(observation, device), Knowledge(), seed=trial
    ).reconstruction
    found = move_tensors(found, "cpu")
    seconds = clock() - start
    assert found.images is not None
    scores = score(found, truth)
    figures = {key: scores[key] for key in ("psnr", "ssim", "label_accuracy")}
    return {**figures, "seconds": seconds, "device": device}, found.images[scores.assignment]


Task = tuple[Cell, int, str]
"""A cell, which of its batches, and who attacks it."""


def attack(out: Path, only: list[str], batches: int, device: str, workers: int) -> None:
    """Attacks the batches of every cell, the first of each before the second of any."""
    file = out / "images.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    done = {(row["cell"], row["trial"], row["attack"]) for row in map(json.loads, lines)}
    tasks: list[Task] = [
        (cell, trial, own)
        for trial in range(batches)
        for cell in CELLS
        for own in attackers(cell)
        if ("/".join(map(str, cell)), trial, own) not in done
        if all(word in f"{'/'.join(map(str, cell))}/{own}" for word in only)
    ]
    # Its server imports once for all; this process has met no device when it starts.
    with multiprocessing.get_context("forkserver").Pool(workers, _prepare) as pool:
        ask = partial(_attacked, out, device)
        for number, row in enumerate(pool.imap_unordered(ask, tasks)):
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            print(f"{number + 1}/{len(tasks)} {json.dumps(row)}", flush=True)


def _prepare() -> None:
    torch.set_num_threads(1)


@cache
def _images(out: Path) -> dict[str, Tensor]:
    return read_tensors(out / "images.safetensors")


@cache
def _guesser(out: Path) -> Guesser:
    return Guesser(_images(out)["test"], _images(out)["test_10"])


def _attacked(out: Path, device: str, task: Task) -> dict[str, Any]:
    """The row of one task; its images are kept."""
    cell, trial, own = task
    device, name = resolve_device(device), "/".join(map(str, cell))
    observation, truth = observed(out, _images(out), cell, trial)
    guess = score(_guesser(out)(len(truth.labels)).answer(), truth)["psnr"]
    row: dict[str, Any] = {"cell": name, "attack": own, "trial": trial, "guess": guess}
    try:
        figures, images = measured(own, observation, truth, trial, device)
    except AttackFailed as error:
        return row | {"failed": str(error)}
    pictures = out / "pictures" / name.replace("/", "-").replace(" ", "-")
    pictures.mkdir(parents=True, exist_ok=True)
    both = {"truth": truth.images, "images": images}
    write_tensors(pictures / f"{own}-{trial}.safetensors", both)
    return row | figures


def table(out: Path) -> None:
    """Prints a line for each cell and attack: means over batches, Student's intervals of PSNR.

    Its lead is over another attack on the same batches, which `over` names.
    """
    rows = [json.loads(line) for line in (out / "images.jsonl").read_text().splitlines()]
    names = ["model", "epochs", "B", "defense", "attack", "n", "failed", "psnr", "low", "high"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    figures = ["ssim", "labels", "guess", "seconds", "device"]
    figures += ["over", "lead", "lead_low", "lead_high"]
    writer.writerow([*names, *figures])
    for cell in CELLS:
        of_cell = [row for row in rows if row["cell"] == "/".join(map(str, cell))]
        for attack in attackers(cell):
            beside = rival_of(attack, cell)
            rival = {row["trial"]: row["psnr"] for row in _good(of_cell, beside)}
            good = _good(of_cell, attack)
            failed = sum(row["attack"] == attack for row in of_cell) - len(good)
            if not good:
                continue
            leads = [row["psnr"] - rival[row["trial"]] for row in good if row["trial"] in rival]
            line = [*cell, attack, len(good), failed, *_interval([row["psnr"] for row in good])]
            means = ("ssim", "label_accuracy", "guess", "seconds")
            line += [f"{sum(row[key] for row in good) / len(good):.2f}" for key in means]
            line.append("+".join(sorted({row["device"] for row in good})))
            writer.writerow(line + ([] if attack == beside else [beside, *_interval(leads)]))


def _good(rows: list[dict[str, Any]], attack: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["attack"] == attack and "psnr" in row]


def _interval(values: list[float]) -> list[str]:
    """Mean, and both ends of the 95% interval where there is one."""
    if not values:
        return ["", "", ""]
    mean = f"{sum(values) / len(values):.2f}"
    if len(values) < 2:
        return [mean, "", ""]
    low, high = student_interval(values)
    return [mean, f"{low:.2f}", f"{high:.2f}"]


def picture(out: Path, file: Path) -> None:
    """Draws what both attacks made of the first batch of each of some cells, beside the truth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = ("truth", *NAMED)
    blocks = [cell[2] for cell in SHOWN]
    figure = plt.figure(figsize=(0.95 * sum(blocks) + 1.3, 3.9))
    parts = figure.subfigures(1, len(blocks), width_ratios=[blocks[0] + 1.3, *blocks[1:]])
    for place, (part, (cell, title)) in enumerate(zip(parts, SHOWN.items(), strict=True)):
        folder = out / "pictures" / "-".join(map(str, cell)).replace(" ", "-")
        found = {own: read_tensors(folder / f"{own}-0.safetensors") for own in NAMED}
        truth = found[NAMED[0]]["truth"]
        panels = part.subplots(len(rows), len(truth), squeeze=False)
        part.subplots_adjust(0.26 if not place else 0.02, 0.08, 0.98, 0.9, wspace=0.06, hspace=0.2)
        panels[0, 0].set_title(title, loc="left", fontsize=10)
        for name, line in zip(rows, panels, strict=True):
            for column, panel in enumerate(line):
                image = truth[column] if name == "truth" else found[name]["images"][column]
                panel.imshow(image.permute(1, 2, 0).numpy())
                panel.set(xticks=[], yticks=[])
                if name != "truth":
                    error = float((image - truth[column]).square().mean().log10())
                    panel.set_xlabel(f"{-10 * error:.1f} dB", fontsize=8, labelpad=2)
            if not place:
                label = name.replace("_", "\n")
                line[0].set_ylabel(label, rotation=0, ha="right", va="center")
    figure.savefig(file, dpi=100)


def main() -> None:
    """Runs one of the stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("attack", "table", "picture"))
    parser.add_argument("out", type=Path, help="folder of weights and of measured batches")
    parser.add_argument("file", type=Path, nargs="?", help="picture to write")
    parser.add_argument("--batches", type=int, default=3, help="batches of each cell")
    parser.add_argument("--only", nargs="+", default=[], help="cells and attacks with these words")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--workers", type=int, default=1, help="processes that attack")
    asked = parser.parse_args()
    if asked.what == "attack":
        attack(asked.out, asked.only, asked.batches, asked.device, asked.workers)
    elif asked.what == "picture":
        picture(asked.out, asked.file)
    else:
        table(asked.out)


if __name__ == "__main__":
    main()
