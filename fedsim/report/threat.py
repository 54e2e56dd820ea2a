"""Words the threat model as the rows themselves state it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from fedsim.contracts.grant import Grant
from fedsim.results.lines import ResultRow
from fedsim.results.threat_model import ThreatModel, threat_model_of
from fedsim.words import number_of

VANTAGES = {
    "server": "each client’s update on its own, after that client’s defenses: the attacker is the "
    "server, or whoever reads its traffic",
    "masked": "each client’s masked part of a secure sum: the attacker is the server, or whoever "
    "reads its traffic",
    "aggregate": "only the combined update of a round, never one client’s: the attacker is the "
    "server behind secure aggregation",
    "client": "two consecutive global models, from whose difference it takes its own update off: "
    "what is left is the mean update of the others; the attacker is a participant",
    "eavesdropper": "each client’s update on its own, as it crosses the wire in plaintext, after "
    "that client’s defenses: the attacker is on the wire",
}
_TRAINING = {
    "fedsgd": "an update is the gradient of one batch (FedSGD)",
    "fedavg": "an update is the change of the weights over local training (FedAvg)",
}
_MODE = {
    "train": "clients compute it in training mode",
    "eval": "clients compute it in evaluation mode, which real clients seldom do and which makes "
    "attacks easier",
}
_RELEASES = {
    "sketch": "a release is the product of the client’s rows with a random matrix that nobody else "
    "knows",
    "coefficients": "a release is the coefficients of a regression on the client’s rows",
    "sketched_coefficients": "a release is the coefficients of a regression on a random sketch of "
    "the client’s rows",
    "normal_coefficients": "a release is the coefficients of a regression on the client’s rows, "
    "with the normal randomness of a sketch",
    "kernel_regression": "a release is the predictor of a kernel regression of the client’s "
    "images; of who took part it is asked if this row did, or another in its place",
    "kernel_model": "a release is the features and coefficients of a kernel regression of the "
    "client’s images; of who took part it is asked if this row did, or another in its place",
}


def threat_model(rows: Sequence[ResultRow]) -> list[tuple[str, str]]:
    """Returns what the attacker sees, knows, is granted and is refused: (verb, plain words)."""
    if not rows:
        return []
    if rows[0].subject == "rows":
        return _row_threat_model(rows)
    views = [
        _phrase(rows, VANTAGES, _view(rows)),
        _phrase(rows, _TRAINING, lambda row: row.training.get("algorithm")),
        _phrase(rows, _MODE, lambda row: row.training.get("mode")),
    ]
    return [
        ("Sees", _sentence(views)),
        (
            "Knows",
            "The model’s code, the global weights that the client started from, the declared "
            f"training settings, the batch size, and the declared defenses. {_conduct(rows)}",
        ),
        ("Is granted", _granted(rows)),
        (
            "Never sees",
            "An image of a client. Restarts and reconstructions are chosen by the attack’s own "
            "loss, not by their likeness to the truth.",
        ),
    ]


def _view(rows: Sequence[ResultRow]) -> Callable[[ResultRow], str]:
    """What the attacker of a row sees: single updates of a stack that shows sums are masked."""
    summed = {row.defense.name for row in rows if row.vantage == "aggregate"}

    def view(row: ResultRow) -> str:
        alone = row.vantage in ("server", "eavesdropper")
        return "masked" if alone and row.defense.name in summed else row.vantage

    return view


def _row_threat_model(rows: Sequence[ResultRow]) -> list[tuple[str, str]]:
    views = [
        _phrase(rows, VANTAGES, _view(rows)),
        _phrase(rows, _RELEASES, lambda row: (row.release or {}).get("kind")),
    ]
    ranges = "the columns with their declared ranges, the bound on the norm of a row"
    hidden = "how many rows took part; the clients’ random matrices"
    if all(str((row.release or {}).get("kind")).startswith("kernel_") for row in rows):
        ranges = "the kernel, that features are of unit length, how many rows took part"
        hidden = "the clients’ noise"
    return [
        ("Sees", _sentence(views)),
        (
            "Knows",
            f"The learner and its parameters, {ranges}, and the declared defenses with their "
            "noise. It follows the protocol.",
        ),
        ("Is granted", _granted(rows)),
        (
            "Never sees",
            f"The row that it is after, unless it is asked whether that row took part; {hidden}.",
        ),
    ]


def _granted(rows: Sequence[ResultRow]) -> str:
    parts = []
    for name, meaning in Grant.meanings(rows[0].subject).items():
        phrases = dict(zip(Grant.values()[name], meaning.words, strict=True))
        parts.append(_phrase(rows, phrases, attrgetter(f"knowledge.{name}")))
    for entry in sorted({entry for row in rows for entry in unworded(threat_model_of(row))}):
        having = sum(entry in threat_model_of(row).beyond for row in rows)
        among = "" if having == len(rows) else f"in {having} of {number_of(len(rows), 'run')} "
        parts.append(f"{among}what no honest server has by itself: {entry}")
    return _sentence(parts)


def unworded(threat: ThreatModel) -> list[str]:
    """Returns what a threat model has that the meanings of grants do not word.

    That is what an attack brought along, and grants that this version does not know.
    """
    known = Grant.model_fields
    return [entry for entry in threat.beyond if entry.partition("=")[0] not in known]


def _conduct(rows: Sequence[ResultRow]) -> str:
    altered = sum(row.server != "honest" for row in rows)
    if not altered:
        return "It follows the protocol."
    heads, imprints = (
        [row.model.parameters.get(part) or {} for row in rows if row.model]
        for part in ("head", "imprint")
    )
    planted = max((int(head.get("planted") or 0) for head in heads), default=0)
    bins = max((int(imprint.get("bins") or 0) for imprint in imprints), default=0)
    servers = {row.server for row in rows}
    changes = []
    if "planted" in servers and not planted:
        changes.append("it has chosen weights of the head (planted)")
    elif planted:
        changes.append(
            f"the weights of {number_of(planted, 'hidden neuron')} of the head are of its own "
            "choice (planted)"
        )
    if "modified" in servers and not bins:
        changes.append("it has put a module into the model (imprint)")
    elif bins:
        changes.append(
            f"it has put a module of {number_of(bins, 'neuron')} in front of the model, whose "
            "gradient shows "
            "images (imprint)"
        )
    honest = len(rows) - altered
    if honest:
        counted = f"In {honest} of {number_of(len(rows), 'run')} it follows the protocol"
        return f"{counted}; in the others it is malicious: {', or '.join(changes)}."
    return f"It follows the protocol, but {', and '.join(changes)}: a malicious server."


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(part for part in parts if part)
    return f"{text[:1].upper()}{text[1:]}."


def _phrase(
    rows: Sequence[ResultRow], phrases: dict[str, str], get: Callable[[ResultRow], Any]
) -> str:
    """Returns the phrase of each value that occurs, and in how many rows if there are several."""
    values = [get(row) for row in rows]
    kinds = [value for value in dict.fromkeys(values) if value in phrases]
    if len(kinds) == 1:
        return phrases[kinds[0]]
    return "; ".join(
        f"in {values.count(v)} of {number_of(len(rows), 'run')} {phrases[v]}" for v in kinds
    )
