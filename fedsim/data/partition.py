"""Divides the training set among clients, by label, at random or as a file says."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedsim import rng
from fedsim.system import paths
from fedsim.types import Dataset, FedsimError, Table
from fedsim.words import number_of

if TYPE_CHECKING:
    from fedsim.scenario.model import Partition

_DRAWS = 11
"""Maximum number of draws of `dirichlet` before it gives up."""


def partition(
    dataset: Dataset | Table, config: Partition, clients: int, seed: int, *, min_images: int = 1
) -> list[Tensor]:
    """Returns each client's training indices, int64: sorted, disjoint, together all of them.

    `iid`: parts of equal size (to within one) in random order. `dirichlet`: each class is divided
    in proportions drawn from Dir(alpha) (Hsu, Qi and Brown 2019). `shards`: the set is sorted by
    class and cut into clients x shards_per_client equal shards, dealt at random (McMahan et al.
    2017). `natural`: the source knows whose each image is. `file`: a CSV file with columns
    `index,client`, both from 0, or (suffix .json) a JSON list of each image's client.

    Args:
        dataset: Data whose training examples are divided.
        config: Kind of division, with the parameter that it takes.
        clients: Number of parts, at least 1.
        seed: Seed of every draw.
        min_images: Least number of examples of a client.

    Raises:
        FedsimError: there is no such division, none was found, or the file is wrong.
    """
    count = len(dataset.train_labels)
    if clients * min_images > count:
        raise FedsimError(
            f"{number_of(clients, 'client')} of at least {number_of(min_images, 'image')} need "
            f"{number_of(clients * min_images, 'training image')}, "
            f"{dataset.name} has {count}: lower data.clients or use a larger source"
        )
    if config.path is not None:
        parts = _by_owner(_read_owners(paths.from_home(config.path), count, clients))
    elif config.name == "natural":
        parts = _by_owner(_natural_owners(dataset, clients))
    else:
        parts = _draw_parts(dataset.train_labels, config, clients, seed, min_images)
    # Owners that a file or the source names may have any number of images.
    smallest = min(range(clients), key=lambda client: len(parts[client]))
    if len(parts[smallest]) < min_images:
        raise FedsimError(
            f"partition {config.name} leaves client {smallest} with "
            f"{number_of(len(parts[smallest]), 'image')}, "
            f"fewer than {min_images}: lower data.clients or choose another partition"
        )
    return parts


def _draw_parts(
    labels: Tensor, config: Partition, clients: int, seed: int, min_images: int
) -> list[Tensor]:
    # Rows are shuffled first, since sources are in class order and `iid` cuts contiguous parts.
    rows = torch.randperm(len(labels), generator=rng.generator(seed, "rows"))
    draws = np.random.default_rng(rng.derive(seed, "draw"))
    if config.name == "iid":
        parts = list(torch.tensor_split(rows, clients))
    elif config.name == "shards":
        shards = clients * _whole_shards(len(labels), clients, config.shards_per_client or 0)
        # A stable sort leaves the rows of a class in their shuffled order.
        by_class = rows[labels[rows].argsort(stable=True)].view(shards, -1)
        parts = list(by_class[torch.from_numpy(draws.permutation(shards))].view(clients, -1))
    else:
        parts = _dirichlet(labels, rows, float(config.alpha or 0), clients, draws, min_images)
    return [part.sort().values for part in parts]


def _dirichlet(
    labels: Tensor,
    rows: Tensor,
    alpha: float,
    clients: int,
    draws: np.random.Generator,
    min_images: int,
) -> list[Tensor]:
    """Divides each class in proportions from Dir(alpha), anew until all parts are large enough."""
    members = [rows[labels[rows] == label] for label in torch.unique(labels)]
    for _ in range(_DRAWS):
        pieces = []
        for of_class in members:
            shares = np.cumsum(draws.dirichlet(np.full(clients, alpha)))
            # Only inner borders: the last sum may round below 1, and an image would be nobody's.
            cuts = (shares * len(of_class)).astype(int)[:-1]
            pieces.append(torch.tensor_split(of_class, cuts.tolist()))
        parts = [torch.cat(of_client) for of_client in zip(*pieces, strict=True)]
        if min(map(len, parts)) >= min_images:
            return parts
    raise FedsimError(
        f"{_DRAWS} draws from Dir({alpha}) all left some of {number_of(clients, 'client')} with "
        f"fewer than {min_images} of {number_of(len(labels), 'image')}: raise "
        "data.partition.alpha or lower data.clients"
    )


def _whole_shards(count: int, clients: int, per_client: int) -> int:
    """Returns `per_client` if clients x per_client equal shards use every image; else refuses."""
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
        f"shards: {remedy}"
    )


def _by_owner(owners: Tensor) -> list[Tensor]:
    # A stable sort keeps the indices of each owner ascending.
    counts = torch.unique(owners, return_counts=True)[1]
    return list(torch.split(owners.argsort(stable=True), counts.tolist()))


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
            f"{clients}: set data.clients to {owners}"
        )
    return dataset.client_of


def _read_owners(path: Path, count: int, clients: int) -> Tensor:
    try:
        # A spreadsheet's byte-order mark would become part of the first column's name.
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
    # The symmetric difference holds clients without images as well as clients that do not exist.
    wrong = {client for _, client in owner_of} ^ set(range(clients))
    if wrong:
        raise FedsimError(
            f"the partition file {path} must give images to the clients 0 to {clients - 1} and no "
            f"others (see client {min(wrong)}): correct it, or set data.clients to what it has"
        )
    return torch.tensor([client for _, client in sorted(owner_of)], dtype=torch.int64)


def _parse(text: str, is_json: bool) -> list[tuple[int, int]]:
    if not is_json:
        rows = csv.DictReader(io.StringIO(text), strict=True)
        return [(int(row["index"]), int(row["client"])) for row in rows]
    owners = json.loads(text)
    # JSON's true is an instance of int, and no client.
    if not isinstance(owners, list) or not all(type(client) is int for client in owners):
        raise TypeError("expected a list of whole numbers")
    return list(enumerate(owners))
