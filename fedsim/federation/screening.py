"""What becomes of an answer: accepted, or left out for a stated reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from flwr.app import Message

from fedsim.federation import wire
from fedsim.federation.records import REASONS
from fedsim.training.schedule import Probe
from fedsim.types import Tensors
from fedsim.words import printable

_DETAILS = 20
_DETAIL_LENGTH = 300
_GLANCE = 64


@dataclass(frozen=True)
class Screening:
    """Verdict on one answer: what could be read of it, and why the round leaves it out, if so."""

    answer: wire.WireAnswer | None = None
    """The answer, also if it holds NaN or infinity; None if it could not be read."""
    reason: str | None = None
    """One of `records.REASONS`, such as `late`; None if the answer is accepted."""
    text: str = ""
    """Explanation of the reason, for the record; empty if the answer is accepted."""


def judge(reply: Message | None, expected: wire.Shape) -> Screening:
    """Decodes one reply and decides whether its update counts; None is a reply that did not come.

    An update of zeros is accepted. One with NaN or infinity, in its loss too, is left out, but
    still returned.
    """
    if reply is None or reply.has_error():
        return explain_missing(reply)
    try:
        answer = wire.read_answer(reply.content, expected)
    except wire.MalformedError as error:
        return Screening(reason="malformed", text=str(error))
    for name, tensor in {**answer.update.tensors, **answer.update.buffers}.items():
        # A finite sum has finite terms, and costs a fraction; one that is not may have overflown.
        if not (torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all()):
            return Screening(answer, "non_finite", f"{name} holds NaN or infinity")
    if answer.loss is not None and not math.isfinite(answer.loss):
        return Screening(answer, "non_finite", f"the loss is {answer.loss}")
    return Screening(answer)


def explain_missing(reply: Message | None) -> Screening:
    """Returns the verdict on a reply without content, or on a missing reply (None)."""
    if reply is None:
        return Screening(reason="late", text="no answer in time")
    if reply.has_error():
        lines = [line.strip() for line in (reply.error.reason or "").splitlines() if line.strip()]
        return Screening(reason="client_error", text=lines[-1] if lines else "no reason given")
    return Screening(reason="malformed", text="the answer is empty")


def is_zero(update: Tensors) -> bool:
    """Returns whether every entry of an update is zero; NaN is not. True without entries."""
    flat = [tensor.flatten() for tensor in update.values()]
    # Nearly every update differs from 0 in its first entries, which spares reading the rest.
    if any(bool(tensor[:_GLANCE].any()) for tensor in flat):
        return False
    return not any(bool(tensor.any()) for tensor in flat)


@dataclass
class Tally:
    """Counts what happened to the messages of one round; fields are as in `records.RoundRecord`."""

    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    """Number of training answers that are left out, for each of `records.REASONS`."""
    details: list[str] = field(default_factory=list)
    """The first 20 lines on failures and other events of the round."""
    zero_updates: int = 0
    probe_failures: int = 0
    accepted: tuple[int, ...] = ()
    """Clients whose updates are aggregated, ascending."""
    train_loss: float | None = None
    """Mean loss over accepted answers, weighted by examples; None if nobody reports one."""
    bytes_up: int = 0
    """Serialized size in bytes of training answers; `bytes_down` is that of the orders."""
    bytes_down: int = 0

    @property
    def failed(self) -> int:
        """Number of training answers that are left out."""
        return sum(self.failures.values())

    def fail(self, verdict: Screening, client: int, probe: Probe | None) -> None:
        """Counts an answer of `client` that `verdict` leaves out, and adds a line on it (`say`).

        It was the answer to `probe`, or to an order to train if that is None.
        """
        if probe:
            self.probe_failures += 1
        elif verdict.reason:
            self.failures[verdict.reason] += 1
        asked = f" (probe of {probe.batch_size}, trial {probe.trial})" if probe else ""
        self.say(f"client {client}{asked}: {verdict.reason}: {verdict.text}")

    def say(self, line: str) -> None:
        """Keeps the first 300 characters of `line`, made printable; drops lines after the 20th."""
        if len(self.details) < _DETAILS:
            self.details.append(printable(line[:_DETAIL_LENGTH]))
