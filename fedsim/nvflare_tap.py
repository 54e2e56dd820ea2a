"""Taps an NVFlare job: records models and answers as `fedsim.tap` does of a Flower app.

    job.to(ServerTap(out="tapped"), "server")
    job.to(ClientTap(witnessed="witnessed"), "site-1", filter_type=FilterType.TASK_RESULT)

Clients have names, of which node numbers are digests. A job's id becomes the number of its run: the
simulator calls every job the same, so that each simulation needs a folder of its own.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.task_utils import get_filters
from nvflare.app_common.app_constant import AppConstants
from nvflare.private.privacy_manager import Scope

from fedsim.recording.exchanges import (
    MOST_ROUNDS,
    DeployedPart,
    Recorder,
    TapSide,
    describe_part,
    plain_value,
)
from fedsim.system import paths
from fedsim.training.watching import Steps, TrainingOrder, keep_testimony, watch_training
from fedsim.types import FedsimError

_KINDS = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
_log = logging.getLogger("fedsim.nvflare_tap")


class _JobTape:
    """Writes the exchanges of one job, of which orders and answers come one by one."""

    def __init__(self, out: str, side: TapSide, max_gib: float) -> None:
        self._out, self._side, self._max_gib = out, side, max_gib
        # Clients' events may come in threads of their own, and share the recorder and the orders.
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        self._orders: dict[str, tuple[int, str]] = {}
        """Task id -> round and digest of the model that was sent."""

    def note_order(self, task: Shareable, context: FLContext, client: str) -> None:
        found = _read(task)
        task_id = context.get_prop(FLContextKey.TASK_ID)
        if found is None or not isinstance(task_id, str):
            return
        round = _round_of(task)
        with self._lock:
            recorder = self._recorder_of(context)
            if recorder.wants(round, node_id(client)):
                digest = recorder.save_broadcast(round, _arrays(found))
                if digest is not None:
                    self._orders[task_id] = round, digest

    def record(self, answer: DXO, context: FLContext, client: str) -> None:
        with self._lock:
            task_id = str(context.get_prop(FLContextKey.TASK_ID))
            order = self._orders.pop(task_id, None)
            # Without the recorded model that it answers, an answer cannot be attacked.
            if order is None:
                return
            said = {key: plain_value(value) for key, value in dict(answer.meta or {}).items()}
            told = {key: value for key, value in said.items() if value is not None}
            self._recorder_of(context).save_reply(
                _arrays(answer),
                round=order[0],
                node_id=node_id(client),
                message_id=task_id,
                broadcast=order[1],
                config={},
                metrics={
                    "meta": told,
                    "client": {"name": client, "data_kind": str(answer.data_kind)},
                },
            )

    def note_filters(self, filters: list[DeployedPart], context: FLContext) -> None:
        with self._lock:
            self._recorder_of(context).note_parts("mods", filters)

    def _recorder_of(self, context: FLContext) -> Recorder:
        if self._recorder is None:
            folder = Path(self._out).absolute()
            paths.writable_folder(folder, "out")
            self._recorder = Recorder(
                folder,
                run_id(context),
                self._side,
                rounds=None,
                clients=None,
                max_bytes=int(self._max_gib * paths.GIB),
            )
        return self._recorder


class ServerTap(FLComponent):  # type: ignore[misc]
    """Records on the server each model sent, after its filters, and each answer, before them."""

    def __init__(self, out: str, max_gib: float = 8.0) -> None:
        """Makes a component for the server of a job, which records in `out/run-<run_id>`.

        A message that would make its files exceed `max_gib` GiB is only counted, in `tap.json`.
        """
        super().__init__()
        # NVFlare writes a component's arguments to the job, from attributes of the same names.
        self.out, self.max_gib = str(out), max_gib
        self._tape = _JobTape(self.out, "server", max_gib)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Records models after, answers before the server's filters; failures are only logged."""
        if event_type == EventType.AFTER_TASK_DATA_FILTER:
            task = fl_ctx.get_prop(FLContextKey.TASK_DATA)
            _guard(lambda: self._tape.note_order(task, fl_ctx, _peer(fl_ctx)))
        if event_type == EventType.BEFORE_TASK_RESULT_FILTER:
            answer = _read(fl_ctx.get_prop(FLContextKey.TASK_RESULT))
            if answer is not None:
                _guard(lambda: self._tape.record(answer, fl_ctx, _peer(fl_ctx)))


