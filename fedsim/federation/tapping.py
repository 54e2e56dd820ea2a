"""Taps anybody's Flower app: records models and answers, and what a client trains on.

    fedsim.tap(grid, out="tapped")          in a ServerApp, around the grid
    fedsim.tap(strategy, out="tapped")      or on the strategy, which then taps the grid it is given
    ClientApp(mods=[fedsim.client_tap(out="tapped")])    on a client, where the server is another's
    ClientApp(mods=[fedsim.witness(out="witnessed")])    on a client, for an auditor

Every call goes through unchanged. Exchanges are written by a thread beside the round, see `behind`.
All is written once the grid is gone, the strategy's `start` or the client's function has returned,
or the interpreter ends. A recording that fails is told in the log and counted; the app goes on.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore.run import Run

from fedsim.federation import wire
from fedsim.recording import behind
from fedsim.recording.exchanges import (
    LONGEST,
    MOST,
    MOST_ROUNDS,
    DeployedPart,
    PartKind,
    Recorder,
    TapSide,
    ToldValues,
    describe_part,
    plain_value,
)
from fedsim.system import paths
from fedsim.training.watching import TrainingOrder, keep_testimony, watch_training
from fedsim.types import FedsimError

Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]
T = TypeVar("T", bound=Grid | Strategy)

SECAGG = "secaggplus_configs"
"""Name of the record that marks messages of Flower's SecAgg+, whose answers a tap cannot read."""
TRAIN = "train"
"""Type of the messages that ask for training, alone or before a dot and an action."""
_log = logging.getLogger("fedsim.tap")
# Seconds without anything written after which a grid that is dropped waits no longer.
_STALLED = 10.0
# Orders without an answer that are remembered.
_PENDING = 100_000


def tap(
    target: T,
    out: str | Path,
    *,
    rounds: Collection[int] | None = None,
    clients: int | None = None,
    max_gib: float = 8.0,
) -> T:
    """Records what the server of a Flower app sees, below `out`; returns what to use instead.

    A grid is wrapped in another grid. A strategy is changed and returned: from now on its `start`
    taps the grid that it is handed. A FedsimError refuses any other target, and wrong values.

    Args:
        target: The grid or the strategy of a ServerApp.
        out: The folder; each run of the app gets its own in it, `run-<id>`.
        rounds: Rounds that are recorded, counted from 1; default all. Where orders do not name
            their round, batches of orders to train are counted.
        clients: Maximum number of clients recorded, those that are asked first; default all.
        max_gib: Maximum size of a run on disk, in GiB; what does not fit is left out and counted.
    """
    recorder_of = _recorders(out, rounds, clients, max_gib)
    if isinstance(target, Strategy):
        start = target.start

        def tapped_start(grid: Grid, *arguments: Any, **named: Any) -> Any:
            tapped = _TappedGrid(grid, recorder_of)
            try:
                return start(tapped, *arguments, **named)
            finally:
                # Again, since an accountant has counted the last round only now.
                tapped.note_strategy(target)
                behind.finish()

        target.start = tapped_start  # type: ignore[method-assign]
        return target
    if isinstance(target, Grid):
        return cast("T", _TappedGrid(target, recorder_of))
    raise FedsimError(
        f"fedsim.tap: expected a Grid or a Strategy of flwr.serverapp, got {type(target).__name__}"
    )


