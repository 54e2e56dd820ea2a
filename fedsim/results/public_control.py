"""Updates of public images: what an attack is compared with where no other client is recorded.

Another batch of the same client is no control, since data of one client look alike. So the attack
is run once more for each of its cells, on what a client with public images would have answered in
the same round: the same weights, local training and defenses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedsim import rng
from fedsim.attacking.jobs import reconstruction_path
from fedsim.recording.files import load_observation, path_of, save_observation
from fedsim.recording.truth import save_truth
from fedsim.results.record import CONTROL, Row
from fedsim.training.client import Client
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.types import Dataset

Cell = tuple[Any, ...]
"""(stack, attack label, vantage, batch size, round)."""


def folder_of(root: Path) -> Path:
    """Returns the folder of a run's updates of public images, and of what was made of them."""
    return root / CONTROL


def cell_of(row: Row) -> Cell:
    """Returns what a row shares with those that may be its control."""
    stack, attack = row["defense"]["name"], row["attack"]["label"]
    return (stack, attack, row["vantage"], row["batch_size"], row["round"])


def made_of_public(members: Sequence[Row], root: Path) -> Path | None:
    """Returns the file of what a cell’s attack made of public images; None if there is none."""
    for row in members:
        path = reconstruction_path(folder_of(root), row["attack"]["label"], row["observation"])
        if path.exists():
            return path
    return None


def record_public(
    rows: Sequence[Row], root: Path, servers: Mapping[str, Server]
) -> list[tuple[str, Path]]:
    """Records updates of public images for cells without another client's update.

    Returns:
        (attack label, the recording's JSON file) of each attack that is still to be made.
    """
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok" and row["release"] is None:
            cells.setdefault(cell_of(row), []).append(row)
    asked = []
    for members in cells.values():
        first = members[0]
        alone = {row["client"] for row in members} == {first["client"]}
        if not alone or first["vantage"] not in ("server", "eavesdropper"):
            continue
        if made_of_public(members, root):
            continue
        path = path_of(folder_of(root), first["observation"])
        if path.exists() or _record(first, root, servers[first["defense"]["name"]]):
            asked.append((first["attack"]["label"], path))
    return asked


def _record(row: Row, root: Path, server: Server) -> bool:
    """Records the update of public images in the place of a row's; whether there can be one."""
    data = server.described
    if not isinstance(data, Dataset) or server.stack.aggregation is not None:
        return False  # a masked part of a sum shows nothing by itself
    seen = load_observation(path_of(root, row["observation"]))
    public = replace(data, train_images=data.test_images, train_labels=data.test_labels)
    client = Client(
        number=seen.client,
        dataset=public,
        own=torch.arange(len(data.test_images)),
        seed=rng.derive(server.scenario.seed, "control"),
    )
    probe = Probe(batch_size=row["batch_size"], trial=row["trial"])
    ask = partial(client.update, server, seen.round, seen.parameters, seen.buffers, {})
    try:
        results = [ask(probe=replace(probe, release=k)) for k in range(seen.releases)]
    except Exception:  # too few public images; a third party's defense may raise anything
        return False
    first, truth = results[0].update, results[0].truth
    if truth is None:
        return False
    mean = {
        name: torch.stack([each.update.tensors[name] for each in results]).mean(0)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in first.tensors.items()
    }
    buffers = first.buffers if seen.buffers_update else {}
    save_truth(truth, folder_of(root), seen.id, seen.client)
    save_observation(replace(seen, update=mean, buffers_update=buffers), folder_of(root))
    return True
