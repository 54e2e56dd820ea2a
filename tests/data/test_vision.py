"""torchvision's sets: read from tiny files in torchvision's own layout; nothing is downloaded."""

import hashlib
import pickle
import struct

import numpy as np
import pytest
import torch

from fedsim.contracts import plugins
from fedsim.data.vision import CIFAR10, CIFAR100, MNIST
from fedsim.types import FedsimError

SOURCES = {"cifar10": CIFAR10, "cifar100": CIFAR100, "mnist": MNIST}


@pytest.mark.parametrize("name", SOURCES)
def test_missing_data_says_where_it_looked_and_what_to_do(name, tmp_path):
    assert plugins.load("fedsim.data", name) is SOURCES[name]
    with pytest.raises(FedsimError) as caught:
        SOURCES[name](root=str(tmp_path / "nowhere")).load()
    message = str(caught.value)
    assert name in message
    assert str(tmp_path / "nowhere") in message
    assert "download: true" in message
    assert not (tmp_path / "nowhere").exists()


def test_mnist(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.arange(3 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(3, 28, 28)
    for split, count in (("train", 3), ("t10k", 2)):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", 0x803, count, 28, 28) + images[:count].tobytes()
        )
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 0x801, count) + bytes([7, 0, 9][:count])
        )
    data = MNIST(root=str(tmp_path)).load()
    assert torch.equal(data.train_images[:, 0], torch.from_numpy(images))
    assert data.train_labels.tolist() == [7, 0, 9]
    assert data.test_images.shape == (2, 1, 28, 28)
    assert (data.mean, data.std) == ((0.1307,), (0.3081,))
    assert len(data.classes) == 10


@pytest.mark.parametrize(("name", "labels"), [("cifar10", "labels"), ("cifar100", "fine_labels")])
def test_cifar(name, labels, tmp_path, monkeypatch):
    import torchvision.datasets

    kind = getattr(torchvision.datasets, name.upper())
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    pixels = np.arange(4 * 3072, dtype=np.uint32).astype(np.uint8).reshape(4, 3072)
    batch = pickle.dumps({"data": pixels, labels: [1, 0, 2, 1]})
    meta = pickle.dumps({kind.meta["key"]: ["a", "b", "c"]})
    (folder / "batch").write_bytes(batch)
    (folder / "meta").write_bytes(meta)
    listed = [["batch", hashlib.md5(batch, usedforsecurity=False).hexdigest()]]
    monkeypatch.setattr(kind, "train_list", listed)
    monkeypatch.setattr(kind, "test_list", listed)
    monkeypatch.setattr(
        kind,
        "meta",
        {
            **kind.meta,
            "filename": "meta",
            "md5": hashlib.md5(meta, usedforsecurity=False).hexdigest(),
        },
    )
    data = SOURCES[name](root=str(tmp_path)).load()
    assert torch.equal(data.train_images, torch.from_numpy(pixels).view(4, 3, 32, 32))
    assert data.train_images.dtype == torch.uint8
    assert data.test_labels.tolist() == [1, 0, 2, 1]
    assert data.classes == ("a", "b", "c")
    assert data.train_images.is_contiguous()
    (folder / "batch").write_bytes(batch + b"altered")
    with pytest.raises(FedsimError, match="corrupted"):
        SOURCES[name](root=str(tmp_path)).load()
