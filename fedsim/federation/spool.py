"""A round's updates on their way to the strategy, on disk beyond a budget of memory.

Flower's strategies read the arrays of replies one by one, so that arrays which load themselves keep
a round of any number of clients out of memory. Under an aggregation defense, what is spooled is no
part of what the server sees, and is never recorded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.federation.screening import is_zero
from fedsim.federation.wire import WireAnswer
from fedsim.types import Tensors, Update

BUDGET = 256 * 2**20
"""Bytes of updates that are kept in memory; the rest of a round goes to disk."""

_UPDATE = "update."
_BUFFER = "buffer."


def scratch(out: Path, stack: str) -> Path:
    """Returns the folder below `out` that holds answers of `stack` during a round."""
    return out / f".spool-{stack}"


class Spool:
    """Holds the accepted answers of one round, by client; a `with` block clears it at both ends."""

    def __init__(self, folder: Path, budget: int = BUDGET) -> None:
        """Spools in `folder`, which `clear` removes; what exceeds `budget` bytes goes to disk."""
        self._folder = folder
        self._budget = budget
        self._held = 0
        self._in_memory: dict[int, dict[str, Tensor]] = {}
        self._answers: dict[int, tuple[int, float | None]] = {}

        self.zero_updates = 0
        """Number of updates that are zero everywhere."""

    def __enter__(self) -> Spool:
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets every answer, and removes the folder."""
        self._held = 0
        self._in_memory.clear()
        self._answers.clear()
        self.zero_updates = 0
        shutil.rmtree(self._folder, ignore_errors=True)

    def put(self, client: int, answer: WireAnswer) -> None:
        """Keeps the `answer` of `client`, uncopied, in place of an earlier one."""
        tensors = {_UPDATE + name: value for name, value in answer.update.tensors.items()}
        tensors |= {_BUFFER + name: value for name, value in answer.update.buffers.items()}
        # What it replaces gives its room back first, so that a running mean stays in memory.
        self._held -= sum(value.nbytes for value in self._in_memory.pop(client, {}).values())
        self.zero_updates += is_zero(answer.update.tensors)
        size = sum(value.nbytes for value in tensors.values())
        if self._held + size <= self._budget:
            self._held += size
            self._in_memory[client] = tensors
        else:
            # Single updates are private where the server sees their combination: no other user may
            # read them.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_file(tensors, self._path(client))
        self._answers[client] = (answer.update.num_examples, answer.loss)

    def clients(self) -> list[int]:
        """Returns the clients whose answers are held, ascending."""
        return sorted(self._answers)

    def num_examples(self, client: int) -> int:
        """Returns how many examples `client`, whose answer is held, reported: its weight."""
        return self._answers[client][0]

    def loss(self, client: int) -> float | None:
        """Returns the loss that `client`, whose answer is held, reported; None if it did not."""
        return self._answers[client][1]

    def update(self, client: int, name: str) -> Tensor:
        """Returns the tensor called `name` of the update of `client`, whose answer is held."""
        return self._read(client, _UPDATE + name)

    def get(self, client: int, names: Iterable[str], buffers: Iterable[str]) -> Update:
        """Returns the named tensors and buffers of `client`, whose answer is held, as an update."""
        return Update(
            tensors={name: self.update(client, name) for name in names},
            num_examples=self.num_examples(client),
            buffers={name: self._read(client, _BUFFER + name) for name in buffers},
        )

    def mean_loss(self) -> float | None:
        """Returns the mean of the reported losses, weighted by examples; None if there are none."""
        reported = [(loss, examples) for examples, loss in self._by_client() if loss is not None]
        total = sum(examples for _, examples in reported)
        return sum(loss * examples for loss, examples in reported) / total if reported else None

    def mean_buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns the mean of the clients' buffers called `names`, weighted by examples.

        It is empty if no answer is held. `names` is read once for each client.
        """
        total = sum(examples for examples, _ in self._by_client())
        mean: dict[str, Tensor] = {}
        for client in self.clients():
            weight = self.num_examples(client) / total
            for name in names:
                share = self._read(client, _BUFFER + name) * weight
                mean[name] = mean[name] + share if name in mean else share
        return mean

    def _by_client(self) -> list[tuple[int, float | None]]:
        return [self._answers[client] for client in self.clients()]

    def _read(self, client: int, key: str) -> Tensor:
        if client in self._in_memory:
            return self._in_memory[client][key]
        with safe_open(self._path(client), framework="pt") as file:
            return cast(Tensor, file.get_tensor(key))

    def _path(self, client: int) -> Path:
        return self._folder / f"client-{client:06d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class MeanRelease:
    """Mean of `releases` of one client, or of the combination of `num_clients` clients."""

    client: int
    """Number of the client; -1 for the combination."""
    update: Update
    num_clients: int
    """Number of clients whose updates are combined; 1 for one client."""
    releases: int = 1
    """Number of releases that the mean is of."""
    participants: tuple[int, ...] = ()
    """Clients whose mean it is; empty for one client, and for several releases."""


class Averages:
    """Keeps the mean of each client's releases so far; a `with` block clears it at both ends."""

    def __init__(self, folder: Path, budget: int = BUDGET) -> None:
        """Averages in `folder`, removed in the end; what exceeds `budget` bytes goes to disk."""
        self._spool = Spool(folder, budget)
        self._counts: dict[int, tuple[int, int]] = {}
        self._names: tuple[list[str], list[str]] = [], []

    def __enter__(self) -> Averages:
        self._forget()
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    def add(self, release: MeanRelease) -> None:
        """Adds a release to its client's mean, or drops it.

        It is dropped if it combines another number of clients than the client's first release did.
        """
        client, update = release.client, release.update
        count, clients = self._counts.get(client, (0, release.num_clients))
        if clients != release.num_clients:
            return
        if count:
            before = self._mean(client)
            update = Update(
                tensors=_nearer(before.tensors, update.tensors, count + 1),
                num_examples=update.num_examples,
                buffers=_nearer(before.buffers, update.buffers, count + 1),
            )
        self._names = list(update.tensors), list(update.buffers)
        self._spool.put(client, WireAnswer(update=update, loss=None))
        self._counts[client] = count + 1, clients

    def means(self) -> Iterator[MeanRelease]:
        """Yields the mean of each client, ascending; its `num_examples` are the last release's."""
        for client, (releases, clients) in sorted(self._counts.items()):
            yield MeanRelease(
                client=client, update=self._mean(client), num_clients=clients, releases=releases
            )

    def _forget(self) -> None:
        self._spool.clear()
        self._counts.clear()

    def _mean(self, client: int) -> Update:
        return self._spool.get(client, *self._names)


