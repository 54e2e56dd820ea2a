"""Divides the training set among clients, by Flower's own partitioners."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsim import rng
from fedsim.system import paths
from fedsim.types import Dataset, FedsimError, Table
from fedsim.words import number_of

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

    from fedsim.scenario.model import Partition

_PARAMETERS = {"dirichlet": "alpha", "shards": "shards_per_client", "file": "path"}
_OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def partition(
    dataset: Dataset | Table, config: Partition, clients: int, seed: int, *, min_images: int = 1
) -> list[Tensor]:
    """Returns the training indices of each client: sorted, disjoint, together all of them.

    `iid`: parts of equal size (to within one) in random order. `dirichlet`: each class is divided
    in proportions drawn from Dir(alpha) (Hsu, Qi and Brown 2019). `shards`: the set is sorted by
    class and cut into clients x shards_per_client equal shards, dealt at random (McMahan et al.
    2017); a shard at the border of two classes holds both. `natural`: the source knows whose each
    image is. `file`: a CSV file with columns `index,client`, or a JSON list of each image's client.

    Args:
        dataset: its training split is divided.
        config: which of the above, with its parameter.
        clients: how many parts.
        seed: same seed, same parts.
        min_images: the fewest images a client may end up with.

    Raises:
        FedsimError: no such division exists or was found, with the remedy.
    """
    count = len(dataset.train_labels)
    _check_parameters(config)
    if clients * min_images > count:
        raise FedsimError(
            f"{number_of(clients, 'client')} of at least {number_of(min_images, 'image')} need "
            f"{number_of(clients * min_images, 'training image')}, "
            f"{dataset.name} has {count}: lower data.clients or use a larger source"
        )
    if config.path is not None:
        parts = _by_owner(_read_owners(paths.from_home(config.path), count, clients), clients)
    elif config.name == "natural":
        parts = _by_owner(_natural_owners(dataset, clients), clients)
    else:
        parts = _drawn(dataset.train_labels, config, clients, seed, min_images)
    smallest = min(range(clients), key=lambda client: len(parts[client]))
    if len(parts[smallest]) < min_images:
        raise FedsimError(
            f"partition {config.name} leaves client {smallest} with "
            f"{number_of(len(parts[smallest]), 'image')}, "
            f"fewer than {min_images}: lower data.clients or choose another partition"
        )
    return parts


def _check_parameters(config: Partition) -> None:
    needed = _PARAMETERS.get(config.name)
    for name in _PARAMETERS.values():
        is_given = getattr(config, name) is not None
        if name == needed and not is_given:
            raise FedsimError(f"partition {config.name} needs {name}: set data.partition.{name}")
        if name != needed and is_given:
            raise FedsimError(
                f"partition {config.name} has no {name}: remove data.partition.{name}"
            )


def _drawn(
    labels: Tensor, config: Partition, clients: int, seed: int, min_images: int
) -> list[Tensor]:
    # Rows are shuffled first: the sources are in class order, and Flower's IidPartitioner cuts
    # contiguous parts.
    rows = torch.randperm(len(labels), generator=rng.generator(seed, "rows"))
    draw_seed = rng.derive(seed, "draw")
    with _quiet_and_offline():
        from flwr_datasets.partitioner import (
            DirichletPartitioner,
            IidPartitioner,
            ShardPartitioner,
        )

        if config.name == "iid":
            return _parts(IidPartitioner(num_partitions=clients), rows, labels[rows], clients)
        if config.name == "shards":
            per_client = _whole_shards(len(labels), clients, config.shards_per_client or 0)
            sharder = ShardPartitioner(
                num_partitions=clients,
                partition_by="label",
                num_shards_per_partition=per_client,
                shuffle=False,
                seed=draw_seed,
            )
            return _parts(sharder, rows, labels[rows], clients)
        sampler = DirichletPartitioner(
            num_partitions=clients,
            partition_by="label",
            alpha=float(config.alpha or 0),
            min_partition_size=min_images,
            shuffle=False,
            seed=draw_seed,
        )
        try:
            return _parts(sampler, rows, labels[rows], clients)
        except ValueError as error:
            raise FedsimError(
                f"ten draws from Dir({config.alpha}) all left some of "
                f"{number_of(clients, 'client')} with fewer than {min_images} of "
                f"{number_of(len(labels), 'image')}: raise data.partition.alpha or lower "
                "data.clients"
            ) from error


def _whole_shards(count: int, clients: int, per_client: int) -> int:
    """Returns `per_client`, if clients x per_client shards of equal size use every image."""
    if count % (clients * per_client) == 0:
        return per_client
    fitting = [n for n in range(1, count // clients + 1) if count % (clients * n) == 0]
    nearest = sorted(sorted(fitting, key=lambda n: abs(n - per_client))[:3])
    remedy = (
        f"set data.partition.shards_per_client to {' or '.join(map(str, nearest))}"
        if nearest
        else f"choose data.clients so that it divides {count}"
    )
    raise FedsimError(
        f"{number_of(count, 'training image')} cannot be cut into {clients} x {per_client} equal "
        "shards: "
        f"{remedy}"
    )


def _by_owner(owners: Tensor, clients: int) -> list[Tensor]:
    with _quiet_and_offline():
        from flwr_datasets.partitioner import NaturalIdPartitioner

        rows = torch.arange(len(owners))
        return _parts(NaturalIdPartitioner(partition_by="label"), rows, owners, clients)


def _parts(partitioner: Partitioner, rows: Tensor, labels: Tensor, clients: int) -> list[Tensor]:
    """Lets `partitioner` divide the rows, whose images and labels are given."""
    from datasets import Dataset as Arrow

    partitioner.dataset = Arrow.from_dict({"row": rows.tolist(), "label": labels.tolist()})
    return [
        torch.tensor(partitioner.load_partition(client)["row"], dtype=torch.int64).sort().values
        for client in range(clients)
    ]


@contextlib.contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """Silences Flower: no telemetry, no look-up on a hub, no progress bars or warnings."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(_OFFLINE)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _natural_owners(dataset: Dataset | Table, clients: int) -> Tensor:
    if dataset.client_of is None:
        raise FedsimError(
            f"{dataset.name} does not say whose its examples are: use another partition, or a "
            "source that knows (image_folder with `client_folders: true`, table with `client`)"
        )
    owners = len(set(dataset.client_of.tolist()))
    if owners != clients:
        raise FedsimError(
            f"{dataset.name} has {number_of(owners, 'natural client')}, the scenario asks for "
            f"{clients}: set "
            f"data.clients to {owners}"
        )
    return dataset.client_of


