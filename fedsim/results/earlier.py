"""Decides whether a run can continue what an earlier one left in a folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fedsim.results import record, rows
from fedsim.results.reading import fits
from fedsim.system import paths
from fedsim.types import FedsimError

_RESULT_KEYS = {"metrics", "baseline", "reason", "per_image", "theory", "cost"}


def refuse_other_run(out: Path, resolved: str, resume: bool) -> None:
    """Refuses a folder that holds a run, unless `resume` continues the same scenario.

    `resolved` is the text of the scenario with every default written out.

    Raises:
        FedsimError: the folder holds a run of another scenario, or a run while `resume` is false.
    """
    previous = out / "scenario.yaml"
    if not previous.exists():
        return
    if not resume:
        raise FedsimError(
            f"{out} holds a run already: continue it with --resume (in Python, resume=True), or "
            "name another folder with --out (out=...)"
        )
    # Byte by byte: a default that a new version has changed makes another run as well.
    if paths.content(previous, paths.TEXT) != resolved.encode():
        raise FedsimError(
            f"{out} holds a run of another scenario (see its scenario.yaml): resume with the same "
            "scenario and overrides, or name another folder with --out"
        )


def refuse_foreign_rows(
    out: Path, keys: Collection[tuple[str, str, str]], stacks: Collection[str], last: int
) -> None:
    """Refuses a folder that holds lines of other runs, which would count in the tables.

    Args:
        out: Folder of the run.
        keys: Key of each result that the run is to have, see `rows.key`.
        stacks: Names of the run's defense stacks.
        last: Number of the run's last round.

    Raises:
        FedsimError: a line is damaged or of another run; with the file and the line.
    """

    def result(row: record.Row) -> bool:
        # Refused now, since controls and report read these keys of every row at the run's end.
        is_complete = isinstance(row["control"], dict) and row.keys() >= _RESULT_KEYS
        return is_complete and rows.key(row) in keys and fits(row, "results.jsonl")

    def round(row: record.Row) -> bool:
        is_of_run = row["defense"] in stacks and row["round"] in range(1, last + 1)
        return is_of_run and row.keys() >= rows.ROUND_KEYS and fits(row, "rounds.jsonl")

    def audit(row: record.Row) -> bool:
        return row["defense"] in stacks and fits(row, "audit.jsonl")

    for name, belongs in (
        ("results.jsonl", result),
        ("rounds.jsonl", round),
        ("audit.jsonl", audit),
    ):
        # Read for its refusals alone.
        record.read_lines(out / name, belongs)


def how_to_go_on(error: OSError) -> str:
    """Returns the message for a failed write: the file, the reason, and how to continue the run."""
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror or error}; what has finished is kept: make room or correct the "
        "path, and continue with --resume (in Python, resume=True)"
    )