def _nearer(mean: Tensors, value: Tensors, count: int) -> dict[str, Tensor]:
    # The difference is exactly 0 where all values are the same, and so leaves the mean as it is.
    return {name: old + (value[name] - old) / count for name, old in mean.items()}


class _LazyArray(Array):
    """Flower array that is computed each time it is read."""

    def __init__(self, like: Tensor, load: Callable[[], Tensor]) -> None:
        """Reads by `load`, which returns a tensor like `like` in its own memory, on the CPU."""
        self.dtype = str(like.numpy().dtype)
        self.shape = tuple(like.shape)
        self.stype = "numpy.ndarray"
        self.__dict__["_load"] = load

    @property
    def data(self) -> bytes:  # type: ignore[override]  # written nowhere
        return Array.from_numpy_ndarray(self.numpy()).data

    def numpy(self) -> NDArray[np.generic]:
        return cast("NDArray[np.generic]", self.__dict__["_load"]().numpy())


def lazy_record(like: Tensors, load: Callable[[str], Tensor]) -> ArrayRecord:
    """Returns a record of arrays named, shaped and typed like `like`.

    Each reading of one calls `load(name)` for its tensor, on the CPU.
    """
    record = ArrayRecord()
    for name, tensor in like.items():
        record[name] = _LazyArray(tensor, partial(load, name))
    return record
