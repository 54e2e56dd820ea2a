"""What a round's secure sum is, and how a client's updates of the round lie in one vector of it.

    part 0: training    part 1: a probe    ...      each: entries of the update, entries of the
                                                    buffers, and what the client counts

The numbers added are integers modulo 2^32 or 2^64, for real values of a range. Rounding is
stochastic, so that its errors have mean 0. With noise, a vector is rounded before its noise, which
is rounded to integers by itself, is added. Then no rounding makes a contribution longer than the
bound that the noise is made for, and the sum of noises is as good as a discrete Gaussian (Kairouz,
Liu and Steinke, The Distributed Discrete Gaussian Mechanism, ICML 2021).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import SumTerms
from fedsim.federation import wire
from fedsim.federation.checkpoint import fingerprint
from fedsim.federation.secure_aggregation.secrets import digest
from fedsim.federation.secure_aggregation.terms import AbortedError, Ring, Terms
from fedsim.scenario.document import blaming
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.types import FedsimError, Tensors, Update
from fedsim.words import number_of

LEAST_NOISE = 16.0
"""Least standard deviation of one client's noise, in steps of `_FixedPoint.step`. The sum of h such
discretized normals is close to a discrete Gaussian. The two differ by a factor within 1 ± 10 h
exp(-π² 16²), which no float64 tells from 1."""
# Standard deviations of its noise that a client's number has room for.
_TAIL = 12.0
# Most bits of one client's number: a float64 holds it with bits of its fraction to spare.
_MOST_BITS = 48
# Tries to round to a vector within the bound, before it is rounded towards 0.
_TRIES = 20
# Entries drawn at a time: noise for a whole vector would take as much memory again.
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _FixedPoint:
    clients: int
    ring_bits: int
    range: float
    """Entries are clipped to [-range, range]."""
    std: float = 0.0
    """Standard deviation of the noise that each client adds to an entry."""
    norm: float = math.inf
    """Bound on the L2 norm of a client's vector of such entries; finite if noise is made for it."""

    def __post_init__(self) -> None:
        if self.std and self.std < LEAST_NOISE * self.step:
            raise FedsimError(
                f"secure_aggregation.noise_multiplier: a client's noise of {self.std:.3g} is lost "
                f"in steps of {self.step:.3g}, of which it has to be {LEAST_NOISE:g} wide; give "
                f"{math.ceil(LEAST_NOISE * self.step / self.std)} times as much, or a smaller range"
            )

    @property
    def bits(self) -> int:
        # The sum over all clients must not wrap around the ring.
        return min(self.ring_bits - math.ceil(math.log2(self.clients)), _MOST_BITS)

    @property
    def step(self) -> float:
        """Real value that the integer 1 stands for."""
        # The largest number stands for the range and the noise's tail; noise is longer with a
        # chance below 1e-32 an entry.
        return (self.range + _TAIL * self.std) / float(2 ** (self.bits - 1) - 1)

    def encode(
        self, values: NDArray[np.float64], share: float, stream: rng.Stream
    ) -> NDArray[np.int64]:
        """Returns `share`, a weight in (0, 1], times the values (n,) as integers, with noise."""
        if not np.isfinite(values).all():
            raise FedsimError("the update holds NaN or infinity, which cannot be added under masks")
        # Each client weighs its own values before they are added, since the server sees the sum
        # alone.
        scaled = np.clip(values, -self.range, self.range) * (share / self.step)
        rounded = _round_vector(scaled, self.norm / self.step, stream)
        if self.std:
            for at in range(0, len(rounded), _CHUNK):
                # A view: noise is added to `rounded` in place.
                part = rounded[at : at + _CHUNK]
                noise = rng.normal((len(part),), stream, torch.float64).numpy()
                part += np.rint(noise * (self.std / self.step)).astype(np.int64)
        return rounded

    def decode(self, total: NDArray[np.int64]) -> NDArray[np.float64]:
        return total.astype(np.float64) * self.step


def _to_ring(numbers: NDArray[np.int64], bits: int) -> Ring:
    # NumPy's cast to unsigned integers wraps, which is the ring's arithmetic.
    return numbers.astype(np.uint32 if bits == 32 else np.uint64)


def _from_ring(ring: Ring) -> NDArray[np.int64]:
    # Two's complement reads the upper half of the ring as the negative numbers.
    signed = np.int32 if ring.dtype == np.uint32 else np.int64
    return ring.view(signed).astype(np.int64)


