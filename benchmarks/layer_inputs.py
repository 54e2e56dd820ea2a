"""Inputs of layers read by an honest server: features where there are more images than classes.

Victims are fully connected networks (256 and 128 neurons, ReLU), fresh and trained, on digits and
CIFAR-10, and ResNet-18 (torchvision's stem, group norm) with weights that
`benchmarks/honest_features.py train` has kept, or fresh. For each attack and batch size it prints a
line: how many features have a relative error below 0.001, how many were called determined, how many
of these were wrong, labels, seconds.

    python benchmarks/layer_inputs.py mlp --images cifar10-images.zip --batches 5
    python benchmarks/layer_inputs.py resnet --images cifar10-images.zip --weights FILE --batches 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
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
from fedsim.learners.sgd import train
from fedsim.models.base import build, normalize
from fedsim.models.local import features_of
from fedsim.recording.files import read_tensors
from fedsim.scenario.build import build_stack
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, Observation

MLP: list[tuple[str, dict[str, Any], int]] = [
    ("spear", {"iterations": 600}, 20),
    ("spear", {"search": "descent", "iterations": 20}, 20),
    ("spear", {"search": "descent", "iterations": 20}, 32),
    ("extreme_rays", {}, 20),
]
"""Attack, parameters, images."""
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
            stream = rng.generator(7, "layer inputs", batch)
            chosen = torch.randperm(len(images), generator=stream)[:count]
            observation, truth = make_observation(
                images[chosen],
                labels[chosen],
                model=model,
                model_parameters=parameters,
                num_classes=given.classes,
            )
            if given.steps and not weights:
                weights = trained(observation, images, labels, given.steps)
            if weights:
                observation, truth = with_weights(observation, truth, weights)
            lines.append(measured(attack, options, observation, truth))
        total = torch.tensor(lines).double()
        found, certain, wrong, right = (int(n) for n in total[:, :4].sum(0))
        whole = sum(line[0] == count for line in lines)
        print(
            f"{given.victim} {attack} {options} B={count}: exact {found}/{count * len(lines)}, "
            f"whole batches {whole}/{len(lines)}, determined {certain}, of these wrong {wrong}, "
            f"labels {right}, {total[:, 4].median():.1f} s (longest {total[:, 4].max():.1f})",
            flush=True,
        )


def measured(
    attack: str, options: Mapping[str, Any], observation: Observation, truth: GroundTruth
) -> tuple[float, float, float, float, float]:
    """Attacks; counts exact features, determined ones, wrong ones of these, labels; and seconds."""
    start = time.perf_counter()
    try:
        found = solve(create(attack, options), observation, Knowledge(), 0).reconstruction
    except AttackFailed as error:
        print(" ", error)
        return 0, 0, 0, 0, time.perf_counter() - start
    seconds = time.perf_counter() - start
    assert found.features is not None and truth.features is not None
    assert found.determined is not None
    costs = torch.cdist(truth.features.double(), found.features.double())
    order = torch.from_numpy(linear_sum_assignment(costs.numpy())[1])
    errors = costs.gather(1, order[:, None])[:, 0] / truth.features.norm(dim=1)
    certain = found.determined[order]
    right = 0 if found.labels is None else int((found.labels[order] == truth.labels).sum())
    return (
        int((errors < 1e-3).sum()),
        int(certain.sum()),
        int((certain & (errors > 0.03)).sum()),
        right,
        seconds,
    )


def trained(
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


def with_weights(
    observation: Observation, truth: GroundTruth, weights: Mapping[str, Tensor]
) -> tuple[Observation, GroundTruth]:
    """Lets the client compute its gradient under other weights."""
    model = build(observation.model, 0)
    model.load_state_dict(dict(weights))
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())
    images = normalize(truth.images, observation.model)
    stream = rng.generator(7, "client")
    batches = [(images, truth.labels)]
    update = train(
        model, parameters, buffers, batches, observation.training, build_stack([]), stream
    ).update
    features = features_of(model, parameters, buffers, images, observation.training)
    seen = replace(observation, update=update, parameters=parameters, buffers=buffers)
    return seen, replace(truth, features=features)


if __name__ == "__main__":
    main()
