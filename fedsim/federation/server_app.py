"""The ServerApp: rounds of any Flower strategy, seeded sampling, evaluation, checkpoints.

Unlike Flower's `Strategy.start`, it starts at any round and survives one without a usable update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.exception import PrivacyBudgetExhausted

from fedsim import rng
from fedsim.federation import strategies, wire
from fedsim.federation.checkpoint import Checkpoint, Checkpoints
from fedsim.federation.delivery import START_SECONDS, Delivery, Nodes
from fedsim.federation.noise_use import NoiseNotes, release_key
from fedsim.federation.records import RoundRecord
from fedsim.federation.tap import TapGrid
from fedsim.training.server import Server
from fedsim.training.spending import epsilon_of_rounds
from fedsim.types import FedsimError, Tensors
from fedsim.words import number_of

OnRound = Callable[[RoundRecord], None]

_ONE_MACHINE = Delivery()
_SECRET_WORDS = 8
"""Words of 32 bits by which NumPy is seeded with a secret: one could be found by trying all."""


def build(
    server: Server, out: Path, on_round: OnRound, delivery: Delivery = _ONE_MACHINE
) -> ServerApp:
    """Returns the ServerApp that trains the stack of `server`, from its last checkpoint on.

    The app raises a FedsimError if nodes are missing or the strategy fails.

    Args:
        server: The stack's `Server`.
        out: The run's folder.
        on_round: Called after each round with its record, before a checkpoint is written.
        delivery: How messages travel; by default clients take turns on one machine.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        patience = server.scenario.federation.timeout if delivery.own_machines else START_SECONDS
        nodes = Nodes(grid, server.scenario.data.clients, patience)
        tap = TapGrid(grid, server, nodes.by_client, out, delivery)
        _StackTraining(server, tap, nodes, out).run(on_round)

    return app