def _round_vector(
    scaled: NDArray[np.float64], norm: float, stream: rng.Stream
) -> NDArray[np.int64]:
    """Rounds each entry at random, so that its mean is the entry, to no longer than `norm`."""
    length = float(np.linalg.norm(scaled))
    # The noise is made for vectors of this norm: a longer one would be protected less than is
    # claimed.
    if length > norm:
        scaled = scaled * (norm / length)
    # Rounding may lengthen a vector beyond its norm; drawing again keeps the mean nearly unbiased.
    for _ in range(_TRIES):
        found = np.empty(len(scaled), np.int64)
        for at in range(0, len(scaled), _CHUNK):
            part = scaled[at : at + _CHUNK]
            # floor(x + u) with u uniform in [0, 1) has mean x.
            found[at : at + _CHUNK] = np.floor(part + rng.uniform((len(part),), stream).numpy())
        if math.isinf(norm) or float(np.linalg.norm(found.astype(np.float64))) <= norm:
            return found
    # Truncation never lengthens a vector, at the price of a bias towards 0.
    return np.trunc(scaled).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Says how the vectors are laid out that clients add up in one round."""

    sums: tuple[SumTerms, ...]
    """Terms of each part, in the order of `plan.parts`."""
    clients: int
    """Number of clients that are asked."""
    ring_bits: int
    """Bits of the ring: 32 or 64."""
    update: Mapping[str, Tensor]
    """Tensors shaped and typed like those of an update, in the order of the vector."""
    buffers: Mapping[str, Tensor]
    """Tensors like the buffers that clients release; empty if they release none."""

    @cached_property
    def length(self) -> int:
        """Number of entries of one part of a vector, that of training or of a probe's release."""
        # The last number is how many examples the client counts.
        return sum(t.numel() for t in (*self.update.values(), *self.buffers.values())) + 1

    def vector(self, updates: Iterable[Update], streams: Callable[[int], rng.Stream]) -> Ring:
        """Returns a client's vector of all parts, without masks: `length` numbers for each part.

        `updates` has one update for each part, in order. `streams` is called with the index of a
        part, from 0, and returns the client's randomness for it. NaN or infinity is a FedsimError.
        """
        found = _to_ring(np.zeros(len(self.sums) * self.length, np.int64), self.ring_bits)
        # Updates come one at a time from a generator, so that no two are in memory together.
        count = 0
        for part, update in enumerate(updates):
            at = part * self.length
            found[at : at + self.length] = _to_ring(
                self._encode(part, update, streams(part)), self.ring_bits
            )
            count += 1
        assert count == len(self.sums)
        return found

    def sum_of(self, total: Ring, part: int, clients: int) -> Update:
        """Returns the mean update in a `part`, from 0, of the opened vector of `clients` clients.

        Each update is weighted by its examples, at most `SumTerms.most_examples`, whose total is
        the `num_examples` of the result. The sum is divided by that total or, with noise, by the
        number of clients asked. An impossible total is an `AbortedError`.
        """
        numbers = _from_ring(total[part * self.length :][: self.length])
        terms, count = self.sums[part], int(numbers[-1])
        # An honest client counts from 1 to `most_examples`: any other total shows a malformed
        # vector.
        if not clients <= count <= clients * terms.most_examples:
            raise AbortedError(
                f"the sum of {number_of(clients, 'client')} says that it is of "
                f"{number_of(count, 'example')}"
            )
        # With noise, the bound on one client's influence needs a divisor that is fixed beforehand.
        weight = self.clients if terms.noise else count
        return self._decode(part, numbers[:-1], terms.most_examples / weight, count)

    def read_masked(self, vector: Ring, part: int) -> Update:
        """Decodes a `part`, from 0, of a client's masked vector as if it were an update.

        The count of examples is masked, too. So nothing is divided by it, and `num_examples` is 1.
        """
        return self._decode(
            part, _from_ring(vector[part * self.length :][: self.length])[:-1], 1, 1
        )

    def _fixed_point(self, part: int) -> _FixedPoint:
        terms = self.sums[part]
        return _FixedPoint(
            clients=self.clients,
            ring_bits=self.ring_bits,
            range=terms.range,
            std=terms.client_noise(self.clients),
            norm=terms.norm,
        )

    def _statistics(self, part: int) -> _FixedPoint:
        bound = self.sums[part].buffer_range
        return _FixedPoint(clients=self.clients, ring_bits=self.ring_bits, range=bound)

    def _encode(self, part: int, update: Update, stream: rng.Stream) -> NDArray[np.int64]:
        terms = self.sums[part]
        count = min(update.num_examples, terms.most_examples)
        # At most 1, so that range and norm bound the weighted vector, too.
        share = count / terms.most_examples
        found = [self._fixed_point(part).encode(_flat(update.tensors, self.update), share, stream)]
        if self.buffers:
            statistics = _flat(update.buffers, self.buffers)
            found.append(self._statistics(part).encode(statistics, share, stream))
        return np.concatenate([*found, np.array([count])])

    def _decode(
        self, part: int, numbers: NDArray[np.int64], factor: float, examples: int
    ) -> Update:
        size = sum(tensor.numel() for tensor in self.update.values())
        tensors = self._fixed_point(part).decode(numbers[:size]) * factor
        buffers = np.zeros(0)
        if self.buffers:
            buffers = self._statistics(part).decode(numbers[size:]) * factor
        return Update(
            tensors=_shape_tensors(tensors, self.update),
            buffers=_shape_tensors(buffers, self.buffers),
            num_examples=examples,
        )


