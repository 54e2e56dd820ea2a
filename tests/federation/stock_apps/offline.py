"""Stands in for downloads: the data sets that stock apps name, from what packages bring along.

It has the two names that the apps import, so that each import is the only line that changes.
`uoft-cs/cifar10` becomes 320 photographs' crops of 32x32 pixels in 8 classes, and the sets of
28x28 gray pixels become 1797 handwritten digits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from PIL import Image

from fedsim.data.bundled import Digits, Photos


@cache
def _loaded(name: str) -> DatasetDict:
    colored = "cifar" in name
    source = Photos().load() if colored else Digits(size=28).load()
    # Photographs lie one after the other: a shuffled set is what the original is.
    order = torch.randperm(len(source.train_images), generator=torch.Generator().manual_seed(0))
    splits = {
        "train": (source.train_images[order], source.train_labels[order]),
        "test": (source.test_images, source.test_labels),
    }
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {
                    "img" if colored else "image": [_picture(each) for each in images],
                    "label": labels.tolist(),
                }
            )
            for split, (images, labels) in splits.items()
        }
    )


def _picture(image: torch.Tensor) -> Image.Image:
    pixels = image.permute(1, 2, 0).numpy()
    return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])


def load_dataset(name: str, split: str | None = None) -> Any:
    """As `datasets.load_dataset`."""
    found = _loaded(name)
    return found if split is None else found[split]


class FederatedDataset:
    """As `flwr_datasets.FederatedDataset`, of the split called `train`."""

    def __init__(self, *, dataset: str, partitioners: dict[str, Any]) -> None:
        self._partitioner = partitioners["train"]
        self._partitioner.dataset = _loaded(dataset)["train"]

    def load_partition(self, partition_id: int) -> Any:
        return self._partitioner.load_partition(partition_id)


def load_from_disk(path: str) -> Any:
    """As `datasets.load_from_disk`, of gray images; `path` is `3-of-60`, a client's partition."""
    number, _, count = path.partition("-of-")
    partition = _loaded("mnist")["train"].shard(num_shards=int(count), index=int(number))
    return partition.train_test_split(test_size=0.2, seed=42)