class _StackTraining:
    def __init__(self, server: Server, tap: TapGrid, nodes: Nodes, out: Path) -> None:
        self._server = server
        self._tap = tap
        self._nodes = nodes
        self._out = out
        federation = server.scenario.federation
        self._strategy = strategies.build(federation.strategy, federation.strategy_parameters)
        strategies.check_sampled(federation.strategy_parameters, len(server.plan(1).participants))
        held = server.census.held
        self._checkpoints = Checkpoints(out, server.scenario, server.stack_name, held)
        parameters, buffers = server.initial()
        self._parameters: Tensors = parameters
        self._buffers: Tensors = wire.floating(buffers)
        self._constants = {n: b for n, b in buffers.items() if n not in self._buffers}
        self._done = 0
        self._is_spent = False
        """Whether the strategy's accountant has stopped training."""
        saved = self._checkpoints.load()
        if saved:
            self._done = saved.round
            # In the model's order again: it is the order in which strategies add up.
            self._parameters = {name: saved.parameters[name] for name in self._parameters}
            self._buffers = {name: saved.buffers[name] for name in self._buffers}
            strategies.restore_memory(self._strategy, saved.strategy, saved.strategy_tensors)

    def run(self, on_round: OnRound) -> None:
        scenario = self._server.scenario
        last = scenario.training.rounds
        self._nodes.gather(self._done)
        for round in range(self._done + 1, last + 1):
            on_round(self._round(round))
            if round % scenario.federation.checkpoint_every == 0 or round == last:
                self._save(round)

    def _round(self, round: int) -> RoundRecord:
        started = time.perf_counter()
        # Before the round begins, since `begin` fixes the nodes that it talks to.
        refused = self._nodes.refresh(round - 1)
        self._tap.begin(round, self._buffers)
        for line in refused:
            self._tap.tally.say(line)
        try:
            parameters = self._train(round)
        finally:
            buffers = self._tap.end()
        if parameters is not None:  # statistics belong to their weights: both move, or neither
            self._parameters, self._buffers = parameters, buffers
        test_loss, test_accuracy = self._evaluate(round)
        tally = self._tap.tally
        return RoundRecord(
            round=round,
            participants=() if self._is_spent else self._server.plan(round).participants,
            aggregated=len(tally.accepted),
            train_loss=tally.train_loss,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            failures=dict(tally.failures),
            details=tuple(tally.details),
            zero_updates=tally.zero_updates,
            probe_failures=tally.probe_failures,
            bytes_up=tally.bytes_up,
            bytes_down=tally.bytes_down,
            seconds=time.perf_counter() - started,
        )

    def _train(self, round: int) -> Tensors | None:
        arrays = wire.encode(self._parameters)
        name = type(self._strategy).__name__
        with _numpy_stream(self._words(round)):
            try:
                # All that a strategy asks of its grid is which nodes there are.
                grid = cast(Grid, self._tap)
                messages = self._strategy.configure_train(round, arrays, ConfigRecord(), grid)
            except PrivacyBudgetExhausted:
                self._say_spent()
                return None
            replies = self._tap.send_and_receive(messages)
            if not replies:
                # An accountant's strategy awaits the end of a round that it has begun.
                if getattr(self._strategy, "accountant", None) is not None:
                    self._strategy.aggregate_train(round, [])
                return None
            try:
                aggregated, _ = self._strategy.aggregate_train(round, replies)
            # These name their cause already, and a full disk is not the strategy's doing.
            except (FedsimError, OSError):
                raise
            except Exception as error:  # Flower's strategies raise what they happen to raise
                # Flower's clip divides by an update's norm. One client must not end the run.
                clips = hasattr(self._strategy, "noise_multiplier")
                if not (clips and isinstance(error, ZeroDivisionError)):
                    raise FedsimError(
                        f"federation.strategy: {name} failed in round {round} on "
                        f"{number_of(len(replies), 'update')}: {type(error).__name__}: {error}"
                    ) from error
                self._tap.tally.say(f"{name} divides by zero: an update is zero")
                aggregated = None
        if aggregated is None:
            self._tap.tally.accepted = ()
            self._tap.tally.say(f"{name} aggregates nothing of {number_of(len(replies), 'update')}")
            return None
        clients = len(self._tap.tally.accepted)
        tensors = self._cast(aggregated)
        if getattr(self._strategy, "noise_multiplier", 0):
            # A round that is repeated with other answers would show their difference without noise.
            notes = NoiseNotes.of_server(self._out, self._server.stack_name, "strategy")
            notes.use_once(release_key(round, None), [tensors])
        return self._server.computation.finalize(tensors, clients)

    def _words(self, round: int) -> int | list[int]:
        """Returns the seed of all that the strategy draws in `round`, also in a resumed run."""
        # Clients with secrets of their own know the scenario's seed, and could take the noise off.
        secret = self._server.noise_seed
        if secret is None:
            return rng.derive(self._server.scenario.seed, "strategy", round) % 2**32
        return [rng.derive(secret, "strategy", round, n) % 2**32 for n in range(_SECRET_WORDS)]

    def _say_spent(self) -> None:
        # Flower asks each later round again, and raises each time.
        if self._is_spent:
            return
        self._is_spent = True
        accountant, strategy = self._strategy.accountant, self._strategy  # type: ignore[attr-defined]
        counted, rounds = accountant.get_privacy_spent(), accountant.num_releases
        # Its clients weigh the same, so that Gaussian releases compose to one (`server_noise`).
        held = epsilon_of_rounds(strategy.noise_multiplier, rounds, counted.delta)  # type: ignore[attr-defined]
        stated = f"{held:.4g} (δ = {counted.delta:g}, client, zero out)"
        if unproven := self._why_unproven():
            stated = f"∞, since {unproven}"
        # The reason comes last: a long line is cut.
        self._tap.tally.say(
            f"the accountant stops training: it has counted ε = {counted.epsilon:.4g} in "
            f"{number_of(rounds, 'round')}, and allows {accountant.config.max_epsilon:g}; the "
            "server, which has seen each update, has ε = ∞, and who sees the model alone true ε = "
            f"{stated}"
        )

    def _why_unproven(self) -> str:
        """Returns why the strategy's clip and noise hide no client in the model; empty if so."""
        moving = self._server.census.private_statistics.get("client", ())
        passed = [n for n, value in self._parameters.items() if not value.ndim]
        cases = {
            "batch-norm statistics are averaged without a clip or noise": (
                self._server.releases_statistics
            ),
            f"Flower clips no single number: {', '.join(passed)}": bool(passed),
            f"clients' data moved, without noise, {'; '.join(moving)}": bool(moving),
            f"noise is rounded in {', '.join(self._server.unprotected)}": bool(
                self._server.unprotected
            ),
        }
        return next((why for why, is_so in cases.items() if is_so), "")

    def _cast(self, arrays: ArrayRecord) -> Tensors:
        """Casts the strategy's result to the parameters' types (FedAdam computes in float64)."""
        result = wire.decode(arrays)
        if set(result) != set(self._parameters):
            raise FedsimError(
                f"{type(self._strategy).__name__} returned other arrays than it was given"
            )
        return {name: result[name].to(value.dtype) for name, value in self._parameters.items()}

    def _evaluate(self, round: int) -> tuple[float | None, float | None]:
        training = self._server.scenario.training
        if round % training.evaluate_every and round != training.rounds:
            return None, None
        found = self._server.computation.evaluate(
            self._parameters, {**self._constants, **self._buffers}
        )
        if not math.isfinite(found.loss):
            self._tap.tally.say(
                "the test loss is not finite: training diverged; lower training.local.lr"
            )
            return None, found.accuracy
        return found.loss, found.accuracy

    def _save(self, round: int) -> None:
        plain, tensors = strategies.save_memory(self._strategy)
        self._checkpoints.save(
            Checkpoint(
                round=round,
                parameters=self._parameters,
                buffers=self._buffers,
                strategy=plain,
                strategy_tensors=tensors,
            )
        )


@contextmanager
def _numpy_stream(seed: int | list[int]) -> Iterator[None]:
    before = np.random.get_state()  # noqa: NPY002 - it is the global stream that is meant
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
