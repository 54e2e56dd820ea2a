"""Features, labels and certainty from ordinary classifiers, read by an honest server.

Victims are ResNet-18 (torchvision's stem; group norm, or batch norm in training mode) and the
ConvNet, fresh and after one and five epochs of a client's 2,000 CIFAR-10 images. Each cell attacks
batches of these images behind one defense with `classifier_fit`, labels inferred and nothing
granted, and counts features whose cosine with the true ones is at least 0.999. A hundred classes
are CIFAR-10's ten, each divided into ten clusters of its small images.

    python benchmarks/honest_features.py train OUT --images cifar10-images.zip
    python benchmarks/honest_features.py attack OUT --images cifar10-images.zip [--only WORD ...]
    python benchmarks/honest_features.py table OUT > docs/results/honest-features.csv

`train` keeps weights and `attack` a line for each batch in OUT, and both go on where they ended.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.data.folder import ImageFolder
from fedsim.models.base import build, normalize
from fedsim.recording.files import read_tensors, write_tensors
from fedsim.scoring import summarize
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, LocalTraining, ModelSpec, Observation

PER_CLASS = 200
EPOCHS = (0, 1, 5)
TRAINING_SEED, SEED = 3, 2027
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "resnet18-group": ("resnet18", {"stem": "imagenet", "norm": "group"}, 10),
    "convnet": ("convnet", {}, 10),
    "resnet18-batch": ("resnet18", {"stem": "imagenet", "norm": "batch"}, 10),
    "resnet18-group-100": ("resnet18", {"stem": "imagenet", "norm": "group"}, 100),
}
"""Name: (model, parameters, classes)."""
PLANTED = "resnet18-planted"
"""A victim with the body of the first one, and the two-layer head of `scenarios/reconstruction`'s
tables, most of whose neurons a malicious server has planted."""
_HEAD = {"width": 16384, "planted": 12288, "planted_std": 1.0, "planted_gain": 0.01}
_VICTIMS = {
    **MODELS,
    PLANTED: ("resnet18", {"stem": "imagenet", "norm": "group", "head": _HEAD}, 10),
}
WAYS: dict[str, tuple[int | None, float, list[dict[str, Any]]]] = {
    "clip": (None, 0.0, []),
    "pruning 0.9": (None, 0.0, [{"name": "gradient_pruning", "ratio": 0.9}]),
    "8 bits": (None, 0.0, [{"name": "quantization", "bits": 8}]),
    **{f"noise {share:g}": (None, share, []) for share in (0.001, 0.003, 0.01, 0.03, 0.1)},
    "3 steps": (3, 0.0, []),
    "5 steps": (5, 0.0, []),
}
"""What stands in the way: (local steps, noise over the update's rms, defenses). `clip` is to a
tenth of the update's norm."""
TABLE3: dict[str, list[dict[str, Any]]] = {
    **{
        f"std {std:g}": [{"name": "gaussian_noise", "std": std}] for std in (0.001, 0.01, 0.05, 0.1)
    },
    **{
        f"pruned {ratio:g}": [{"name": "gradient_pruning", "ratio": ratio}]
        for ratio in (0.3, 0.5, 0.7, 0.9, 0.99)
    },
    **{f"norm {norm:g}": [{"name": "clip", "norm": norm}] for norm in (2.0, 4.0, 8.0)},
}
"""The defenses of that table of Liu et al., in absolute units."""
LR, EXACT = 0.01, 0.999


def specification(name: str) -> ModelSpec:
    """The model of a victim, as `fedsim.testing.make_observation` builds it."""
    model, parameters, classes = _VICTIMS[name]
    return ModelSpec(
        name=model,
        parameters=parameters,
        input_shape=(3, 32, 32),
        num_classes=classes,
        mean=(0.4,) * 3,
        std=(0.25,) * 3,
    )


def data(out: Path, path: str) -> dict[str, Tensor]:
    """Images (N, 3, 32, 32) uint8, their classes, and those of a hundred; kept in `out`."""
    kept = out / "images.safetensors"
    if not kept.exists():
        loaded = ImageFolder(path=path, limit=PER_CLASS).load()
        images, labels = loaded.train_images, loaded.train_labels
        tensors = {"images": images, "10": labels, "100": clusters(images, labels)}
        tensors |= {"test": loaded.test_images, "test_10": loaded.test_labels}
        write_tensors(kept, tensors)
    return read_tensors(kept)


def clusters(images: Tensor, labels: Tensor) -> Tensor:
    """Divides each class into ten by k-means on 4x4 pixels: labels of a hundred classes (N,)."""
    from sklearn.cluster import KMeans

    small = F.avg_pool2d(images.float() / 255, 8).flatten(1)
    found = torch.empty_like(labels)
    for label in range(10):
        own = labels == label
        parts = KMeans(10, n_init=4, random_state=0).fit_predict(small[own].numpy())
        found[own] = 10 * label + torch.from_numpy(parts).long()
    return found


def train(out: Path, path: str) -> None:
    """Trains each victim by SGD with momentum on batches of 32, and keeps its weights."""
    kept = data(out, path)
    for name, (_, _, classes) in MODELS.items():
        if (out / f"{name}-{max(EPOCHS)}.safetensors").exists():
            continue
        spec = specification(name)
        model = build(spec, rng.derive(TRAINING_SEED, "model", name))
        model.train()
        stream = rng.generator(TRAINING_SEED, "batches", name)
        images, labels = kept["images"], kept[str(classes)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for epoch in range(max(EPOCHS) + 1):
            if epoch:
                for part in torch.randperm(len(images), generator=stream).split(32):
                    optimizer.zero_grad()
                    inputs = normalize(images[part].float() / 255, spec)
                    F.cross_entropy(model(inputs), labels[part]).backward()
                    optimizer.step()
            if epoch in EPOCHS:
                write_tensors(out / f"{name}-{epoch}.safetensors", model.state_dict())
            print(f"{name}: epoch {epoch}", flush=True)


def cells() -> dict[str, tuple[str, int, int, str]]:
    """All cells: name to (victim, epochs, images, what stands in the way)."""
    found = []
    for epoch in EPOCHS:
        for name in MODELS:
            batches = (32, 64) if name.endswith("-100") else (8, 9)
            found += [(name, epoch, count, "none") for count in batches]
    found += [("resnet18-group", 1, 8, way) for way in WAYS]
    found += [("convnet", 1, 8, way) for way in ("pruning 0.9", "8 bits", "noise 0.01", "3 steps")]
    found += [(name, 1, 4, "pruning 0.9") for name in ("resnet18-group", "convnet")]
    return {"/".join(map(str, cell)): cell for cell in found}


def weights(out: Path, name: str, epoch: int) -> dict[str, Tensor]:
    """A victim's weights, as `train` keeps them; a planted one's body is the first victim's."""
    if name != PLANTED:
        return read_tensors(out / f"{name}-{epoch}.safetensors")
    body = read_tensors(out / f"{next(iter(MODELS))}-{epoch}.safetensors")
    model = build(specification(name), rng.derive(TRAINING_SEED, "model", name))
    planted: dict[str, Tensor] = model.state_dict()
    return planted | {key: tensor for key, tensor in body.items() if key.startswith("body.")}


def observed(
    out: Path,
    kept: dict[str, Tensor],
    cell: tuple[str, int, int, str],
    trial: int,
    chosen: Tensor | None = None,
) -> tuple[Observation, GroundTruth]:
    """The update of a held-out batch of `cell`.

    Args:
        out: folder of the weights.
        kept: images and their classes, as of `data`.
        cell: as of `cells`.
        trial: number of the batch.
        chosen: which images (N,) it has; None: drawn from all.
    """
    name, epoch, count, way = cell
    model, parameters, classes = _VICTIMS[name]
    if chosen is None:
        # A planted victim gets the batches of the one whose body it has.
        whose = next(iter(MODELS)) if name == PLANTED else name
        stream = rng.generator(SEED, "batch", whose, epoch, count, trial)
        chosen = torch.randperm(len(kept["images"]), generator=stream)[:count]
    training, noise, defense = WAYS.get(way, (None, 0.0, TABLE3.get(way, [])))
    local = None
    if training:
        local = LocalTraining(
            algorithm="fedavg", steps=training, batch_size=count, lr=LR, batches="same"
        )
    made = partial(
        make_observation,
        kept["images"][chosen].float() / 255,
        kept[str(classes)][chosen],
        model=model,
        model_parameters=parameters,
        num_classes=classes,
        training=local,
        seed=trial,
        weights=weights(out, name, epoch),
    )
    if noise or way == "clip":
        update, _ = made()
        entries = torch.cat([tensor.flatten() for tensor in update.update.values()])
        std = noise * float(entries.square().mean().sqrt())
        bound = 0.1 * float(entries.norm())
        defense = (
            [{"name": "gaussian_noise", "std": std}] if noise else [{"name": "clip", "norm": bound}]
        )
    return made(defense=defense)


def measured(observation: Observation, truth: GroundTruth, trial: int) -> dict[str, Any]:
    """How near the features of one batch come, and what the attack says of itself."""
    assert truth.features is not None
    start = time.process_time()
    found = solve(create("classifier_fit"), observation, Knowledge(), seed=trial).reconstruction
    seconds = time.process_time() - start
    assert found.features is not None and found.labels is not None
    assert found.determined is not None
    ours = F.normalize(found.features.double(), dim=1)
    true = F.normalize(truth.features.double(), dim=1)
    cosines = true @ ours.T
    rows, columns = linear_sum_assignment(-cosines.numpy())
    cosine = cosines[rows, columns]
    exact = cosine >= EXACT
    certain = found.determined[columns]
    mean = F.normalize(true.mean(0), dim=0)
    return {
        "share": float(exact.double().mean()),
        "cosine": float(cosine.mean()),
        "mean_feature": float(((true @ mean) >= EXACT).double().mean()),
        "labels": float((found.labels[columns] == truth.labels).double().mean()),
        "determined": float(certain.double().mean()),
        "false": int((certain & ~exact).sum()),
        "loss": found.loss,
        "seconds": seconds,
    }


def attack(out: Path, path: str, trials: int, only: list[str]) -> None:
    """Attacks every cell's batches, the first of all cells before the second of any."""
    kept, file = data(out, path), out / "batches.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    done = {(row["cell"], row["trial"]) for row in map(json.loads, lines)}
    wanted = [
        (name, cell, trial)
        for trial in range(trials)
        for name, cell in cells().items()
        if (name, trial) not in done and all(word in name for word in only)
    ]
    for number, (name, cell, trial) in enumerate(wanted):
        row: dict[str, Any] = {"cell": name, "trial": trial}
        try:
            row |= measured(*observed(out, kept, cell, trial), trial)
        except AttackFailed as error:
            row |= {"failed": str(error)}
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        told = row.get("failed") or f"{row['share']:.2f} ({row['seconds']:.1f} s)"
        print(f"{number + 1}/{len(wanted)} {name} {trial}: {told}", flush=True)


def table(out: Path) -> None:
    """Prints a line for each cell: means over batches, and Student's interval of the share."""
    rows = [json.loads(line) for line in (out / "batches.jsonl").read_text().splitlines()]
    names = ["model", "epochs", "B", "defense", "n", "failed", "share", "low", "high"]
    means = ["cosine", "mean_feature", "labels", "determined", "seconds"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*names, *means, "false_determined"])
    for name, cell in cells().items():
        own = [row for row in rows if row["cell"] == name]
        good = [row for row in own if "failed" not in row]
        if not own:
            continue
        shares = [row["share"] if "failed" not in row else 0.0 for row in own]
        found = summarize(shares)
        assert found is not None
        figures = [_rounded(value) for value in (found.mean, found.low, found.high)]
        figures += [
            _rounded(statistics.fmean(r[key] for r in good) if good else None) for key in means
        ]
        false = sum(row["false"] for row in good)
        writer.writerow([*cell, len(own), len(own) - len(good), *figures, false])


def _rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 4)


def main() -> None:
    """Runs one of the three stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("train", "attack", "table"))
    parser.add_argument("out", type=Path, help="folder of weights and of measured batches")
    parser.add_argument("--images", default="cifar10-images.zip", help="CIFAR-10, an image_folder")
    parser.add_argument("--trials", type=int, default=20, help="batches of each cell")
    parser.add_argument("--only", nargs="+", default=[], help="cells with all of these words")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.what == "train":
        train(asked.out, asked.images)
    elif asked.what == "attack":
        attack(asked.out, asked.images, asked.trials, asked.only)
    else:
        table(asked.out)


if __name__ == "__main__":
    main()
