"""Words the system that was measured: data, model, clients, training, engine, defenses."""

from __future__ import annotations

from fedsim.report.dossier.document import Block, Facts, Heading, Paragraph, Table
from fedsim.report.dossier.evidence import Evidence
from fedsim.report.figures import describe_stack, describe_variant
from fedsim.results.reading import Run


def system(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the blocks of the chapter."""
    blocks: list[Block] = [Paragraph(evidence.summary)]
    for run in evidence.runs:
        if len(evidence.runs) > 1:
            variant = describe_variant(run.variant)
            blocks.append(Heading(variant or run.folder.name))
        blocks.append(Facts(tuple(_system_facts(run))))
    stacks = {
        name: describe_stack(stack)
        for run in evidence.runs
        for name, stack in (run.setting("defenses") or {}).items()
    } or {row.defense.name: describe_stack(row.defense.stack) for row in evidence.results}
    if stacks:
        blocks += [
            Heading("Defenses"),
            Table(
                columns=("Name", "What it consists of, in the order in which it is applied"),
                rows=tuple((name, stack or "no defense") for name, stack in stacks.items()),
                widths=(1, 4),
            ),
        ]
    return tuple(blocks)


def _system_facts(run: Run) -> list[tuple[str, str]]:
    def setting(*path: str) -> str:
        value = run.setting(*path)
        return "" if value is None else str(value)

    source = run.setting("data", "source") or {}
    partition = run.setting("data", "partition") or {}
    model = run.setting("model") or {}
    local = run.setting("training", "local") or {}
    learner = run.setting("learner") or {}
    named = {
        "data": describe_stack([source]) if source else "",
        "partition": describe_stack([partition]) if partition else "",
        "clients": setting("data", "clients"),
        "model": describe_stack([model]) if model else "",
        "learner": describe_stack([learner]) if learner else "",
        "algorithm": setting("training", "algorithm"),
        "rounds": setting("training", "rounds"),
        "local training": ", ".join(f"{key}={value}" for key, value in local.items()),
        "strategy": setting("federation", "strategy"),
        "participation": setting("federation", "participation"),
        "engine": setting("federation", "engine"),
        "seed": setting("seed"),
    }
    return [(name, value) for name, value in named.items() if value]
