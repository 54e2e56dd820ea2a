"""Names what was measured: data, model, clients, training, engine and defenses."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.report.figures import describe_stack
from fedsim.results.lines import ResultRow
from fedsim.results.reading import Run


def stacks_of(runs: Sequence[Run], rows: Sequence[ResultRow]) -> dict[str, str]:
    """Returns the members of each defense in words, as scenarios or else rows state them."""
    return {
        name: describe_stack(stack)
        for run in runs
        for name, stack in (run.setting("defenses") or {}).items()
    } or {row.defense.name: describe_stack(row.defense.stack) for row in rows}


def system_facts(run: Run) -> list[tuple[str, str]]:
    """Returns names and values of what the scenario of `run` sets."""

    def setting(*path: str) -> str:
        value = run.setting(*path)
        return "" if value is None else str(value)

    def plugin(*path: str) -> str:
        entry = run.setting(*path)
        return describe_stack([entry]) if entry else ""

    local = run.setting("training", "local") or {}
    named = {
        "data": plugin("data", "source"),
        "partition": plugin("data", "partition"),
        "clients": setting("data", "clients"),
        "model": plugin("model"),
        "learner": plugin("learner"),
        "algorithm": setting("training", "algorithm"),
        "rounds": setting("training", "rounds"),
        "local training": ", ".join(f"{key}={value}" for key, value in local.items()),
        "strategy": setting("federation", "strategy"),
        "participation": setting("federation", "participation"),
        "engine": setting("federation", "engine"),
        "seed": setting("seed"),
    }
    return [(name, value) for name, value in named.items() if value]
