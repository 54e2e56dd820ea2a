"""The ClientApp: decode the global model, train under the defense stack, send the update.

Truth and state are the client's own files, since each message may come to another process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.differential_privacy import compute_adaptive_clip_model_update

from fedsim import rng
from fedsim.federation import wire
from fedsim.federation.client_state import ClientState
from fedsim.federation.noise_use import release_key
from fedsim.federation.secure_aggregation import messages, plan
from fedsim.federation.secure_aggregation.client import Memory, SumClient
from fedsim.federation.secure_aggregation.secrets import SECRET, Identity, Published
from fedsim.federation.secure_aggregation.secrets import digest as digest_of
from fedsim.federation.secure_aggregation.terms import Ring
from fedsim.recording.files import save_observation
from fedsim.recording.truth import forget_truth, save_truth
from fedsim.rng import digest
from fedsim.scenario import Scenario
from fedsim.system import threads
from fedsim.training.client import ClientResult, look, pack_round
from fedsim.training.schedule import Probe
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, Tensors


@dataclass(frozen=True)
class FederationJob:
    """Describes the training of one stack to every process of a federation."""

    scenario: str
    """The scenario as JSON."""
    stack: str
    """Name of the stack, a key of the scenario's `defenses`."""
    out: str
    """Path of the run's folder."""

    def workload(self) -> Workload:
        """Returns the stack's computations; a process keeps those of the last job that it built.

        Building sets how many threads the process computes on. It raises a FedsimError if the data
        or the stack cannot be had, and pydantic's ValidationError if `scenario` is none.
        """
        return _workload(self.scenario, self.stack)


@lru_cache(maxsize=1)
def _workload(scenario: str, stack: str) -> Workload:
    read = Scenario.model_validate_json(scenario)
    # Their number fixes the order of summation, hence the last bits.
    threads.fix(read.threads)
    return Workload(read, stack)


@dataclass(frozen=True, kw_only=True)
class SumIdentity:
    """A client's signing key for secure sums, and how the client draws its other secrets."""

    identity: Identity
    """The signing key, and the public keys of all clients."""
    fresh: bool
    """Whether keys and masks are drawn at random; otherwise they follow from the scenario's
    seed."""
    run: str = ""
    """Name of the run if nodes draw secrets of their own; else empty."""


def build(
    job: FederationJob,
    workload: Workload | None = None,
    sum_identity: SumIdentity | None = None,
    on_release: Callable[[], None] | None = None,
) -> ClientApp:
    """Builds the ClientApp of one stack, which answers for the client that a message comes to.

    The client is the number `partition-id` of the node's configuration. The app raises a
    FedsimError for a message that does not fit the scenario. Behind a claim or a secure sum, or
    with `on_release`, it also refuses to answer an order a second time with other bytes.

    Args:
        job: Description of the stack's training.
        workload: Its computations; None builds them at the first message.
        sum_identity: Signing key of a client on a machine of its own; None draws keys from the
            scenario's seed.
        on_release: Called before each release, of training or of a probe; it may refuse by raising.
    """
    client = _FederationClient(job, workload, on_release)
    sums = _SumAnswers(client, sum_identity)
    app = ClientApp()
    app.train()(client.train)
    app.train(wire.PROBE)(client.probe)
    app.train(wire.KEYS)(sums.keys)
    app.train(wire.SHARES)(sums.shares)
    app.train(wire.MASKED)(sums.mask)
    app.train(wire.AGREE)(sums.agree)
    app.train(wire.UNMASK)(sums.unmask)
    app.query(wire.IDENTIFY)(client.identify)
    app.query(wire.LEFT_OUT)(client.left_out)
    return app


