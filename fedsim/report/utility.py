"""What each defense left of the model, and what it claims: a table for runs that attack nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.report.figures import (
    describe_variant,
    format_bound,
    format_claim,
    format_number,
    format_summary,
)
from fedsim.report.leaderboard import accuracy_of
from fedsim.results.reading import PrivacyOf, RoundRow, Run
from fedsim.scoring import Accuracy, Summary, learning_problem, summarize

_SEED = "seed"


@dataclass(frozen=True, kw_only=True)
class UtilityRow:
    """One defense after its last round, over runs that differ in their seed alone."""

    variant: str
    """The sweep's assignment but for the seed, in words; empty without."""
    defense: str
    runs: int
    epsilon: float | None
    """The largest of the runs; inf if nothing is proven, None if it was not accounted."""
    delta: float | None
    unit: str | None
    relation: str | None
    reason: str | None
    """Why ε is inf."""
    covers: str | None
    """Which releases ε is of, in words."""
    audited_epsilon: float | None
    """The largest ε that an audit found, at least; None without an audit."""
    sigma: float | None
    """The largest σ of the rows σ I that a client appended to its own; None without such noise."""
    test_loss: Summary | None
    test_accuracy: Summary | None
    """In percent."""
    accuracy: Accuracy | None
    """Of the runs' mean, with chance, the test set's size and an interval."""
    problem: str | None
    """Why the model says nothing of what the defense costs; None if it does."""


def attacks_nothing(runs: Sequence[Run]) -> bool:
    """Whether every run says by its scenario that nothing is attacked."""
    return all(run.setting("attacks") == [] for run in runs)


def utility(runs: Sequence[Run]) -> list[UtilityRow]:
    """A row for each variant and defense, in the order of the runs and their rounds."""
    cells: dict[tuple[str, str], list[RoundRow]] = {}
    audited: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        assignment = run.record.get("variant") or {}
        variant = describe_variant({k: v for k, v in assignment.items() if k != _SEED})
        last = {row.defense: row for row in sorted(run.rounds, key=lambda row: row.round)}
        for defense in dict.fromkeys(row.defense for row in run.rounds):
            cells.setdefault((variant, defense), []).append(last[defense])
        for found in run.audits:
            audited.setdefault((variant, found.defense), []).append(found.audited_epsilon)
    return [
        UtilityRow(
            variant=variant,
            defense=defense,
            runs=len(rows),
            epsilon=_largest(rows),
            delta=_of_weakest(rows).delta,
            unit=_of_weakest(rows).unit,
            relation=_of_weakest(rows).relation,
            reason=_of_weakest(rows).reason,
            covers=_of_weakest(rows).covers,
            audited_epsilon=max(audited.get((variant, defense), []), default=None),
            sigma=max((r.sigma for r in rows if r.sigma is not None), default=None),
            test_loss=summarize([r.test_loss for r in rows if r.test_loss is not None]),
            accuracy=accuracy_of(rows),
            problem=_problem(rows),
            test_accuracy=summarize(
                [100 * r.test_accuracy for r in rows if r.test_accuracy is not None]
            ),
        )
        for (variant, defense), rows in cells.items()
    ]


def describe(rows: Sequence[UtilityRow]) -> str:
    """A line for each row."""
    lines = []
    for row in rows:
        told = [f"ε {format_claim(row.epsilon, row.delta, row.unit, row.relation)}"]
        told += [row.covers] if row.covers else []
        told += [row.reason] if row.reason else []
        if row.audited_epsilon is not None:
            told.append(f"audit: at least {format_bound(row.audited_epsilon)}")
        if row.sigma is not None:
            told.append(f"σ {format_number(row.sigma, 3)}")
        if row.test_loss:
            told.append(f"test loss {format_summary(row.test_loss, 3)}")
        if row.test_accuracy:
            told.append(f"accuracy {row.accuracy or format_summary(row.test_accuracy) + '%'}")
        name = ", ".join(filter(None, (row.variant, row.defense)))
        lines.append(f"{name}: {', '.join(told)}")
        lines += [f"WARNING: {name}: {row.problem}"] if row.problem else []
    return "\n".join(lines)


def _problem(rows: Sequence[RoundRow]) -> str | None:
    found = accuracy_of(rows)
    losses = [row.test_loss for row in rows if row.test_loss is not None]
    mean = sum(losses) / len(losses) if len(losses) == len(rows) else None
    return learning_problem(found, mean) if found else None


def _of_weakest(rows: Sequence[RoundRow]) -> PrivacyOf:
    """The claim of the row of largest ε; empty where none was accounted."""
    stated = [row.privacy for row in rows if row.privacy]
    return max(
        stated,
        key=lambda p: math.inf if p.epsilon in ("inf", None) else float(p.epsilon or 0),
        default=PrivacyOf(),
    )


def _largest(rows: Sequence[RoundRow]) -> float | None:
    claimed = [math.inf if r.epsilon == "inf" else r.epsilon for r in rows if r.epsilon is not None]
    return max(claimed, default=None)
