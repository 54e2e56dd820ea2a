"""What was run, what went wrong and with what it was made, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fedsim.results.reading import ResultRow, Run, canonical, nested
from fedsim.words import number_of

UNATTACKED = (
    "Nothing is attacked in this run: it shows what each defense leaves of the model, and what is "
    "proven of it."
)
"""Of a run whose scenario has no attacks."""


def sentence(runs: Sequence[Run], rows: Sequence[ResultRow]) -> str:
    """What was run, in one sentence."""
    if early := unfinished(runs):
        return "; ".join(early) + "."
    if not rows:
        return "This run has no results: no update was recorded, or no attack was run."
    clients = _same(run.setting("data", "clients") for run in runs)
    rounds = max((row.round for run in runs for row in run.rounds), default=None)
    by = f" by {number_of(clients, 'client')}" if isinstance(clients, int) else " by a federation"
    over = f" over {number_of(rounds, 'round')}" if rounds else ""
    stacks = {row.defense.name for row in rows if row.defense.stack}
    bare = "without a defense" if any(not row.defense.stack for row in rows) else ""
    behind = f"behind {number_of(len(stacks), 'defense')}" if stacks else ""
    failed = sum(not row.ok for row in rows)
    sizes = sorted({row.batch_size for row in rows})
    updates = {(row.scenario, canonical(row.variant), row.observation) for row in rows}
    data = _listed(row.dataset for row in rows)
    did = f"{_was(row.computed for row in rows)} trained on {data}{by}{over}"
    made = f"{number_of(len(updates), 'recorded update')}, in batches of"
    if rows[0].subject == "rows":
        did = f"{_was(row.learner for row in rows)} computed from {data}{by}"
        made = f"{number_of(len(updates), 'recorded release')}, of a mean number of rows of"
    return (
        f"{did}, "
        f"{' and '.join(part for part in (bare, behind) if part)}; then "
        f"{_listed(row.attack.label for row in rows)} tried to recover the clients’ data from "
        f"{made} {_listed(sizes)}{_images(rows[0], sizes)}: "
        f"{number_of(len(rows), 'attack run')}, {failed or 'none'} of which failed."
    )


def _images(row: ResultRow, sizes: Sequence[int]) -> str:
    if row.subject == "rows":
        return ""
    return " image" if sizes == [1] else " images"


def failures(rows: Sequence[ResultRow]) -> list[tuple[str, str, str, int]]:
    """(defense, attack, reason, count) of failed trials."""
    counts = Counter(
        (row.defense.name, row.attack.label, row.reason or "no reason given")
        for row in rows
        if not row.ok
    )
    return [(*key, count) for key, count in counts.items()]


def client_failures(runs: Sequence[Run]) -> list[str]:
    """What went wrong in the federations' rounds, a line per defense and kind."""
    counts: Counter[tuple[str, str]] = Counter()
    details: dict[str, None] = {}
    for run in runs:
        for row in run.rounds:
            for reason, count in row.failures.items():
                counts[(row.defense, f"updates left out: {reason.replace('_', ' ')}")] += count
            counts[(row.defense, "updates that were zero everywhere")] += row.zero_updates
            counts[(row.defense, "probes without a recording")] += row.probe_failures
            details |= {f"{row.defense}, round {row.round}: {text}": None for text in row.details}
    lines = [f"{stack}, {what} ({count})" for (stack, what), count in counts.items() if count]
    return lines + list(details)


def notes(runs: Sequence[Run]) -> list[str]:
    """Each run's notes, once."""
    found = [str(text) for run in runs for text in (nested(run.record, "notes") or {}).values()]
    return list(dict.fromkeys(found))


def undeclared(runs: Sequence[Run]) -> list[str]:
    """A line for each stack of which a defense does not declare its effect, once."""
    noted = [nested(run.record, "notes") or {} for run in runs]
    found = [str(text) for of in noted for key, text in of.items() if key.startswith("effect.")]
    return list(dict.fromkeys(found))


def unfinished(runs: Sequence[Run]) -> list[str]:
    """A line for each run that has not come to its end: its tables lack rows, and may mislead."""
    return [
        f"UNFINISHED: {run.folder} holds {number_of(len(run.rows), 'attack run')} so far, and is "
        "not complete; "
        "continue it with --resume"
        for run in runs
        if run.scenario_text is not None and not run.record
    ]


def made_with(record: dict[str, Any]) -> list[tuple[str, str]]:
    """What `record.json` says of where and how the run was made."""
    environment = record.get("environment")
    packages = nested(environment, "packages") or {}
    known = {
        "commit": nested(environment, "commit"),
        "seed": record.get("seed"),
        "device": record.get("device"),
        "hardware": nested(environment, "gpu") or nested(environment, "processor"),
        "python": nested(environment, "python"),
        "packages": ", ".join(f"{k} {v}" for k, v in packages.items() if v),
        "wall time": _duration(record.get("seconds")),
        "peak memory": _megabytes(record.get("peak_memory_bytes")),
        "on the wire": _megabytes(record.get("bytes_on_wire")),
    }
    return [(key, str(value)) for key, value in known.items() if value not in (None, "")]


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _megabytes(count: int | None) -> str | None:
    return None if count is None else f"{count / 1e6:,.0f} MB"


def _listed(values: Iterable[object]) -> str:
    """`a`, `a and b`, `a, b and c`, each once."""
    *head, last = dict.fromkeys(map(str, values))
    return f"{', '.join(head)} and {last}" if head else last


def _was(values: Iterable[object]) -> str:
    """`a was`, or `a and b were`."""
    different = dict.fromkeys(values)
    return f"{_listed(different)} {'was' if len(different) == 1 else 'were'}"


def _same(values: Iterable[object]) -> object | None:
    first, *others = values
    return first if all(other == first for other in others) else None