class _FederationClient:
    def __init__(
        self,
        job: FederationJob,
        workload: Workload | None = None,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self._job, self.out = job, Path(job.out)
        self._given = workload
        self._on_release = on_release

    def __reduce__(self) -> tuple[type[_FederationClient], tuple[FederationJob]]:
        # Engines ship the app to other processes, without the data.
        return _FederationClient, (self._job,)

    def identify(self, message: Message, context: Context) -> Message:
        """Answers with the client's number, and removes what it kept of unfinished rounds."""
        client, done = self.client(context), wire.read_done(message.content)
        ClientState(self.out, self.workload.stack_name, client).rewind(done)
        return Message(wire.identity(client), reply_to=message)

    def left_out(self, message: Message, context: Context) -> Message:
        """Removes the truth of an answer that the server has left out of its recording."""
        order = wire.read_order(message.content)
        client, out = self.client(context), self.out
        for observation in self.workload.recorded_as(order.round, client, order.probe):
            forget_truth(out, observation, client)
        if order.probe is None:
            ClientState(out, self.workload.stack_name, client).forget_sent(order.round)
        return Message(wire.identity(client), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        order = self.read_order(message)
        if order.probe:
            raise FedsimError("a training message asks for a probe; send it as train.probe")
        client = self.client(context)
        # The schedule follows from the seed: a server cannot ask others than those that the round
        # samples.
        if client not in self.workload.plan(order.round).participants:
            raise FedsimError(f"client {client} takes no part in round {order.round}")
        return self._respond(message, context, order)

    def probe(self, message: Message, context: Context) -> Message:
        order = self.read_order(message)
        client, plan = self.client(context), self.workload.plan(order.round)
        # An unplanned probe would be a release that no claim counts.
        if not plan.asks(order.probe) or client not in plan.observed:
            raise FedsimError(
                f"no such probe is planned for round {order.round} of client {client}: "
                f"{order.probe}"
            )
        return self._respond(message, context, order)

    def _respond(self, message: Message, context: Context, order: wire.Order) -> Message:
        if self.workload.protocol:
            raise FedsimError(
                "an update was asked for as it is, and this stack releases masked ones alone "
                "(secure_aggregation)"
            )
        result = self.compute(self.client(context), order)
        loss = result.loss if self.workload.reports_loss else None
        return Message(wire.answer(result.update, loss, result.is_clipped), reply_to=message)

    def read_order(self, message: Message) -> wire.Order:
        order = wire.read_order(message.content, self._form[:2])
        clips = self.workload.scenario.federation.clips_at_clients
        if (order.clipping_norm is not None) != clips:
            raise wire.MalformedError(
                f"the order {'names no' if clips else 'names a'} norm to clip to, against the "
                "scenario's strategy"
            )
        return order

    def compute(self, client: int, order: wire.Order) -> ClientResult:
        # Before anything is computed, so that no release goes uncounted.
        if self._on_release:
            self._on_release()
        round, workload = order.round, self.workload
        if round > workload.scenario.training.rounds:
            raise FedsimError(
                f"round {round} is past the scenario's last ({workload.scenario.training.rounds})"
            )
        memory = ClientState(self.out, workload.stack_name, client)
        if order.probe is None:
            self._look(client, order, memory)
        state = memory.before(round) if workload.remembers else {}
        at = release_key(round, order.probe)
        # Answered once: for other weights, with other bytes, or after a later round it is refused.
        # A node does so also behind noise of which nothing is proven.
        once = bool(workload.claims or workload.protocol or self._on_release)
        if once:
            memory.answer(at, [order.parameters, order.buffers, state])
        result = workload.client_update(
            client,
            round,
            order.parameters,
            {**self._form[2], **order.buffers},
            state,
            probe=order.probe,
        )
        # Before the answer leaves, so that no recording lacks the truth by which it is judged.
        if result.truth:
            for observation in workload.recorded_as(round, client, order.probe):
                save_truth(result.truth, self.out, observation, client)
        # Probes leave the client's memory as it is, so that training does not depend on them.
        if order.probe is None and result.state:
            memory.save(round, result.state, workload.scenario.federation.checkpoint_every)
        update = result.update
        if not workload.releases_statistics:
            update = replace(update, buffers={})
        is_clipped = None
        if order.clipping_norm is not None:
            clipped, is_clipped = _clip_as_mod(update.tensors, order.clipping_norm)
            update = replace(update, tensors=clipped)
        if order.probe is None and client in workload.plan(round).lookers:
            memory.save_sent(round, pack_round(update, order.parameters, order.buffers))
        if once:  # last: what is not noted may still have been lost, and is not repeated
            numbers = torch.tensor([update.num_examples, result.loss or 0], dtype=torch.float64)
            memory.note_release(at, [update.tensors, update.buffers, {"numbers": numbers}])
        return replace(result, update=update, is_clipped=is_clipped)

    def _look(self, client: int, order: wire.Order, memory: ClientState) -> None:
        # A client whose own answer was left out of that round has nothing to subtract.
        if order.round > 1 and client in self.workload.plan(order.round - 1).lookers:
            sent = memory.load_sent(order.round - 1)
            if sent:
                seen = look(
                    self.workload,
                    client,
                    order.round - 1,
                    sent,
                    order.parameters,
                    {**self._form[2], **order.buffers},
                )
                save_observation(seen, self.out)

    def client(self, context: Context) -> int:
        client = context.node_config.get("partition-id")
        clients = self.workload.scenario.data.clients
        if not isinstance(client, int) or isinstance(client, bool) or not 0 <= client < clients:
            raise FedsimError(
                f"partition-id {client!r} is not a client of this scenario; expected 0 to "
                f"{clients - 1}"
            )
        return client

    @cached_property
    def _form(self) -> tuple[Tensors, Tensors, Tensors]:
        # Integer buffers (batch norm's counter) never change and never cross the wire.
        parameters, buffers = self.workload.initial()
        floating = wire.floating(buffers)
        constants = {name: value for name, value in buffers.items() if name not in floating}
        return wire.form_of(parameters), wire.form_of(floating), constants

    @cached_property
    def workload(self) -> Workload:
        return self._job.workload() if self._given is None else self._given


def _clip_as_mod(update: Tensors, norm: float) -> tuple[dict[str, torch.Tensor], bool]:
    """Clips as Flower's `adaptiveclipping_mod` does; returns the update, and if it was longer."""
    sent = [value.detach().cpu().numpy().copy() for value in update.values()]
    # The mod is handed new weights and old ones, of which it clips the difference.
    is_clipped = compute_adaptive_clip_model_update(sent, [np.zeros_like(a) for a in sent], norm)
    tensors = (torch.from_numpy(np.asarray(array)) for array in sent)
    return dict(zip(update, tensors, strict=True)), bool(is_clipped)


class _SumAnswers:
    def __init__(self, own: _FederationClient, sum_identity: SumIdentity | None) -> None:
        self._own, self._given = own, sum_identity

    def keys(self, message: Message, context: Context) -> Message:
        sum = self._sum(message, context, begins=True)
        published = sum.client.keys(sum.secret)
        return sum.reply(message, {sum.number: published.to_bytes()})

    def shares(self, message: Message, context: Context) -> Message:
        sum = self._sum(message, context)
        listed = messages.read_table(message.content)
        boxes = sum.client.shares({c: Published.from_bytes(one) for c, one in listed.items()})
        return sum.reply(message, boxes)

    def mask(self, message: Message, context: Context) -> Message:
        sum = self._sum(message, context)
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

        vector, signature = sum.client.mask(messages.read_table(content), compute, model)
        return Message(messages.masked_answer(vector, signature), reply_to=message)

    def agree(self, message: Message, context: Context) -> Message:
        sum = self._sum(message, context)
        signatures = messages.read_table(message.content)
        lost = messages.read_list(message.content, messages.LOST)
        state = ClientState(self._own.out, self._own.workload.stack_name, sum.number)
        # Written to disk before the signature leaves: a client that forgot it could agree to a
        # second sum.
        note = partial(state.open_sum, sum.round, signatures)
        signature = sum.client.agree(list(signatures), lost, signatures, note)
        return sum.reply(message, {sum.number: signature})

    def unmask(self, message: Message, context: Context) -> Message:
        sum = self._sum(message, context)
        return sum.reply(message, sum.client.unmask(messages.read_table(message.content)))

    def _sum(self, message: Message, context: Context, *, begins: bool = False) -> _Sum:
        workload, number = self._own.workload, self._own.client(context)
        if workload.protocol is None:
            raise FedsimError(f"the stack {workload.stack_name!r} has no secure sums")
        round = wire.integer(wire.config_of(message.content), wire.ROUND, 1)
        if round > workload.scenario.training.rounds:
            raise FedsimError(
                f"round {round} is past the scenario's last ({workload.scenario.training.rounds})"
            )
        state = ClientState(self._own.out, workload.stack_name, number)
        seed, clients = workload.scenario.seed, workload.scenario.data.clients
        sum_identity = self._given or _simulate_identities(seed, clients)[number]

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
        return _Sum(client=client, round=round, number=number, secret=secret)


@dataclass(frozen=True, kw_only=True)
class _Sum:
    client: SumClient
    round: int
    number: int
    secret: Callable[[str], bytes]

    def reply(self, message: Message, entries: Mapping[int, bytes]) -> Message:
        return Message(messages.table(self.round, entries), reply_to=message)


@lru_cache(maxsize=1)
def _simulate_identities(seed: int, clients: int) -> list[SumIdentity]:
    # Each client knows all public keys, as the owners of real nodes exchange them beforehand.
    streams = [rng.generator(seed, "signing", client) for client in range(clients)]
    keys = [Ed25519PrivateKey.from_private_bytes(each.keystream(SECRET)) for each in streams]
    peers = {one: key.public_key().public_bytes_raw() for one, key in enumerate(keys)}
    return [SumIdentity(identity=Identity(key=key, peers=peers), fresh=False) for key in keys]
