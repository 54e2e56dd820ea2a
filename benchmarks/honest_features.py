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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim.data.folder import ImageFolder
from fedsim.models.base import build, normalize
from fedsim.recording.files import read_tensors, write_tensors
from fedsim.types import ModelSpec

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


def specification(name: str) -> ModelSpec:
    """The model of a victim, as `fedsim.testing.make_observation` builds it."""
    model, parameters, classes = MODELS[name]
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("out", type=Path)
    parser.add_argument("--images")
    a = parser.parse_args()
    torch.set_num_threads(1)
    a.out.mkdir(exist_ok=True)
    train(a.out, a.images)
