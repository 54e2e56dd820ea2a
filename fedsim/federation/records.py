"""What the federation reports of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REASONS = ("client_error", "late", "malformed", "non_finite", "too_few")
"""Why an update is left out of a round, in this order: the client raised an error; the client did
not answer in time; the answer had wrong names, shapes, types or counts; the answer held NaN or
infinity; too few clients were left for their common noise or sum, so that nothing was combined."""
SILENT = ("client_error", "late")
"""Those of `REASONS` behind which no answer came."""


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round of one defense stack, as `rounds.jsonl` shows it."""

    round: int
    """Number of the round, from 1."""
    participants: tuple[int, ...]
    """Clients that were asked to train, ascending; empty once an accountant has stopped
    training."""
    aggregated: int
    """Number of updates in the new global model; with 0 it stayed as it was."""
    train_loss: float | None
    """Mean loss of the clients' first batches under the global model, weighted by examples. None
    if nobody reported one: under secure aggregation or differential privacy no client does, since
    the report would be a leak that the defense does not cover."""
    test_loss: float | None
    """Mean loss on the test data; None in rounds that are not evaluated, or if it is not finite."""
    test_accuracy: float | None
    """Accuracy on the test data, in [0, 1]; None in rounds that are not evaluated."""
    failures: Mapping[str, int]
    """Number of updates that were left out, for each of `REASONS`."""
    details: tuple[str, ...]
    """The first 20 lines on failures, of probes too, and other events of the round."""
    zero_updates: int
    """Number of accepted updates that were zero everywhere; 0 under secure sums."""
    probe_failures: int
    """Number of failed answers to probes, or of combinations of them; they are no `failures`."""
    bytes_up: int
    """Serialized size of the answers to the training messages, in bytes, without probes."""
    bytes_down: int
    """Serialized size of the training messages, in bytes."""
    seconds: float
    """Wall time of the round in seconds, with probes, recording and evaluation."""
