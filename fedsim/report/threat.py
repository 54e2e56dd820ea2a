"""The threat model in plain words, read off the rows themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedsim.report.runs import ResultRow

_VANTAGE = {
    "server": "The attacker is the server, or whoever reads its traffic: it sees each client's "
    "update on its own, after that client's defenses were applied.",
    "aggregate": "The attacker is the server, but sees only the combined update of a round, never "
    "one client's.",
}
_LABELS = {
    "none": "It is told nothing of the labels.",
    "inferred": "It is told no labels: it may infer them from the update.",
    "known": "It is given the true labels of the attacked batch. Few real attackers are.",
}
_BATCH_NORM = {
    "none": "It uses no batch-norm statistics.",
    "running": "It uses the global model's running batch-norm statistics, which are public.",
    "inferred": "It sees the client's new batch-norm statistics, which travel with the update.",
    "exact": "It is given the exact batch-norm statistics of the victim's batch. No real attacker "
    "is; read these rows as an upper bound.",
}
_TRAINING = {
    "fedsgd": "An update is the gradient of one batch (FedSGD).",
    "fedavg": "An update is the change of the weights over the local steps of training (FedAvg).",
}
_MODE = {
    "train": "Clients compute it in training mode.",
    "eval": "Clients compute it in evaluation mode, which real clients seldom do and which makes "
    "attacks easier.",
}


def threat_model(rows: Sequence[ResultRow]) -> list[str]:
    """What the attacker sees, knows and is refused, one sentence each."""
    if not rows:
        return []
    lines = _each(rows, _VANTAGE, lambda row: row.vantage)
    lines.append(
        "It follows the protocol, and knows the model's code, the global weights that the client "
        "started from, the declared training settings, the batch size and the declared defenses."
    )
    lines += _each(rows, _TRAINING, lambda row: row.training.get("algorithm"))
    lines += _each(rows, _MODE, lambda row: row.training.get("mode"))
    lines += _each(rows, _LABELS, lambda row: row.knowledge.labels)
    lines += _each(rows, _BATCH_NORM, lambda row: row.knowledge.bn)
    lines.append(
        "It never sees an image. Reconstructions and restarts are chosen by the attack's own loss, "
        "not by their likeness to the truth."
    )
    return lines


def _each(
    rows: Sequence[ResultRow], sentences: dict[str, str], get: Callable[[ResultRow], Any]
) -> list[str]:
    """The sentence of each value that occurs; where there are several, it says in how many rows."""
    values = [get(row) for row in rows]
    kinds = [value for value in dict.fromkeys(values) if value in sentences]
    if len(kinds) == 1:
        return [sentences[kinds[0]]]
    return [f"In {values.count(v)} of {len(rows)} attack runs: {sentences[v]}" for v in kinds]