def _read_owners(path: Path, count: int, clients: int) -> Tensor:
    """Reads the client of each training image, (count,), from a CSV or JSON file."""
    try:
        written = paths.text(path, paths.TEXT, encoding="utf-8-sig")
        owner_of = _parse(written, path.suffix.lower() == ".json")
    except OSError as error:
        raise FedsimError(
            f"the partition file {path} cannot be read ({error.strerror}): correct "
            "data.partition.path"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        raise FedsimError(
            f"the partition file {path} is not understood ({type(error).__name__}: {error}): write "
            "a CSV file with columns index,client or a JSON list of each image's client"
        ) from error
    if sorted(index for index, _ in owner_of) != list(range(count)):
        raise FedsimError(
            f"the partition file {path} must name each training index from 0 to {count - 1} "
            f"exactly once; it has {number_of(len(owner_of), 'entry', 'entries')}"
        )
    wrong = {client for _, client in owner_of} ^ set(range(clients))
    if wrong:
        raise FedsimError(
            f"the partition file {path} must give images to the clients 0 to {clients - 1} and no "
            f"others (see client {min(wrong)}): correct it, or set data.clients to what it has"
        )
    return torch.tensor([client for _, client in sorted(owner_of)], dtype=torch.int64)


def _parse(text: str, is_json: bool) -> list[tuple[int, int]]:
    """Returns (index, client) pairs, in the file's order."""
    if not is_json:
        rows = csv.DictReader(io.StringIO(text), strict=True)
        return [(int(row["index"]), int(row["client"])) for row in rows]
    owners = json.loads(text)
    if not isinstance(owners, list) or not all(type(client) is int for client in owners):
        raise TypeError("expected a list of whole numbers")
    return list(enumerate(owners))