def _flat(tensors: Tensors, like: Mapping[str, Tensor]) -> NDArray[np.float64]:
    flat = [tensors[name].detach().cpu().double().flatten() for name in like]
    joined: NDArray[np.float64] = torch.cat(flat).numpy()
    return joined


def _shape_tensors(values: NDArray[np.float64], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found, at = {}, 0
    for name, tensor in like.items():
        part = torch.from_numpy(values[at : at + tensor.numel()]).reshape(tensor.shape)
        whole = part if tensor.is_floating_point() else part.round()
        found[name] = whole.to(tensor.dtype)
        at += tensor.numel()
    return found


# Bits of the ring. Closed-form releases solve equations, in float64.
_TRAINING_BITS, _CLOSED_FORM_BITS = 32, 64


def parts(server: Server, round: int) -> list[Probe | None]:
    """Returns what each part of a vector of `round` holds, in order.

    Training (None) is first. First releases of all probes follow, then second ones, and so on.
    """
    asked = server.plan(round).probes
    again = range(server.scenario.observe.releases)
    return [None, *(replace(probe, release=release) for release in again for probe in asked)]


def terms(server: Server, round: int, run: str = "") -> Terms:
    """Returns the terms of the sum of `round`, from 1, whose stack must have secure sums.

    `run` is the run's name if nodes draw secrets, else empty. Fewer than two participants are a
    FedsimError, as is an update that nothing bounds; missing `training.weights` are an OSError.
    """
    participants = server.plan(round).participants
    agreed = server.sum_terms(None)
    # All that decides what clients add: shown another scenario, a client is in another session.
    named = [fingerprint(server.scenario, server.stack_name), list(server.census.held)]
    at = [run, server.stack_name, round, participants]
    return Terms(
        session=digest(b"session", json.dumps([*named, *at]).encode()),
        participants=tuple(participants),
        threshold=agreed.threshold,
        colluding=agreed.colluding,
        fewest=server.stack.least_clients,
    )


def check(server: Server) -> None:
    """Refuses, by a FedsimError, secure sums that cannot work; a stack without them passes."""
    if server.protocol is None:
        return
    with blaming(f"defenses.{server.stack_name}"):
        terms(server, 1)
        rounds = range(1, server.scenario.training.rounds + 1)
        # Only observed rounds hold probes. Round 1 stands for all others, which hold training
        # alone.
        for round in {1, *filter(server.schedule.is_observed, rounds)}:
            planned = layout(server, round)
            for part, agreed in enumerate(planned.sums):
                # Its constructor refuses noise that rounding would eat.
                planned._fixed_point(part)
                if planned.buffers and not agreed.buffer_range:
                    raise FedsimError(
                        "secure_aggregation: clients release batch-norm statistics, of which "
                        "nothing bounds the entries; give buffer_range, or choose the model's "
                        "norm: group"
                    )


def layout(server: Server, round: int) -> Layout:
    """Returns the layout of the vectors of `round`, from 1, whose stack must have secure sums."""
    parameters, buffers = server.initial()
    return Layout(
        sums=tuple(server.sum_terms(part) for part in parts(server, round)),
        clients=len(server.plan(round).participants),
        ring_bits=_CLOSED_FORM_BITS if server.release else _TRAINING_BITS,
        update=parameters,
        buffers=wire.floating(buffers) if server.releases_statistics else {},
    )
