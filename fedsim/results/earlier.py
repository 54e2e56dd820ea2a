"""What an earlier run has left in a folder: whether it can be gone on with."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fedsim.results import record, rows
from fedsim.results.reading import fits
from fedsim.system import paths
from fedsim.types import FedsimError

_RESULT_KEYS = {"metrics", "baseline", "reason", "per_image", "theory", "cost"}


def refuse_other_run(out: Path, resolved: str, resume: bool) -> None:
    """Refuse a folder that holds a run, but to `resume` the same scenario, written as `resolved`.

    Raises:
        FedsimError: it does.
    """
    previous = out / "scenario.yaml"
    if not previous.exists():
        return
    if not resume:
        raise FedsimError(
            f"{out} holds a run already: continue it with --resume (in Python, resume=True), or "
            "name another folder with --out (out=...)"
        )
    if paths.content(previous, paths.TEXT) != resolved.encode():
        raise FedsimError(
            f"{out} holds a run of another scenario (see its scenario.yaml): resume with the same "
            "scenario and overrides, or name another folder with --out"
        )


def refuse_foreign_rows(
    out: Path, keys: Collection[tuple[str, str, str]], stacks: Collection[str], last: int
) -> None:
    """Refuse lines that are not of this run: they name files, and are counted in its tables.

    `keys` are its results', `stacks` its defenses, `last` its number of rounds.

    Raises:
        FedsimError: a line is damaged or of another run; with the file and the line.
    """

    def result(row: record.Row) -> bool:
        whole = isinstance(row["control"], dict) and row.keys() >= _RESULT_KEYS
        return whole and rows.key(row) in keys and fits(row, "results.jsonl")

    def round(row: record.Row) -> bool:
        known = row["defense"] in stacks and row["round"] in range(1, last + 1)
        return known and row.keys() >= rows.ROUND_KEYS and fits(row, "rounds.jsonl")

    def audit(row: record.Row) -> bool:
        return row["defense"] in stacks and fits(row, "audit.jsonl")

    for name, belongs in (
        ("results.jsonl", result),
        ("rounds.jsonl", round),
        ("audit.jsonl", audit),
    ):
        record.read_lines(out / name, belongs)


def how_to_go_on(error: OSError) -> str:
    """What to say of a full disk, for example: the file, and how the run is continued."""
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror or error}; what has finished is kept: make room or correct the "
        "path, and continue with --resume (in Python, resume=True)"
    )
