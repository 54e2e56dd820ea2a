"""What an audit shows of a stack, and what the stack claims."""

from __future__ import annotations

from fedsim.results import rows
from fedsim.training.workload import Workload


def find_bound(audited: Workload) -> tuple[float, float]:
    """(ε that is shown, ε that is claimed after all rounds)."""
    row = rows.audit_row(audited)
    assert row is not None
    claimed = rows.spent(audited, audited.scenario.training.rounds).epsilon
    return float(row["audited_epsilon"]), claimed