def client_tap(
    out: str | Path, *, rounds: Collection[int] | None = None, max_gib: float = 8.0
) -> Mod:
    """Returns a mod of a ClientApp that records what this client receives and answers.

    The mod must be the first of the app's mods, so that it records what leaves the machine. Each
    run gets a folder of its own in `out`. `rounds` (from 1; None: all) and `max_gib` are those of
    `tap`; wrong values are a FedsimError.
    """
    recorder_of = _recorders(out, rounds, None, max_gib)

    def mod(
        message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        tape = _client_tape(recorder_of, context) if trains(message) else None
        sent = None
        if tape:
            tape.begin([message])
            tape.note_parts("mods", lambda: _list_mods(call_next))
            # Before the app runs, which may fill the message's record anew.
            sent = tape.note(message, context.node_id)
        reply = call_next(message, context)
        if tape and sent:
            tape.record(sent, message.metadata.message_id, reply)
            # A client's process may be killed once it has answered.
            behind.finish()
        return reply

    return mod


def witness(
    out: str | Path,
    *,
    rounds: Collection[int] | None = None,
    max_images: int = 4096,
    max_gib: float = 2.0,
) -> Mod:
    """Returns a mod of a ClientApp that keeps the images and labels that the client trains on.

    Images are kept as the model is called with them: transformed and normalized. `watch_training`
    says what it cannot see.

    Args:
        out: A folder of the client's own; each run of the app gets its own in it, `run-<id>`.
        rounds: Rounds that are kept, counted from 1; default all. Given rounds leave out every
            message that does not name its round. They are not checked; wrong values of the other
            arguments are a FedsimError.
        max_images: Maximum number of distinct images kept of one order to train.
        max_gib: Maximum size of a run on this disk, in GiB; what does not fit is not kept.
    """
    if max_images < 1:
        raise FedsimError(f"max_images: expected at least 1, got {max_images}")
    folder, max_bytes = _folder_with_room(out, max_gib)
    wanted = None if rounds is None else frozenset(rounds)

    def mod(
        message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        if not trains(message) or not message.has_content():
            return call_next(message, context)
        round = _round_of(message.content) or 0
        if wanted is not None and round not in wanted:
            return call_next(message, context)
        with watch_training(max_images) as steps:
            reply = call_next(message, context)
        try:
            partition = context.node_config.get("partition-id")
            order = TrainingOrder(
                run_id=context.run_id,
                round=round,
                node_id=context.node_id,
                message_id=message.metadata.message_id,
                partition=partition if isinstance(partition, int) else None,
            )
            keep_testimony(folder, steps, order, _list_mods(call_next), max_bytes)
        except Exception as error:  # the app goes on without a witness
            logging.getLogger("fedsim.witness").warning(
                "fedsim.witness: what was trained on is not kept: %s", error
            )
        return reply

    return mod


def _client_tape(recorder_of: _Recorders, context: Context) -> _Tape | None:
    try:
        recorder = recorder_of(context.run_id, "client")
        # Of messages that do not say which round they are of, those before this one are on disk.
        return _Tape(recorder, counted=recorder.count_recorded(context.node_id))
    except OSError as error:
        _log.warning("fedsim.client_tap: an exchange is not recorded: %s", error)
        return None


_Recorders = Callable[[int, TapSide], Recorder]


def _recorders(
    out: str | Path, rounds: Collection[int] | None, clients: int | None, max_gib: float
) -> _Recorders:
    chosen = None if rounds is None else frozenset(rounds)
    if chosen is not None and not all(1 <= round <= MOST_ROUNDS for round in chosen):
        raise FedsimError(f"rounds: expected 1 to {MOST_ROUNDS}, got {sorted(chosen)}")
    if clients is not None and clients < 1:
        raise FedsimError(f"clients: expected at least 1, got {clients}")
    folder, max_bytes = _folder_with_room(out, max_gib)
    return partial(Recorder, folder, rounds=chosen, clients=clients, max_bytes=max_bytes)


def _folder_with_room(out: str | Path, max_gib: float) -> tuple[Path, int]:
    if not 0 < max_gib < math.inf:
        raise FedsimError(f"max_gib: expected a finite number above 0, got {max_gib}")
    folder = Path(out).absolute()  # an app may change its folder
    paths.writable_folder(folder, "out")
    return folder, int(max_gib * paths.GIB)


@dataclass(kw_only=True)
class _Broadcast:
    round: int
    digest: str | None = None
    """Digest of its file, once that is written."""


@dataclass(frozen=True, kw_only=True)
class _Sent:
    round: int
    node_id: int
    key: str
    """Name of the record that held the model."""
    broadcast: _Broadcast
    config: ToldValues


class _Tape:
    """Feeds one run's recorder from messages; failures are counted and never raised."""

    def __init__(self, recorder: Recorder, counted: int = 0) -> None:
        self._recorder = recorder
        self._counted = counted
        self._last: tuple[_Broadcast, _Content] | None = None
        """Last model that was sent, which clients share. Orders hold no arrays: some are never
        answered."""

    def begin(self, messages: Iterable[Message]) -> None:
        """Counts a new round for a batch of training messages, if these do not say their round."""
        for message in messages:
            if trains(message) and message.has_content():
                # Once for all messages of a batch, which are of one round.
                self._counted += _round_of(message.content) is None
                return

    def note(self, message: Message, node_id: int) -> _Sent | None:
        """Records the model in a message to a node; returns the order, for `record`."""
        if not trains(message) or not message.has_content():
            return None
        with self._counting_failures():
            return self._note(message.content, node_id)
        return None

    def _note(self, content: RecordDict, node_id: int) -> _Sent | None:
        if SECAGG in content:
            raise FedsimError(
                "SecAgg+ masks each answer, so that the server sees its clients' sum alone, and a "
                "tap no update; tap a run without it, or use a scenario with secure_aggregation"
            )
        round = _round_of(content) or max(1, self._counted)
        if not self._recorder.wants(round, node_id):
            return None
        key, arrays = _model(content, None)
        now = _content_of(arrays)
        # All messages of a round carry equal weights, which are saved once.
        if self._last and self._last[0].round == round and _same(self._last[1], now):
            sent = self._last[0]
        else:
            sent = _Broadcast(round=round)
            self._last = sent, now
            self._later(partial(self._save_broadcast, sent, now), now)
        return _Sent(
            round=round, node_id=node_id, key=key, broadcast=sent, config=_read_told(content)
        )

    def _save_broadcast(self, sent: _Broadcast, content: _Content) -> None:
        sent.digest = self._recorder.save_broadcast(sent.round, wire.views(content))

    def note_parts(self, kind: PartKind, read: Callable[[], list[DeployedPart]]) -> None:
        with self._counting_failures():
            parts = read()
            self._later(lambda: self._recorder.note_parts(kind, parts), {})

    def record(self, sent: _Sent, message_id: str, reply: Message) -> None:
        with self._counting_failures():
            if not reply.has_content():
                self._leave_out("a client answered with an error")
                return
            if reply.metadata.src_node_id != sent.node_id:
                self._leave_out("another node answered than was asked")
                return
            content = _content_of(_model(reply.content, sent.key)[1])
            metrics = _read_told(reply.content)
            self._later(partial(self._save_reply, sent, message_id, content, metrics), content)

    def _save_reply(
        self, sent: _Sent, message_id: str, content: _Content, metrics: ToldValues
    ) -> None:
        if sent.broadcast.digest is None:
            self._recorder.leave_out("what was sent could not be recorded")
            return
        self._recorder.save_reply(
            wire.views(content),
            round=sent.round,
            node_id=sent.node_id,
            message_id=message_id,
            broadcast=sent.broadcast.digest,
            config=sent.config,
            metrics=metrics,
        )

    def _later(self, job: Callable[[], object], content: _Content) -> None:
        """Runs `job`, which writes `content`, on the writing thread, and counts it if it fails."""

        def run_guarded() -> None:
            try:
                job()
            except Exception as error:  # there is nobody to raise it to
                self._tell(error)

        behind.later(run_guarded, sum(len(array.data) for array in content.values()))

    def _leave_out(self, reason: str) -> None:
        self._later(lambda: self._recorder.leave_out(reason), {})

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an app goes on, whatever it is made of, sends or is answered
            behind.later(partial(self._tell, error))

    def _tell(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, FedsimError) else type(error).__name__
        if self._recorder.leave_out(reason[:LONGEST]):
            _log.warning("fedsim.tap: an exchange is not recorded: %s", error)


class _TappedGrid(Grid):
    def __init__(self, grid: Grid, recorder_of: _Recorders) -> None:
        self._grid = grid
        self._recorder_of = recorder_of
        self._tapes: dict[int, _Tape] = {}
        self._pending: dict[str, _Sent] = {}
        """Orders that were pushed and not yet answered, by message id."""
        # An app drops its grid when it ends, and its process may not live long after that. The
        # collector may drop it while this thread holds what the writing thread needs.
        weakref.finalize(self, behind.finish, _STALLED)

    def __getattr__(self, name: str) -> Any:
        if "_grid" not in self.__dict__:  # in a copy that is being made
            raise AttributeError(name)
        return getattr(self._grid, name)

    # `Grid` defines these itself, so that `__getattr__` is not asked for them.

    @property
    def run(self) -> Run:
        return self._grid.run

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        return self._grid.create_message(*arguments, **named)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def get_nodes(self) -> Any:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sending = list(messages)
        noted = self._note(sending)
        ids = list(self._grid.push_messages(sending))
        for message, sent in zip(sending, noted, strict=True):
            if sent:
                self._pending[message.metadata.message_id] = sent
        # Orders that are never answered must not pile up: the oldest go first.
        while len(self._pending) > _PENDING:
            self._pending.pop(next(iter(self._pending)))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._record_replies(self._grid.pull_messages(message_ids), self._pending)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sending = list(messages)
        noted = self._note(sending)
        replies = self._grid.send_and_receive(sending, timeout=timeout)
        waiting = {
            message.metadata.message_id: sent
            for message, sent in zip(sending, noted, strict=True)
            if sent
        }
        return self._record_replies(replies, waiting)

    def note_strategy(self, strategy: Strategy) -> None:
        for tape in self._tapes.values():
            tape.note_parts("strategies", lambda: _list_strategies(strategy))

    def _note(self, messages: list[Message]) -> list[_Sent | None]:
        try:
            tape = self._tape()
        except Exception as error:  # an app goes on, whatever its grid and the disk say
            _log.warning("fedsim.tap: messages are not recorded: %s", error)
            return [None] * len(messages)
        tape.begin(messages)
        # Flower's strategies call from their `start`; a loop of the app's own has none.
        if (strategy := _find_strategy()) and any(map(trains, messages)):
            tape.note_parts("strategies", lambda: _list_strategies(strategy))
        return [tape.note(message, message.metadata.dst_node_id) for message in messages]

    def _record_replies(
        self, replies: Iterable[Message], waiting: dict[str, _Sent]
    ) -> Iterable[Message]:
        if isinstance(replies, list):
            for reply in replies:
                self._record(reply, waiting)
            return replies
        return self._record_as_read(replies, waiting)

    def _record_as_read(
        self, replies: Iterable[Message], waiting: dict[str, _Sent]
    ) -> Iterator[Message]:
        for reply in replies:
            self._record(reply, waiting)
            yield reply

    def _record(self, reply: Message, waiting: dict[str, _Sent]) -> None:
        message_id = reply.metadata.reply_to_message_id
        sent = waiting.pop(message_id, None)
        if sent:
            self._tape().record(sent, message_id, reply)

    def _tape(self) -> _Tape:
        run_id = self._grid.run.run_id
        if run_id not in self._tapes:
            self._tapes[run_id] = _Tape(self._recorder_of(run_id, "server"))
        return self._tapes[run_id]


def trains(message: Message) -> bool:
    """Returns whether a message asks a client to train: its type is `train` or `train.<action>`."""
    return message.metadata.message_type.partition(".")[0] == TRAIN


def _round_of(content: RecordDict) -> int | None:
    for record in content.values():
        if isinstance(record, ConfigRecord):
            value = record.get(wire.ROUND)
            if isinstance(value, int) and 1 <= value <= MOST_ROUNDS:
                return value
    return None


def _model(content: RecordDict, key: str | None) -> tuple[str, ArrayRecord]:
    records = {n: r for n, r in content.items() if isinstance(r, ArrayRecord)}
    if key in records:
        return str(key), records[str(key)]
    if len(records) == 1:
        ((name, arrays),) = records.items()
        return name, arrays
    raise FedsimError(f"a message holds {len(records)} records of arrays, expected one")


# The arrays of a record as they were: the app may fill the record anew before they are written.
_Content = dict[str, Array]


def _content_of(arrays: ArrayRecord) -> _Content:
    return {
        name: Array(array.dtype, tuple(array.shape), array.stype, array.data)
        for name, array in arrays.items()
    }


def _same(first: _Content, second: _Content) -> bool:
    # Bytes cannot change: if they are one object they are equal, without a look at them.
    return list(first) == list(second) and all(
        (one.dtype, one.shape, one.stype) == (other.dtype, other.shape, other.stype)
        and one.data is other.data
        for one, other in zip(first.values(), second.values(), strict=True)
    )


def _read_told(content: RecordDict) -> ToldValues:
    return {
        name[:LONGEST]: {
            key[:LONGEST]: plain
            for key, value in list(record.items())[:MOST]
            if (plain := plain_value(value)) is not None
        }
        for name, record in list(content.items())[:MOST]
        if isinstance(record, MetricRecord | ConfigRecord)
    }


# What an app really runs is read off its live objects: Flower keeps no list that a mod or a grid
# could ask for. It makes one function of a ClientApp's mods, each of which holds the next in a
# closure, and a strategy's `start` is among the grid's callers.

_NEXT, _MOD = "_ffn", "_mod"
"""Variables of Flower's `make_ffn` that hold the next function, and the mod that is called."""


def _list_mods(call_next: Callable[..., Any]) -> list[DeployedPart]:
    """Returns the mods of the ClientApp, but fedsim's, whose mod calls this, outermost first."""
    # Mods further out have called on and wait: they are among the frames of this thread.
    outer = [f.f_locals[_MOD] for f in _frames() if {_NEXT, _MOD} <= f.f_locals.keys()]
    found = [*reversed(outer), *_list_inner(call_next)]
    described = [describe_part(mod) for mod in found]
    return [each for each in described if not each.name.startswith("fedsim.")]


def _list_inner(function: Callable[..., Any]) -> Iterator[Any]:
    while inspect.isfunction(function):
        held = inspect.getclosurevars(function).nonlocals
        # The innermost function is the app's own, which holds neither.
        if not {_NEXT, _MOD} <= held.keys():
            return
        yield held[_MOD]
        function = held[_NEXT]


def _find_strategy() -> Strategy | None:
    callers = (frame.f_locals.get("self") for frame in _frames())
    found = [each for each in callers if isinstance(each, Strategy)]
    # Frames come innermost first, so that the last is the outermost.
    return found[-1] if found else None


def _list_strategies(strategy: Strategy) -> list[DeployedPart]:
    found = []
    inner: Any = strategy
    while isinstance(inner, Strategy):
        found.append(describe_part(inner, _read_accountant(inner)))
        # A wrapper of Flower's keeps what it wraps under this name.
        inner = getattr(inner, "strategy", None)
    return found


def _read_accountant(strategy: Strategy) -> dict[str, Any]:
    accountant = getattr(strategy, "accountant", None)
    if accountant is None:
        return {}
    spent, config = accountant.get_privacy_spent(), accountant.config
    return {
        "accountant_epsilon": spent.epsilon,
        "accountant_releases": spent.num_releases,
        "accountant_delta": config.target_delta,
        "accountant_max_epsilon": config.max_epsilon,
    }


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
