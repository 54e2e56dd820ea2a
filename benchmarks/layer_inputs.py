"""Inputs of layers read by an honest server: features where there are more images than classes.

Victims are fully connected networks (256 and 128 neurons, ReLU), fresh and trained, on digits and
CIFAR-10, and ResNet-18 (torchvision's stem, group norm) with weights that
`benchmarks/honest_features.py train` has kept, or fresh. For each attack and batch size it prints a
line: how many features and images have a relative error below 0.001, how many were called
determined, how many of these were wrong (in features or image, by more than 0.03), labels, seconds
of CPU time of one thread. `--csv` adds a line for each batch to a file.

    python benchmarks/layer_inputs.py mlp --images cifar10-images.zip --batches 5
    python benchmarks/layer_inputs.py resnet --images cifar10-images.zip --weights FILE --batches 5
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Mapping
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
from fedsim.data.bundled import Digits
from fedsim.data.folder import ImageFolder
from fedsim.models.base import build, normalize
from fedsim.recording.files import read_tensors
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, Observation

MLP: list[tuple[str, dict[str, Any], int]] = [
    ("spear", {"iterations": 600}, 20),
    ("spear", {"search": "descent", "iterations": 20}, 20),
    ("spear", {"search": "descent", "iterations": 20}, 32),
    ("extreme_rays", {}, 20),
    ("extreme_rays", {}, 32),
    ("cocktail_party", {"iterations": 1000}, 20),
]
"""Attack, parameters, images."""
COLUMNS = [
    *("victim", "images", "steps", "attack", "options", "batch_size", "batch"),
    *("exact_features", "exact_images", "determined", "wrong", "labels", "cpu_seconds"),
]
RESNET: list[tuple[str, dict[str, Any], int]] = [
    ("extreme_rays", {}, count) for count in (8, 16, 32)
]


def main() -> None:
    """Prints a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("victim", choices=("mlp", "resnet"))
    parser.add_argument("--images", required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of training an mlp, B = 32")
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--seed", type=int, default=7, help="of the batches")
    given = parser.parse_args()
    torch.set_num_threads(1)
    source = Digits() if given.digits else ImageFolder(path=given.images, limit=200)
    data = source.load()
    images, labels = data.train_images.float() / 255, data.train_labels
    images, labels = images[labels < given.classes], labels[labels < given.classes]
    model, parameters = (
        ("mlp", {})
        if given.victim == "mlp"
        else ("resnet18", {"stem": "imagenet", "norm": "group"})
    )
    weights = read_tensors(given.weights) if given.weights else {}
    for attack, options, count in MLP if given.victim == "mlp" else RESNET:
        if given.only not in f"{attack} {options} {count}":
            continue
        lines = []
        for batch in range(given.batches):
            stream = rng.generator(given.seed, "layer inputs", batch)
            chosen = torch.randperm(len(images), generator=stream)[:count]
            observe = partial(
                make_observation,
                images[chosen],
                labels[chosen],
                model=model,
                model_parameters=parameters,
                num_classes=given.classes,
            )
            if given.steps and not weights:
                weights = train_model(observe()[0], images, labels, given.steps)
            observation, truth = observe(weights=weights) if weights else observe()
            lines.append(measured(attack, options, observation, truth))
            if given.csv:
                keep(given.csv, given, attack, options, count, batch, lines[-1])
        total = torch.tensor(lines).double()
        found, shown, certain, wrong, right = (int(n) for n in total[:, :5].sum(0))
        whole = sum(line[1 if given.victim == "mlp" else 0] == count for line in lines)
        print(
            f"{given.victim} {attack} {options} B={count}: exact {found}/{count * len(lines)}, "
            f"images {shown}, whole batches {whole}/{len(lines)}, "
            f"determined {certain}, of these wrong {wrong}, labels {right}, "
            f"{total[:, 5].median():.1f} s (longest {total[:, 5].max():.1f})",
            flush=True,
        )


def keep(
    path: Path,
    given: argparse.Namespace,
    attack: str,
    options: Mapping[str, Any],
    count: int,
    batch: int,
    line: tuple[float, ...],
) -> None:
    """Adds a batch to a file."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        rows = csv.writer(file)
        if new:
            rows.writerow(COLUMNS)
        images = "digits" if given.digits else "cifar10"
        what = " ".join(f"{key}={value}" for key, value in options.items())
        numbers = [*(int(n) for n in line[:5]), f"{line[5]:.2f}"]
        rows.writerow([given.victim, images, given.steps, attack, what, count, batch, *numbers])


def measured(
    attack: str, options: Mapping[str, Any], observation: Observation, truth: GroundTruth
) -> tuple[float, float, float, float, float, float]:
    """Attacks; counts exact features and images, determined ones, wrong of these, labels; seconds.

    A determined one is wrong if it is near no image of the batch.
    """
    start = time.process_time()
    try:
        found = solve(create(attack, options), observation, Knowledge(), 0).reconstruction
    except AttackFailed as error:
        print(" ", error)
        return 0, 0, 0, 0, 0, time.process_time() - start
    seconds = time.process_time() - start
    assert found.features is not None and truth.features is not None
    certain = found.determined
    if certain is None:
        certain = torch.zeros(len(found.features), dtype=torch.bool)
    order, errors, nearest = compared(found.features, truth.features)
    wrong, shown = nearest > 0.03, 0
    if found.images is not None:
        _, pixels, nearest_image = compared(found.images.flatten(1), truth.images.flatten(1))
        shown, wrong = int((pixels < 1e-3).sum()), wrong | (nearest_image > 0.03)
    right = 0 if found.labels is None else int((found.labels[order] == truth.labels).sum())
    exact = int((errors < 1e-3).sum())
    return exact, shown, int(certain.sum()), int((certain & wrong).sum()), right, seconds


def compared(found: Tensor, true: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Matches rows; returns which is whose, each true one's error, and each found one's least."""
    costs = torch.cdist(true.double(), found.double()) / true.double().norm(dim=1, keepdim=True)
    order = torch.from_numpy(linear_sum_assignment(costs.numpy())[1])
    return order, costs.gather(1, order[:, None])[:, 0], costs.amin(0)


def train_model(
    observation: Observation, images: Tensor, labels: Tensor, steps: int
) -> dict[str, Tensor]:
    """Trains the observation's model with SGD on batches of 32 of all images; its weights."""
    model = build(observation.model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = rng.generator(7, "training")
    for _ in range(steps):
        chosen = torch.randint(len(images), (32,), generator=stream)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(normalize(images[chosen], observation.model)), labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        answers = model(normalize(images, observation.model)).argmax(1)
    print(f"trained for {steps} steps: {float((answers == labels).double().mean()):.2f} correct")
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    main()
