"""How a ClientApp answers the five orders of a secure sum.

What the client has to remember from one to the next lies on its own disk: each message may come to
another process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Context, Message

from fedsim import rng
from fedsim.federation import wire
from fedsim.federation.client_state import ClientState
from fedsim.federation.secure_aggregation import messages, plan
from fedsim.federation.secure_aggregation.client import Memory, SumClient
from fedsim.federation.secure_aggregation.layout import Ring
from fedsim.federation.secure_aggregation.secrets import SECRET, Identity, Published
from fedsim.federation.secure_aggregation.secrets import digest as digest_of
from fedsim.rng import digest
from fedsim.training.client import ClientResult
from fedsim.training.schedule import Probe
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, Tensors


@dataclass(frozen=True, kw_only=True)
class SumIdentity:
    """A client's signing key for secure sums (`identity`), and how the client draws its secrets."""

    identity: Identity
    fresh: bool
    """Whether keys and masks are drawn anew each time; otherwise they follow from the scenario's
    seed."""
    run: str = ""
    """Name of the run if nodes draw secrets of their own; else empty."""


class Computes(Protocol):
    """Interface of the object that computes a client's updates for a secure sum."""

    @property
    def workload(self) -> Workload:
        """The stack's computations and their scenario."""

    @property
    def out(self) -> Path:
        """Folder below which the client keeps its state."""

    def client(self, context: Context) -> int:
        """Returns the client's number, as the configuration of its node says."""

    def read_order(self, message: Message) -> wire.Order:
        """Reads the order in `message`; its tensors must be like the scenario's model."""

    def compute(self, client: int, order: wire.Order) -> ClientResult:
        """Computes the result that answers `order`, and notes its noise as used."""


class Answers:
    """Answers the five stages of a secure sum for a client.

    The methods are called in the order in which they stand, once per round each. A message of
    another form raises a `MalformedError`, and a stage out of its turn, or what breaks the
    protocol, an `AbortedError`.
    """

    def __init__(self, own: Computes, sum_identity: SumIdentity | None) -> None:
        """Answers with the updates that `own` computes.

        `sum_identity` is the client's; None in a simulation, where the scenario's seed gives keys.
        """
        self._own, self._given = own, sum_identity

    def keys(self, message: Message, context: Context) -> Message:
        """Answers with the client's public keys for this round's sum, and forgets earlier sums."""
        sum, _ = self._sum(message, context, begins=True)
        published = sum.client.keys(sum.secret)
        return _reply(message, messages.table(sum.round, {sum.number: published.to_bytes()}))

    def shares(self, message: Message, context: Context) -> Message:
        """Answers with shares of the client's two secrets, sealed for each neighbour."""
        sum, record = self._sum(message, context)
        listed = messages.read_table(record)
        boxes = sum.client.shares({c: Published.from_bytes(one) for c, one in listed.items()})
        return _reply(message, messages.table(sum.round, boxes))

    def mask(self, message: Message, context: Context) -> Message:
        """Answers with the round's updates, masked in one vector, and a signature."""
        sum, record = self._sum(message, context)
        content, workload = message.content, self._own.workload
        order = self._own.read_order(message)
        planted = messages.read_planted(content, order.parameters)
        # All that decides the updates: each client signs it, so that a server cannot show them
        # different models.
        shown = {"parameters": order.parameters, "buffers": order.buffers, "planted": planted or {}}
        model = digest_of(*(digest(tensors).encode() for tensors in shown.values()))
        asked_for = plan.parts(workload, sum.round)

        def at(probe: Probe | None) -> Tensors:
            return order.parameters if probe is None or planted is None else planted

        def compute() -> Ring:
            # A generator: the layout encodes one update before the next is computed.
            updates = (
                self._own.compute(
                    sum.number, replace(order, parameters=at(probe), probe=probe)
                ).update
                for probe in asked_for
            )
            own = workload.client(sum.number)

            def stream(part: int) -> rng.Stream:
                probe = asked_for[part]
                return own.sum_stream(sum.round, probe, at(probe), order.buffers)

            return plan.layout(workload, sum.round).vector(updates, stream)

        vector, signature = sum.client.mask(messages.read_table(record), compute, model)
        return Message(messages.masked_answer(vector, signature), reply_to=message)

    def agree(self, message: Message, context: Context) -> Message:
        """Answers with a signature of the clients in the sum; a round has one such set."""
        sum, record = self._sum(message, context)
        signatures = messages.read_table(record)
        lost = messages.read_list(record, messages.LOST)
        state = ClientState(self._own.out, self._own.workload.stack_name, sum.number)
        # Written to disk before the signature leaves: a client that forgot it could agree to a
        # second sum.
        note = partial(state.open_sum, sum.round, signatures)
        signature = sum.client.agree(list(signatures), lost, signatures, note)
        return _reply(message, messages.table(sum.round, {sum.number: signature}))

    def unmask(self, message: Message, context: Context) -> Message:
        """Answers with the client's shares of others' secrets, so that the sum can be opened."""
        sum, record = self._sum(message, context)
        shares = sum.client.unmask(messages.read_table(record))
        return _reply(message, messages.table(sum.round, shares))

    def _sum(
        self, message: Message, context: Context, *, begins: bool = False
    ) -> tuple[_Sum, ConfigRecord]:
        workload, number = self._own.workload, self._own.client(context)
        if workload.protocol is None:
            raise FedsimError(f"the stack {workload.stack_name!r} has no secure sums")
        record = wire.config_of(message.content)
        round = wire.integer(record, wire.ROUND, 1)
        if round > workload.scenario.training.rounds:
            raise FedsimError(
                f"round {round} is past the scenario's last ({workload.scenario.training.rounds})"
            )
        state = ClientState(self._own.out, workload.stack_name, number)
        sum_identity = self._given or _simulate_identity(
            workload.scenario.seed, workload.scenario.data.clients, number
        )

        def keep(memory: Memory) -> None:
            state.save_sum(round, asdict(memory))

        # Masks that follow from the scenario's seed hide nothing from whoever knows it: they serve
        # simulations.
        def secret(purpose: str) -> bytes:
            if sum_identity.fresh:
                return os.urandom(SECRET)
            path = ("masks", workload.stack_name, purpose, round, number)
            return rng.generator(workload.scenario.seed, *path).keystream(SECRET)

        # A sum that begins takes nothing over from an earlier try of it.
        kept = {} if begins else state.sum_of(round)
        terms = plan.terms(workload, round, sum_identity.run)
        client = SumClient(terms, number, sum_identity.identity, Memory(**kept), keep)
        return _Sum(client=client, round=round, number=number, secret=secret), record


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """One client's part in the sum of one round."""

    client: SumClient
    """The client's side of the protocol, with its memory."""
    round: int
    number: int
    secret: Callable[[str], bytes]


def _reply(message: Message, record: ConfigRecord) -> Message:
    return Message(messages.order(record), reply_to=message)


def _simulate_identity(seed: int, clients: int, number: int) -> SumIdentity:
    # Each client knows all public keys, as the owners of real nodes exchange them beforehand.
    keys = _signing_keys(seed, clients)
    peers = {one: key.public_key().public_bytes_raw() for one, key in enumerate(keys)}
    return SumIdentity(identity=Identity(key=keys[number], peers=peers), fresh=False)


@lru_cache(maxsize=1)
def _signing_keys(seed: int, clients: int) -> list[Ed25519PrivateKey]:
    return [
        Ed25519PrivateKey.from_private_bytes(
            rng.generator(seed, "signing", client).keystream(SECRET)
        )
        for client in range(clients)
    ]
