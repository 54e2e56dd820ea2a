"""How a client's updates of one round lie in one vector, and what becomes of a sum of such vectors.

    part 0: training    part 1: a probe    ...      each: entries of the update, entries of the
                                                    buffers, and what the client counts

All parts are masked together, so that a round of any number of probes is one protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import SumTerms
from fedsim.federation.secure_aggregation.fixed_point import FixedPoint, Ring, from_ring, to_ring
from fedsim.federation.secure_aggregation.terms import AbortedError
from fedsim.types import Tensors, Update
from fedsim.words import number_of


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of the vectors of one round."""

    sums: tuple[SumTerms, ...]
    """Of each part."""
    clients: int
    """How many are asked."""
    ring_bits: int
    update: Mapping[str, Tensor]
    """Like the tensors of an update: their shapes and types, in this order."""
    buffers: Mapping[str, Tensor]
    """Like the buffers that clients release."""

    @cached_property
    def length(self) -> int:
        """Numbers of one part."""
        return sum(t.numel() for t in (*self.update.values(), *self.buffers.values())) + 1

    def vector(self, updates: Iterable[Update], streams: Callable[[int], rng.Stream]) -> Ring:
        """A client's vector of all parts, without masks.

        Args:
            updates: Of each part, in order.
            streams: The client's randomness for a part.

        Raises:
            FedsimError: an update is not finite.
        """
        found = to_ring(np.zeros(len(self.sums) * self.length, np.int64), self.ring_bits)
        count = 0
        for part, update in enumerate(updates):
            at = part * self.length
            found[at : at + self.length] = to_ring(
                self._encoded(part, update, streams(part)), self.ring_bits
            )
            count += 1
        assert count == len(self.sums)
        return found

    def sum_of(self, total: Ring, part: int, clients: int) -> Update:
        """The mean that a part of an opened sum over so many `clients` is.

        With noise it is the sum over the number of clients that were asked.

        Raises:
            AbortedError: the clients count nothing, or more than they can.
        """
        numbers = from_ring(total[part * self.length :][: self.length])
        terms, count = self.sums[part], int(numbers[-1])
        if not clients <= count <= clients * terms.most_examples:
            raise AbortedError(
                f"the sum of {number_of(clients, 'client')} says that it is of "
                f"{number_of(count, 'example')}"
            )
        weight = self.clients if terms.noise else count
        return self._decoded(part, numbers[:-1], terms.most_examples / weight, count)

    def masked(self, vector: Ring, part: int) -> Update:
        """What a masked vector looks like to who takes it for an update."""
        return self._decoded(
            part, from_ring(vector[part * self.length :][: self.length])[:-1], 1, 1
        )

    def fixed_point(self, part: int) -> FixedPoint:
        """How the entries of a part's update are written.

        Raises:
            FedsimError: its noise would be lost in rounding.
        """
        terms = self.sums[part]
        return FixedPoint(
            clients=self.clients,
            ring_bits=self.ring_bits,
            range=terms.range,
            std=terms.client_noise(self.clients),
            norm=terms.norm,
        )

    def _statistics(self, part: int) -> FixedPoint:
        bound = self.sums[part].buffer_range
        return FixedPoint(clients=self.clients, ring_bits=self.ring_bits, range=bound)

    def _encoded(self, part: int, update: Update, stream: rng.Stream) -> NDArray[np.int64]:
        terms = self.sums[part]
        count = min(update.num_examples, terms.most_examples)
        share = count / terms.most_examples
        found = [self.fixed_point(part).encode(_flat(update.tensors, self.update), share, stream)]
        if self.buffers:
            statistics = _flat(update.buffers, self.buffers)
            found.append(self._statistics(part).encode(statistics, share, stream))
        return np.concatenate([*found, np.array([count])])

    def _decoded(
        self, part: int, numbers: NDArray[np.int64], factor: float, examples: int
    ) -> Update:
        size = sum(tensor.numel() for tensor in self.update.values())
        tensors = self.fixed_point(part).decode(numbers[:size]) * factor
        buffers = np.zeros(0)
        if self.buffers:
            buffers = self._statistics(part).decode(numbers[size:]) * factor
        return Update(
            tensors=_shaped(tensors, self.update),
            buffers=_shaped(buffers, self.buffers),
            num_examples=examples,
        )


def _flat(tensors: Tensors, like: Mapping[str, Tensor]) -> NDArray[np.float64]:
    flat = [tensors[name].detach().cpu().double().flatten() for name in like]
    joined: NDArray[np.float64] = torch.cat(flat).numpy()
    return joined


def _shaped(values: NDArray[np.float64], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found, at = {}, 0
    for name, tensor in like.items():
        part = torch.from_numpy(values[at : at + tensor.numel()]).reshape(tensor.shape)
        whole = part if tensor.is_floating_point() else part.round()
        found[name] = whole.to(tensor.dtype)
        at += tensor.numel()
    return found
