"""What is proven of each defense and under which assumptions, beside what audits found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.report.figures import (
    NO_DIFFERENTIAL_PRIVACY,
    format_bound,
    format_delta,
    format_epsilon,
)
from fedsim.report.judge import WEAK_EPSILON
from fedsim.report.utility import UtilityRow, utility
from fedsim.results.lines import AuditRow, nested
from fedsim.results.reading import Run

_LARGEST = 700.0
"""exp of more is beyond the largest double."""

_RELATIONS = {
    "zero_out": "what one {unit} contributes is there, or is exchanged for nothing",
    "replace_one": "what one {unit} contributes is exchanged for anything else",
    "add_or_remove": "one {unit} is added or removed",
    "close": "one {unit} is exchanged for another that lies close by, so that it does not hide "
    "whether a {unit} took part",
    "relative": "one of several declared data sets was used, so that it does not hide whether a "
    "{unit} took part",
}


@dataclass(frozen=True, kw_only=True)
class Guarantees:
    """What is proven of the defenses, and what that rests on."""

    table: list[tuple[str, ...]]
    """Defense, ε, δ, unit, neighbours, how it was found, and what audits say."""
    sentences: list[str]
    """One for each defense, and one on audits."""
    assumptions: list[str]


def guarantees(runs: Sequence[Run]) -> Guarantees | None:
    """Returns what is proven of each defense; None where no round of training is recorded."""
    rows = utility(runs)
    if not rows:
        return None
    return Guarantees(
        table=[
            (
                f"{row.defense} ({row.variant})" if row.variant else row.defense,
                format_epsilon(row.epsilon) if row.epsilon is not None else "not accounted",
                "–" if row.delta is None else format_delta(row.delta),
                row.unit or "–",
                (row.relation or "–").replace("_", " "),
                _found(runs, row),
                _audited(row),
            )
            for row in rows
        ],
        sentences=_sentences(rows, [audit for run in runs for audit in run.audits]),
        assumptions=_assumptions(runs, rows),
    )


def _found(runs: Sequence[Run], row: UtilityRow) -> str:
    accountants = {
        line.privacy.accountant
        for run in runs
        for line in run.rounds
        if line.defense == row.defense and line.privacy and line.privacy.accountant
    }
    covers = f"of {row.covers}" if row.covers else ""
    found = ", ".join([*sorted(accountants), covers] if covers else sorted(accountants))
    return f"no guarantee: {row.reason}" if row.reason else found or "–"


def _audited(row: UtilityRow) -> str:
    audited = row.audited_epsilon
    if audited is None:
        return "not audited"
    found = f"at least ε = {format_bound(audited)} is spent"
    if row.epsilon is None or math.isinf(row.epsilon):
        return found
    if audited > row.epsilon:
        return f"{found}: it REFUTES the claim"
    return f"{found}: it does not refute the claim"


def _sentences(rows: Sequence[UtilityRow], audits: Sequence[AuditRow]) -> list[str]:
    """Words each guarantee, and what its absence means."""
    lines = []
    for row in rows:
        name = f"{row.defense} ({row.variant})" if row.variant else row.defense
        if row.epsilon is None:
            lines.append(f"{name}: no guarantee was accounted.")
        elif math.isinf(row.epsilon):
            why = f" ({row.reason})" if row.reason else ""
            lines.append(
                f"{name}: nothing is proven{why}. What attacks failed to find here, another "
                "attack may find."
            )
        else:
            lines.append(_promise(name, row))
    if audits:
        methods = ", ".join(sorted({audit.method.replace("_", " ") for audit in audits}))
        lines.append(
            f"Audits ({methods}) give a lower bound of ε from canaries. One that stays below the "
            "claim does not prove the claim."
        )
    else:
        lines.append("No claim was audited in this run.")
    return lines


def _promise(name: str, row: UtilityRow) -> str:
    unit = row.unit or "unit that is not stated"
    relation = _RELATIONS.get(row.relation or "", "a relation that is not stated")
    assert row.epsilon is not None
    factor = format_epsilon(math.exp(min(row.epsilon, _LARGEST)))
    delta = f"but for a chance of {format_delta(row.delta)}" if row.delta else "and δ is not stated"
    text = (
        f"{name}: the odds of any conclusion about one {unit} change by a factor of at most "
        f"{factor} (exp ε), {delta}. Neighbouring data: {relation.format(unit=unit)}."
    )
    if row.epsilon >= WEAK_EPSILON:
        text += " That is next to no promise."
    if row.relation in NO_DIFFERENTIAL_PRIVACY:
        text += " This is no differential privacy in the usual sense."
    return text


def _assumptions(runs: Sequence[Run], rows: Sequence[UtilityRow]) -> list[str]:
    lines = [
        "Every client runs the declared defense as it is written, and the server does not receive "
        "anything else from it.",
        "The number of examples of each client is public.",
        "What a client computes with (classes, image size, normalization) is declared, and was not "
        "computed from clients’ data.",
        "The split into training and test data precedes the deployment.",
    ]
    if any(run.setting("privacy", "probes") == "outside" for run in runs):
        lines.append(
            "The probes of this measurement are declared no part of the deployment, and are not "
            "counted in ε."
        )
    if any(run.setting("privacy", "weights") == "public" for run in runs):
        lines.append("The weights that training starts from are declared to be public.")
    noise = dict.fromkeys(
        str(text) for run in runs if (text := nested(run.record, "notes", "noise"))
    )
    if noise and any(row.epsilon is not None and math.isfinite(row.epsilon) for row in rows):
        lines += [f"{text[:1].upper()}{text[1:]}." for text in noise]
    return lines
