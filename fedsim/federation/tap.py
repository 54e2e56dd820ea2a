"""The tap: stands between a strategy and any engine's grid, and records what the server sees.

It sits below the strategy, which may clip or noise what it receives. Each answer is decoded,
recorded, screened and spooled before the next one: a round is never held in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM
from torch import Tensor

from fedsim.contracts.defense import NoisyAggregation, shapes
from fedsim.federation import wire
from fedsim.federation.delivery import Delivery, exchange
from fedsim.federation.noise_use import NoiseNotes, release_key
from fedsim.federation.screening import Tally, judge
from fedsim.federation.secure_aggregation import messages, plan
from fedsim.federation.secure_aggregation.rounds import SecureSum
from fedsim.federation.secure_aggregation.terms import AbortedError, Ring
from fedsim.federation.spool import BUDGET, Averages, MeanRelease, Spool, lazy_record, scratch
from fedsim.federation.wire import size_of
from fedsim.recording.files import save_observation
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.types import FedsimError, Tensors, Update
from fedsim.words import number_of

# A message, its client, and the probe that it asks for; None for training.
_Ordered = tuple[Message, int, Probe | None]


class TapGrid:
    """Wraps a grid of one stack, and records what the server sees between `begin` and `end`.

    A strategy is handed it as a `Grid`, and asks it for nothing but node ids. The field `tally`
    counts what became of the round's messages.
    """

    def __init__(
        self, grid: Grid, server: Server, nodes: Mapping[int, int], out: Path, delivery: Delivery
    ) -> None:
        """Prepares to record a stack's rounds.

        Args:
            grid: The grid of any engine.
            server: What the server knows of the stack.
            nodes: Node id by client, looked up anew when a round begins.
            out: The run's folder, which gets the recordings.
            delivery: How messages travel.
        """
        self._grid, self._server = grid, server
        self._nodes = nodes
        self._clients: dict[int, int] = {}
        self._out = out
        self._delivery = delivery
        self._scratch = scratch(out, server.stack_name)
        self._spool = Spool(self._scratch / "training")
        self._averages: Mapping[tuple[int, int], Averages] = {}
        parameters, buffers = server.initial()
        self._expected = wire.Shape(
            update=parameters,
            buffers=wire.floating(buffers) if server.releases_statistics else {},
            loss=server.reports_loss,
            clips=server.scenario.federation.clips_at_clients,
        )
        self._timeout = server.scenario.federation.timeout
        self._clipping_norm: float | None = None
        self._is_clipped: dict[int, bool | None] = {}
        # Integer buffers (batch norm's counter) never change and never cross the wire.
        self._constants = {n: b for n, b in buffers.items() if not b.is_floating_point()}
        self._round = 0
        self._arrays = ArrayRecord()
        self._parameters: Tensors = parameters
        self._buffers: Tensors = {}
        self._new_buffers: Tensors = {}
        self._plan = server.plan(1)
        self.tally = Tally()

    def begin(self, round: int, buffers: Tensors) -> None:
        """Starts `round`, from 1, whose global model has the float `buffers`."""
        self._round = round
        self._buffers = self._new_buffers = buffers
        self._plan = self._server.plan(round)
        # A client's node may have come back under another number since the last round.
        self._clients = {node: client for client, node in self._nodes.items()}
        self.tally = Tally()

    def end(self) -> Tensors:
        """Ends the round; returns the float buffers of the next global model.

        They are the mean over accepted answers, else the old ones.
        """
        # Buffers are statistics: a server optimizer could make a variance negative.
        self._spool.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)
        return self._new_buffers

    def get_node_ids(self) -> Iterable[int]:
        """Returns the node ids of this round's participants, by ascending client."""
        return [self._nodes[client] for client in self._plan.participants]

    def send_and_receive(self, messages: Iterable[Message]) -> list[Message]:
        """Sends the strategy's training messages, then its probes; records what is observed.

        It is called once between `begin` and `end`, and may replace the content of `messages` by
        fedsim's own order. All get the arrays of the first, by client: it is a FedsimError if that
        has none. It returns one reply for each accepted update, by ascending client, or none: a
        reply's arrays are that client's new weights, computed when they are read, until `end`. If
        the stack combines updates, there is one reply with the weights that the combination gives,
        or none.
        """
        # Sums depend on their order, and node numbers differ between engines: the order is by
        # client.
        jobs = sorted(messages, key=self._client_of)
        if not jobs:
            return []
        arrays = jobs[0].content.get(wire.ARRAYS)
        if not isinstance(arrays, ArrayRecord):
            raise FedsimError(f"the strategy sends no {wire.ARRAYS!r} to the clients")
        self._arrays, self._parameters = arrays, wire.decode(arrays)
        if self._expected.clips:
            told = wire.config_of(jobs[0].content)[KEY_CLIPPING_NORM]
            assert isinstance(told, float)
            self._clipping_norm = told
        if self._server.protocol:
            return self._securely([self._client_of(message) for message in jobs])
        # One content for all, so that a grid serializes it once.
        content = self._order(arrays, None)
        for message in jobs:
            message.content = content
        self.tally.bytes_down = size_of(content) * len(jobs)
        orders: list[_Ordered] = [(message, self._client_of(message), None) for message in jobs]
        # Where probes are recorded, the round's own training is not.
        observed = () if self._plan.probes else self._plan.observed
        accepted = self._collect(orders, observed, {None: self._spool})
        replies = self._replies(accepted[None], record=bool(observed))
        if self._plan.lookers:
            self._tell_left_out(None, set(self._plan.participants) - set(self.tally.accepted))
        if self._plan.probes:
            self._probe(self._plan.probes)
        return replies

    def _securely(self, clients: Sequence[int]) -> list[Message]:
        server, tally = self._server, self.tally
        parts = plan.parts(server, self._round)
        sum = SecureSum(
            self._grid,
            server,
            self._round,
            self._delivery,
            nodes=self._nodes,
            tally=tally,
        )
        layout = sum.layout
        trained = self._parameters
        planted = server.plant_probe(trained, self._round)
        # As without secure sums, training is recorded in rounds without probes alone.
        is_recorded = [probe is not None or len(parts) == 1 for probe in parts]
        seen_alone = set(self._plan.singled)

        def record(part: int, client: int, update: Update, who: Collection[int]) -> None:
            if is_recorded[part] and self._plan.is_observed:
                # A recording holds the weights at which its update was computed.
                self._parameters = trained if parts[part] is None else planted
                self._record(client, update, parts[part], who)
                self._parameters = trained

        def on_masked(client: int, vector: Ring) -> None:
            for part in range(len(parts)) if client in seen_alone else ():
                record(part, client, layout.read_masked(vector, part), [client])

        ask = partial(
            messages.model_order,
            parameters=self._arrays,
            buffers=wire.encode(self._buffers),
            planted=None if planted is trained else wire.encode(planted),
        )
        with self._averaging(self._plan.probes):
            opened, why = sum.run(clients, ask, on_masked), "too_few"
            updates: list[Update] = []
            if opened is not None:
                try:
                    updates = [
                        layout.sum_of(opened.total, part, len(opened.clients))
                        for part in range(len(parts))
                    ]
                except AbortedError as error:
                    tally.say(f"secure aggregation: {error}")
                    opened, why = None, "malformed"
            for part, update in enumerate(updates):
                record(part, -1, update, sum.arrived)
        left_out = set(self._plan.participants) - set(sum.arrived)
        for probe in parts:
            if left_out and self._plan.is_observed:
                self._tell_left_out(probe, left_out)
        if opened is None:
            # Clients that failed by themselves are counted already.
            tally.failures[why] += len(clients) - tally.failed
            tally.probe_failures += len(parts) - 1
            return []
        tally.accepted = tuple(opened.clients)
        return [self._finish_combined(updates[0], opened.reply)]

    def _finish_combined(self, combined: Update, reply: Message) -> Message:
        self._new_buffers = combined.buffers or self._buffers
        weights = {n: self._apply_update(n, combined.tensors[n]) for n in self._parameters}
        numbers = wire.metrics_of(combined.num_examples, None, None)
        reply.content = RecordDict({wire.ARRAYS: wire.encode(weights), wire.METRICS: numbers})
        return reply

    def _probe(self, probes: Sequence[Probe]) -> None:
        trained = self._parameters
        self._parameters = self._server.plant_probe(trained, self._round)
        arrays = self._arrays if self._parameters is trained else wire.encode(self._parameters)
        try:
            together = len(probes) if self._delivery.own_machines else 1
            for first in range(0, len(probes), together):
                self._ask(probes[first : first + together], arrays)
        finally:
            self._parameters = trained  # the strategy's replies are computed from these

    def _ask(self, probes: Sequence[Probe], arrays: ArrayRecord) -> None:
        # The spools of all these probes stay within the budget together.
        budget = BUDGET // len(probes)
        with ExitStack() as until_answered:
            spools = [
                until_answered.enter_context(Spool(self._scratch / f"probe-{number:04d}", budget))
                for number in range(len(probes))
            ]
            until_answered.enter_context(self._averaging(probes, budget))
            for release in range(self._server.scenario.observe.releases):
                again = [replace(probe, release=release) for probe in probes]
                self._release(dict(zip(again, spools, strict=True)), arrays)

    @contextmanager
    def _averaging(self, probes: Sequence[Probe], budget: int = BUDGET) -> Iterator[None]:
        with ExitStack() as until_recorded:
            self._averages = {
                (probe.batch_size, probe.trial): until_recorded.enter_context(
                    Averages(self._scratch / f"mean-{number:04d}", budget)
                )
                for number, probe in enumerate(probes)
            }
            yield
            for probe in probes:
                for mean in self._averages[probe.batch_size, probe.trial].means():
                    self._save(probe, mean)

    def _release(self, spools: Mapping[Probe, Spool], arrays: ArrayRecord) -> None:
        kind, observed = f"train.{wire.PROBE}", self._plan.observed
        orders = []
        for probe in spools:
            content = self._order(arrays, probe)
            orders += [
                (Message(content, self._nodes[client], kind), client, probe) for client in observed
            ]
        asked: dict[Probe | None, Spool] = dict(spools.items())
        accepted = self._collect(orders, observed, asked)
        for probe, spool in spools.items():
            if self._too_few(accepted[probe]):
                self.tally.probe_failures += 1
            else:
                self._combine(spool, probe, record=True)
            spool.clear()

    def _collect(
        self,
        orders: Sequence[_Ordered],
        observed: Collection[int],
        spools: Mapping[Probe | None, Spool],
    ) -> dict[Probe | None, dict[int, Message]]:
        combines = self._server.stack.aggregation is not None
        accepted: dict[Probe | None, dict[int, Message]] = {probe: {} for probe in spools}
        messages = [message for message, _, _ in orders]
        # A node works off its orders one after the other, so that the last has to wait for all.
        expire = self._timeout * len(spools) if self._delivery.own_machines else None
        for position, reply in exchange(self._grid, messages, self._timeout, expire_after=expire):
            _, client, probe = orders[position]
            if reply is not None and reply.has_content() and probe is None:
                self.tally.bytes_up += size_of(reply.content)
            training = self._server.declared_for(probe)
            # Strategies weigh by this number: a client may not claim any weight it likes.
            held = self._server.census.held[client]
            most = max(1, held, training.batch_size * training.steps)
            verdict = judge(reply, replace(self._expected, most_examples=most))
            # Recorded even if it is then left out: the server did see it.
            if verdict.answer and client in observed and not combines:
                self._record(client, verdict.answer.update, probe)
            if verdict.reason:
                self.tally.fail(verdict, client, probe)
            elif verdict.answer and reply and (probe is None or combines):
                spools[probe].put(client, verdict.answer)
                if probe is None:
                    self._is_clipped[client] = verdict.answer.is_clipped
                # The update is spooled, and its reply is kept for the envelope alone.
                reply.content = RecordDict()
                accepted[probe][client] = reply
        return accepted

    def _client_of(self, message: Message) -> int:
        return self._clients[message.metadata.dst_node_id]

    def _replies(self, accepted: dict[int, Message], *, record: bool) -> list[Message]:
        spool, tally = self._spool, self.tally
        tally.accepted = tuple(spool.clients())
        tally.zero_updates = spool.zero_updates
        tally.train_loss = spool.mean_loss()
        if not accepted:
            return []
        if self._too_few(accepted):
            tally.accepted = ()
            tally.failures["too_few"] += len(accepted)
            return []
        combined = self._combine(spool, None, record=record)
        if combined is not None:
            return [self._finish_combined(combined, accepted[min(accepted)])]
        self._new_buffers = spool.mean_buffers(self._expected.buffers) or self._buffers
        for client, reply in accepted.items():
            # Weights are made when the strategy reads them: one client's at a time lies in memory.
            arrays = lazy_record(self._parameters, partial(self._weight, client))
            numbers = spool.num_examples(client), spool.loss(client), self._is_clipped[client]
            metrics = wire.metrics_of(*numbers)
            reply.content = RecordDict({wire.ARRAYS: arrays, wire.METRICS: metrics})
        return [accepted[client] for client in sorted(accepted)]

    def _too_few(self, accepted: Collection[int]) -> bool:
        least = self._server.stack.least_clients
        if not accepted or len(accepted) >= least:
            return False
        self.tally.say(
            f"{number_of(len(accepted), 'client')} answered; their shared noise is enough for no "
            "fewer than "
            f"{least}, so that nothing is combined"
        )
        return True

    def _weight(self, client: int, name: str) -> Tensor:
        return self._apply_update(name, self._spool.update(client, name))

    def _apply_update(self, name: str, update: Tensor) -> Tensor:
        return self._server.apply_update(self._parameters[name], update, self._round)

    def _combine(self, spool: Spool, probe: Probe | None, *, record: bool) -> Update | None:
        """Combines all spooled updates into the one that the server sees; None if it sees each."""
        aggregation, clients = self._server.stack.aggregation, spool.clients()
        if aggregation is None or not clients:
            return None
        names = self._expected.update, self._expected.buffers
        updates = (spool.get(client, *names) for client in clients)
        combined = self._server.combine_updates(updates, self._round, probe)
        if isinstance(aggregation, NoisyAggregation):
            # The sum depends on who answered, and two sums with the same noise have a difference
            # without any.
            notes = NoiseNotes.of_server(self._out, self._server.stack_name, "server")
            notes.use_once(release_key(self._round, probe), [combined.tensors])
        if shapes(combined.tensors) != shapes(self._parameters):
            raise FedsimError(
                f"{type(aggregation).__name__}.combine changed names or shapes of the update; it "
                "must keep them"
            )
        if record:
            self._record(-1, combined, probe, clients)
            self._tell_left_out(probe, set(self._plan.observed) - set(clients))
        return combined

    def _record(
        self, client: int, update: Update, probe: Probe | None, who: Collection[int] = (0,)
    ) -> None:
        """Records an update; `who` are the clients whose mean it is if `client` is -1."""
        seen = MeanRelease(
            client=client,
            update=update,
            num_clients=len(who),
            participants=tuple(sorted(who)) if client < 0 else (),
        )
        if probe and self._server.scenario.observe.releases > 1:
            self._averages[probe.batch_size, probe.trial].add(seen)
        else:
            self._save(probe, seen)

    def _save(self, probe: Probe | None, seen: MeanRelease) -> None:
        for watcher in self._server.schedule.watchers:
            observation = self._server.observation(
                self._round,
                seen.client,
                seen.update,
                self._parameters,
                {**self._constants, **self._buffers},
                probe=probe,
                num_clients=seen.num_clients,
                releases=seen.releases,
                watcher=watcher,
            )
            if observation.vantage == "aggregate":
                observation = replace(observation, participants=seen.participants)
            save_observation(observation, self._out)

    def _tell_left_out(self, probe: Probe | None, left_out: Collection[int]) -> None:
        # A client keeps its truth before it answers, and nobody else can remove it.
        content = wire.order(self._round, ArrayRecord(), ArrayRecord(), probe)
        kind = f"query.{wire.LEFT_OUT}"
        told = [Message(content, self._nodes[client], kind) for client in sorted(left_out)]
        for _ in exchange(self._grid, told, self._timeout):
            pass

    def _order(self, arrays: ArrayRecord, probe: Probe | None) -> RecordDict:
        buffers = wire.encode(self._buffers)
        return wire.order(self._round, arrays, buffers, probe, self._clipping_norm)
