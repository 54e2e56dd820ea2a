"""Summarizes what each defense left of the model and what it claims, for runs without attacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.report.figures import format_number, format_summary
from fedsim.report.leaderboard import accuracy_of
from fedsim.results.lines import PrivacyOf, RoundRow
from fedsim.results.reading import StoredRun
from fedsim.scoring import Accuracy, Summary, learning_problem, summarize
from fedsim.words import describe_variant, format_bound, format_claim

_SEED = "seed"


@dataclass(frozen=True, kw_only=True)
class UtilityRow:
    """Describes one defense after its last round, over runs that differ in their seed alone.

    `delta`, `unit`, `relation`, `reason` and `covers` are those of the claim with the largest ε.
    Summaries are over the runs, and None where no run measured the value.
    """

    variant: str
    """The sweep's assignment without the seed, in words; empty for a run that is no part of a
    sweep."""
    defense: str
    runs: int
    """Number of runs."""
    epsilon: float | None
    """The largest ε of the runs; inf if nothing is proven, None if it was not accounted."""
    delta: float | None
    unit: str | None
    relation: str | None
    reason: str | None
    """Why ε is inf; None if it is not."""
    covers: str | None
    """The releases that ε covers, in words."""
    audited_epsilon: float | None
    """The largest lower bound of ε that an audit found; None without an audit."""
    sigma: float | None
    """The largest σ of the rows σ I that a client appended to its data; None without such noise."""
    test_loss: Summary | None
    test_accuracy: Summary | None
    """Percentage of the test data that the model classifies correctly, in [0, 100]."""
    accuracy: Accuracy | None
    """Mean test accuracy of the runs, with chance, the test set's size and an interval. None if
    nothing was tested, or a run does not say what it was tested on."""
    problem: str | None
    """Why the model cannot show what the defense costs; None if it can, and where no accuracy is
    known."""


def attacks_nothing(runs: Sequence[StoredRun]) -> bool:
    """Whether the scenario of every run declares no attack."""
    return all(run.setting("attacks") == [] for run in runs)


def utility(runs: Sequence[StoredRun]) -> list[UtilityRow]:
    """Returns a row for each variant and defense, in the order of the runs and their rounds.

    Runs that differ in their seed alone share a row.
    """
    cells: dict[tuple[str, str], list[RoundRow]] = {}
    audited: dict[tuple[str, str], list[float]] = {}
    closed: set[tuple[str, str]] = set()  # of learners that release in closed form
    for run in runs:
        variant = describe_variant({k: v for k, v in run.variant.items() if k != _SEED})
        last = {row.defense: row for row in sorted(run.rounds, key=lambda row: row.round)}
        for defense in dict.fromkeys(row.defense for row in run.rounds):
            cells.setdefault((variant, defense), []).append(last[defense])
            if run.scenario and run.setting("model") is None:
                closed.add((variant, defense))
        for audit in run.audits:
            audited.setdefault((variant, audit.defense), []).append(audit.audited_epsilon)
    return [
        UtilityRow(
            variant=variant,
            defense=defense,
            runs=len(rows),
            **_weakest_claim(rows),
            audited_epsilon=max(audited.get((variant, defense), []), default=None),
            sigma=max((r.sigma for r in rows if r.sigma is not None), default=None),
            test_loss=summarize([r.test_loss for r in rows if r.test_loss is not None]),
            accuracy=accuracy_of(rows),
            problem=_problem(rows, trains=(variant, defense) not in closed),
            test_accuracy=summarize(
                [100 * r.test_accuracy for r in rows if r.test_accuracy is not None]
            ),
        )
        for (variant, defense), rows in cells.items()
    ]


def describe(rows: Sequence[UtilityRow]) -> str:
    """Returns a text with a line for each row, followed by a line for its warning if any."""
    lines = []
    for row in rows:
        parts = [f"ε {format_claim(row.epsilon, row.delta, row.unit, row.relation)}"]
        parts += [row.covers] if row.covers else []
        parts += [row.reason] if row.reason else []
        if row.audited_epsilon is not None:
            parts.append(f"audit: at least {format_bound(row.audited_epsilon)}")
        if row.sigma is not None:
            parts.append(f"σ {format_number(row.sigma, 3)}")
        if row.test_loss:
            parts.append(f"test loss {format_summary(row.test_loss, 3)}")
        if row.test_accuracy:
            parts.append(f"accuracy {row.accuracy or format_summary(row.test_accuracy) + '%'}")
        name = ", ".join(filter(None, (row.variant, row.defense)))
        lines.append(f"{name}: {', '.join(parts)}")
        lines += [f"WARNING: {name}: {row.problem}"] if row.problem else []
    return "\n".join(lines)


def _problem(rows: Sequence[RoundRow], *, trains: bool) -> str | None:
    """Returns why the model cannot show what the defense costs; None if it can."""
    accuracy = accuracy_of(rows)
    losses = [row.test_loss for row in rows if row.test_loss is not None]
    mean = sum(losses) / len(losses) if len(losses) == len(rows) else None
    return learning_problem(accuracy, mean, trains=trains) if accuracy else None


def _weakest_claim(rows: Sequence[RoundRow]) -> dict[str, Any]:
    """Returns the largest ε of the rows, and the terms of the claim with it; None without any."""
    claimed = [math.inf if r.epsilon == "inf" else r.epsilon for r in rows if r.epsilon is not None]
    stated = [row.privacy for row in rows if row.privacy] or [PrivacyOf()]
    weakest = max(stated, key=lambda p: math.inf if p.epsilon is None else float(p.epsilon))
    terms = weakest.model_dump(include={"delta", "unit", "relation", "reason", "covers"})
    return {"epsilon": max(claimed, default=None), **terms}
