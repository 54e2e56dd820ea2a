"""The mean of what clients release when they are asked for the same update again and again.

Averages are running ones, and a round's are on disk beyond the spool's budget of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedsim.federation.spool import BUDGET, Spool
from fedsim.federation.wire import WireAnswer
from fedsim.types import Tensors, Update


@dataclass(frozen=True, kw_only=True)
class MeanRelease:
    """The mean of several releases of one client; client -1: of the aggregate."""

    client: int
    update: Update
    num_clients: int
    releases: int = 1


class Averages:
    """The mean of each client's releases so far. A context manager: leaving it forgets them."""

    def __init__(self, folder: Path, budget: int = BUDGET) -> None:
        """`folder` is its own: it is emptied at entry and removed at exit."""
        self._spool = Spool(folder, budget)
        self._counts: dict[int, tuple[int, int]] = {}
        self._names: tuple[list[str], list[str]] = [], []

    def __enter__(self) -> Averages:
        self._forget()
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    def add(self, release: MeanRelease) -> None:
        """One more release; left out if it combines another number of clients than the first."""
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
        """Yields each client's mean, by ascending client."""
        for client, (releases, clients) in sorted(self._counts.items()):
            yield MeanRelease(
                client=client,
                update=self._mean(client),
                num_clients=clients,
                releases=releases,
            )

    def _forget(self) -> None:
        self._spool.clear()
        self._counts.clear()

    def _mean(self, client: int) -> Update:
        return self._spool.get(client, *self._names)


def _nearer(mean: Tensors, value: Tensors, count: int) -> dict[str, Tensor]:
    """The mean of `count` values; exactly their value where all are the same."""
    return {name: old + (value[name] - old) / count for name, old in mean.items()}