class ClientTap(DXOFilter):  # type: ignore[misc]
    """Records on a client the models that it is sent and its answers, and keeps what it trained on.

    It sees what leaves the machine if it is the last of the client's filters of results. It changes
    nothing. Training is seen if the executor trains in the thread that calls it.
    """

    def __init__(
        self,
        out: str | None = None,
        witnessed: str | None = None,
        max_images: int = 4096,
        max_gib: float = 8.0,
    ) -> None:
        """Makes a filter of a client's results.

        Args:
            out: Folder in which `run-<run_id>` gets what is received and answered; None: neither.
            witnessed: Folder in which `run-<run_id>` gets the images and labels that the client
                trains on, for an auditor; None to keep nothing.
            max_images: Maximum number of distinct images kept of one task; others are counted.
            max_gib: Maximum size of a job in each folder, in GiB.
        """
        super().__init__(supported_data_kinds=_KINDS, data_kinds_to_filter=None)
        self.out, self.witnessed = out, witnessed
        self.max_images, self.max_gib = max_images, max_gib
        self._tape = _JobTape(out, "client", max_gib) if out else None
        self._watch = ExitStack()
        self._steps: Steps | None = None
        self._round = 0

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Records the model of a task before its execution, and watches its training until after.

        All other events are ignored; a failure to record is only logged.
        """
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            task = fl_ctx.get_prop(FLContextKey.TASK_DATA)
            self._watch.close()  # an executor that failed leaves its watch open
            if tape := self._tape:
                _guard(lambda: tape.note_order(task, fl_ctx, fl_ctx.get_identity_name()))
            if self.witnessed and _read(task) is not None:
                self._round = _round_of(task)
                self._steps = self._watch.enter_context(watch_training(self.max_images))
        if event_type == EventType.AFTER_TASK_EXECUTION:
            self._watch.close()

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Records the answer `dxo`, which is sent as it is (None). Failures to write are logged."""
        filters = _list_filters(fl_ctx, dxo.data_kind)
        client = fl_ctx.get_identity_name()
        # Taken once: an answer without training must not get the steps of an earlier task.
        steps, self._steps = self._steps, None
        if tape := self._tape:
            # Each is guarded alone, so that a failure of one does not lose the others.
            _guard(lambda: tape.note_filters(filters, fl_ctx))
            _guard(lambda: tape.record(dxo, fl_ctx, client))
        if steps is not None and self.witnessed:
            order = TrainingOrder(
                run_id=run_id(fl_ctx),
                round=self._round,
                node_id=node_id(client),
                message_id=str(fl_ctx.get_prop(FLContextKey.TASK_ID)),
            )
            folder, bound = Path(self.witnessed).absolute(), int(self.max_gib * paths.GIB)
            _guard(lambda: keep_testimony(folder, steps, order, filters, bound))


def _list_filters(context: FLContext, data_kind: str) -> list[DeployedPart]:
    """Returns the client's filters that act on answers of `data_kind`, outermost first."""
    runner: Any = context.get_prop(FLContextKey.RUNNER)
    named = context.get_prop(FLContextKey.TASK_NAME)
    live = get_filters(
        Scope.TASK_RESULT_FILTERS_NAME, context, runner.task_result_filters, named, FilterKey.OUT
    )
    # A filter of differences acts on something else than an update if it gets weights.
    marks = {"acts_on_weights": 1} if data_kind == DataKind.WEIGHTS else {}
    return [
        describe_part(each, marks)
        # NVFlare applies them in order, so that the last is the outermost.
        for each in reversed(live)
        if not isinstance(each, ClientTap)
        # A filter that names no kinds acts on all.
        and data_kind in (getattr(each, "data_kinds", None) or [data_kind])
    ]


def node_id(client: str) -> int:
    """Returns a client's number in recordings: the first 56 bits of the SHA-256 of its name."""
    # Seven bytes stay below 2⁶³, and so fit signed integers of 64 bits.
    return int.from_bytes(hashlib.sha256(client.encode()).digest()[:7])


def run_id(context: FLContext) -> int:
    """Returns the run's number in recordings: that of `node_id` for the id of the job."""
    return node_id(str(context.get_job_id()))


def _peer(context: FLContext) -> str:
    peer = context.get_peer_context()
    if peer is None:
        raise FedsimError("the message does not say which client it is of")
    return str(peer.get_identity_name())


def _read(message: object) -> DXO | None:
    if not isinstance(message, Shareable):
        return None
    try:
        found = from_shareable(message)
    except ValueError:
        return None
    return found if found.data_kind in _KINDS and found.data else None


def _round_of(task: Shareable) -> int:
    round = task.get_header(AppConstants.CURRENT_ROUND)
    if round is None:
        round = from_shareable(task).get_meta_prop(MetaKey.CURRENT_ROUND)
    # NVFlare counts from 0. What is no number of a round is taken for the first.
    known = isinstance(round, int) and 0 <= round < MOST_ROUNDS
    return int(round) + 1 if known else 1


def _arrays(model: DXO) -> Mapping[str, np.ndarray[Any, Any]]:
    return {
        # A copy, since the app goes on with the same arrays.
        str(name): np.array(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        for name, value in model.data.items()
    }


def _guard(job: Callable[[], None]) -> None:
    """Runs `job`; a failure is logged and never reaches the app."""
    try:
        job()
    except Exception as error:  # an app goes on, whatever it sends
        _log.warning("fedsim.nvflare_tap: an exchange is not recorded: %s", error)
