"""Keeps truth on disk: clients write and remove it, and scores read it.

    ROOT/truth/<stack>/round-0001/client-0000-b4-t0/client-0000.safetensors

Neither a federation's server nor an attack imports this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedsim import rng, types
from fedsim.recording.files import (
    by_number,
    checked_id,
    copy_file,
    read_tensors,
    remove_torn,
    write_tensors,
)
from fedsim.system import memory, paths
from fedsim.types import FedsimError, Truth
from fedsim.words import number_of

_FOLDER = "truth"
_SEEN_ALONE = re.compile(r"(?:client|wire)-(\d+)-")
"""Names of observations of a single client, whose truth alone they have."""


class IncompleteTruth(FedsimError):  # noqa: N818 - reads as what was found
    """Raised if the truth on disk is not of as many clients as the observation is."""


def home(root: Path, stack: str) -> Path:
    """Returns the folder of the truth of all observations behind `stack` in the run in `root`."""
    return root / _FOLDER / stack


def _folder(root: Path, id: str) -> Path:
    stack, _, rest = checked_id(id).partition("/")
    return home(root, stack) / rest


def _path(root: Path, id: str, client: int) -> Path:
    return _folder(root, id) / _name(client)


def _name(client: int) -> str:
    return f"client-{client:04d}.safetensors"


def save_truth(truth: Truth, root: Path, id: str, client: int) -> None:
    """Writes what a client really used for an observation, beside the truth of other clients.

    Args:
        truth: The client's own truth.
        root: Folder of the run, or of the client's node.
        id: Id of the observation; a FedsimError refuses any other text.
        client: Number of the client, from 0.
    """
    # Which client a row is of is told by the file.
    tensors = {name: value for name, value in truth.tensors().items() if name != "clients"}
    write_tensors(_path(root, id, client), tensors)


def forget_truth(root: Path, id: str, client: int) -> None:
    """Removes the truth of `client` for the observation `id` below `root`, if there is any."""
    _path(root, id, client).unlink(missing_ok=True)


def owner(root: Path) -> int | None:
    """Returns the client (from 0) whose truth is below `root`; None: no truth.

    A FedsimError refuses truth of several clients.
    """
    numbers: set[str] = set()
    for path in _files(root):
        of_folder = _SEEN_ALONE.match(path.parent.name)
        # The folder names a client, too: truth of another in it would be scored as this one's.
        numbers |= {path.stem.removeprefix("client-"), *(of_folder.groups() if of_folder else ())}
    if len(numbers) > 1 or not all(map(str.isdecimal, numbers)):
        raise FedsimError(
            f"{root}: truth of clients {', '.join(sorted(numbers))}, and each client's is in its "
            "own node's folder alone; ask its owner for that folder"
        )
    return int(numbers.pop()) if numbers else None


def copy(source: Path, target: Path) -> int:
    """Copies all truth below `source` to below `target`; returns the number of files.

    A FedsimError refuses links, and truth that differs from `target`'s; nothing is copied then.
    """
    found = [paths.refuse_links(path, source) for path in _files(source)]
    for path in found:
        there = target / path.relative_to(source)
        limit = memory.limit()
        if there.exists() and paths.content(there, limit) != paths.content(path, limit):
            raise FedsimError(
                f"{path} is not the truth that was collected before ({there}); if it is the right "
                f"one, remove {target / _FOLDER} and collect that of all clients again"
            )
    # Copied only now that all are compared: a refusal leaves the target as it was.
    for path in found:
        copy_file(path, source, target)
    return len(found)


def _files(root: Path) -> list[Path]:
    return sorted((root / _FOLDER).glob("*/round-*/*/client-*.safetensors"))


def forget_rounds(root: Path, stack: str, client: int, last: int) -> None:
    """Removes a client's truth of rounds after `last`, with half-written files in their folders.

    Args:
        root: Folder of the run, or of the client's node.
        stack: Name of the defense stack.
        client: Number of the client, from 0.
        last: Number of the last round whose truth stays.
    """
    for folder in home(root, stack).glob("round-*/*"):
        number = folder.parent.name.removeprefix("round-")
        if number.isdecimal() and int(number) > last:
            (folder / _name(client)).unlink(missing_ok=True)
            remove_torn(folder)
            for emptied in (folder, folder.parent):
                with suppress(OSError):  # others wrote there, too
                    emptied.rmdir()


def load_truth(root: Path, id: str, clients: int | None = None) -> Truth:
    """Reads the truth of all clients of the observation `id`, joined in the order of the clients.

    Local losses are averaged, and tensors that a client lacks are left out. Clients of a RowTruth
    are counted from 0 among those that left truth in the run's folder `root`.

    Raises:
        IncompleteTruth: not exactly `clients` clients (None: any number) left truth.
        FedsimError: there is none, a file is damaged, or `id` is no id.
    """
    folder = _folder(root, id)
    files = sorted(folder.glob("client-*.safetensors"), key=by_number)
    parts = [read_tensors(path) for path in files]
    if not parts:
        raise FedsimError(f"{folder}: no truth was recorded for this observation")
    if clients not in (None, len(parts)):
        raise IncompleteTruth(
            f"{folder}: the truth is of {number_of(len(parts), 'client')} and the "
            f"observation of {clients}; record it again"
        )
    if not all(_is_truth(part) for part in parts):
        raise FedsimError(f"{folder}: not the truth of an observation; record it again")
    return Truth.of(_join_parts(parts))


def _join_parts(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, first in parts[0].items():
        values = [part[name] for part in parts if name in part]
        if len(values) < len(parts):
            continue
        if name in _SAME:
            tensors[name] = first
        elif name == "local_losses":
            tensors[name] = torch.stack(values).mean(0)
        else:
            tensors[name] = torch.cat(values)
    if "rows" in tensors:
        of_client = [torch.full((len(part["rows"]),), k) for k, part in enumerate(parts)]
        tensors["clients"] = torch.cat(of_client)
    return tensors


def add_sources(truth: Truth, root: Path, ids: Sequence[str]) -> Truth:
    """Returns a copy of `truth` with what source attacks are asked about the observations `ids`.

    Its records are the candidates that exactly one client behind these observations trains on, in
    an order that tells nothing of clients. They are tensors in the copy's `more`, which
    `fedsim.types` calls `SOURCE_...`; `source` (N,) int64 is the place in `SOURCE_CLIENTS` of each
    record's client. Without candidates in the run's folder `root`, `truth` itself is returned.
    """
    files = [list(_folder(root, id).glob("client-*.safetensors")) for id in ids]
    numbers = [[int(path.stem.removeprefix("client-")) for path in each] for each in files]
    # Candidates stay the same over rounds, so that any of a client's files has them.
    file_of = {n: p for own in zip(numbers, files, strict=True) for n, p in zip(*own, strict=True)}
    clients = sorted(file_of)
    candidates = [read_tensors(file_of[number]) for number in clients]
    if not clients or not all(types.CANDIDATE_MEMBERS in each for each in candidates):
        return truth
    coins = [each[types.CANDIDATE_MEMBERS] for each in candidates]
    both = list(zip(candidates, coins, strict=True))
    records = torch.cat([each[types.CANDIDATE_INPUTS][members] for each, members in both])
    labels = torch.cat([each[types.CANDIDATE_LABELS][members] for each, members in both])
    others = [each[types.CANDIDATE_LABELS][~members] for each, members in both]
    source = torch.repeat_interleave(torch.stack([members.sum() for members in coins]))
    classes = 1 + int(torch.cat([labels, *others]).max())
    digests = [rng.of_bytes(each.contiguous().numpy().tobytes()) for each in records]
    holders: dict[int, set[int]] = {}
    for digest, place in zip(digests, source.tolist(), strict=True):
        holders.setdefault(digest, set()).add(place)
    single = [i for i, digest in enumerate(digests) if len(holders[digest]) == 1]
    order = torch.tensor(sorted(single, key=digests.__getitem__), dtype=torch.int64)
    more = {
        types.SOURCE_INPUTS: records[order],
        types.SOURCE_LABELS: labels[order],
        "source": source[order],
        types.SOURCE_CLASSES: torch.stack([each.bincount(minlength=classes) for each in others]),
        types.SOURCE_CLIENTS: torch.tensor(clients),
        types.SOURCE_PARTICIPANTS: torch.tensor([[c in own for c in clients] for own in numbers]),
    }
    return replace(truth, more={**truth.more, **more})


_SAME = ("scored", "classes", "columns")
"""Names of tensors that are the same for all clients of an observation."""


def _is_truth(part: Mapping[str, Tensor]) -> bool:
    if "rows" in part:
        rows, members = part["rows"], part.get("members")
        if members is None or "scored" not in part or rows.ndim != 2:
            return False
        return (
            members.dtype == part["scored"].dtype == torch.bool
            and members.shape == rows.shape[:1]
            and part["scored"].shape == rows.shape[1:]
        )
    images, labels = part.get("images"), part.get("labels")
    columns = part.get("columns")
    if images is None or labels is None or images.ndim != (4 if columns is None else 2):
        return False
    if columns is not None and columns.shape != images.shape[1:]:
        return False
    losses = part.get("local_losses", torch.zeros(2))
    whole = labels.dtype == torch.int64 and labels.shape == images.shape[:1]
    whole &= losses.shape == (2,) and losses.is_floating_point()
    return whole and bool((labels >= 0).all()) and images.is_floating_point()


def count(root: Path, id: str) -> int:
    """Returns how many clients have written truth of the observation `id` in the run in `root`."""
    return len(list(_folder(root, id).glob("client-*.safetensors")))
