"""Reads run folders: results, rounds, record and scenario, checked against what a row holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedsim.results.lines import AuditRow, ResultRow, RoundRow, RowPart, nested
from fedsim.results.plan import PLAN, Line, Plan, load_plan
from fedsim.results.record import strict_json
from fedsim.results.settings import differences
from fedsim.scenario.location import ScenarioError
from fedsim.scenario.reader import MAX_BYTES, parse_yaml
from fedsim.system import paths
from fedsim.system.lock import is_locked
from fedsim.types import FedsimError

RESULTS = "results.jsonl"


class ReportError(FedsimError):
    """A run folder cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One folder with a `results.jsonl` or a `plan.json`: a run, or one variant of a sweep."""

    folder: Path
    rows: list[ResultRow]
    unscored: int
    """How many rows wait for the truth, which is elsewhere; they are none of `rows`."""
    unseen: int
    """How many rows are of a vantage that shows no update; they are none of `rows`."""
    rounds: list[RoundRow]
    audits: list[AuditRow]
    record: dict[str, Any]
    """`record.json`; empty if there is none."""
    scenario_text: str | None
    scenario: dict[str, Any]
    """`scenario.yaml`, as text and parsed; None and empty if there is none."""
    plan: Plan | None
    """What it set out to do; None of a run from before that was written."""
    at_work: bool
    """Whether a process is at work in it."""

    @property
    def attack_runs(self) -> int:
        """How many attacks were run on recordings, scored or not."""
        return len(self.rows) + self.unscored + self.unseen

    @property
    def lines(self) -> set[Line]:
        """The lines of the leaderboard that it has some row of."""
        return {
            (row.defense.name, row.attack.label, row.vantage, row.batch_size, row.round)
            for row in self.rows
        }

    @property
    def rounds_trained(self) -> int:
        """How many rounds were trained, of all defense stacks together."""
        return len({(row.defense, row.round) for row in self.rounds})

    @property
    def ended(self) -> bool:
        """Whether it has come to its end; its rows may still wait for their truth."""
        if self.plan is None:
            return bool(self.record) or self.scenario_text is None
        return bool(self.record) and self.attack_runs >= self.plan.attack_runs

    @property
    def variant(self) -> dict[str, Any]:
        """What a sweep has assigned in it; empty of a run that is no part of one."""
        assigned = self.record.get("variant") or (self.plan.variant if self.plan else {})
        return assigned if isinstance(assigned, dict) else {}

    def setting(self, *path: str) -> Any:
        """Returns a value of the scenario by its keys; None if it is not there."""
        return nested(self.scenario, *path)


def load_runs(folders: Iterable[Path | str]) -> list[Run]:
    """Reads every run below `folders`, in order of path, each folder once.

    Raises:
        ReportError: a folder is missing or holds no run, or a file in it is damaged.
    """
    parents: dict[Path, None] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            problem = "a file and no folder" if folder.exists() else "no such folder"
            raise ReportError(f"{folder}: {problem}; name a run's output folder")
        paths = sorted([*folder.rglob(RESULTS), *folder.rglob(PLAN)])
        if not paths:
            raise ReportError(
                f"{folder}: no {RESULTS} in it or below it; run `fedsim run` with --out {folder}"
            )
        parents |= dict.fromkeys(path.parent.resolve() for path in paths)
    return _as_variants([_load_run(folder) for folder in parents])


def _as_variants(runs: list[Run]) -> list[Run]:
    """Turns runs of one scenario with different settings into variants of it."""
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        if run.rows:
            groups.setdefault(run.rows[0].scenario, []).append(index)
    variants = list(runs)
    for indices in groups.values():
        members = [runs[index] for index in indices]
        settings = differences([r.scenario for r in members], [r.rows[0].variant for r in members])
        for index, run, setting in zip(indices, members, settings, strict=True):
            rows = [row.model_copy(update={"variant": row.variant | setting}) for row in run.rows]
            variants[index] = replace(run, rows=rows)
    return variants


def measurements(runs: Iterable[Run]) -> list[ResultRow]:
    """Returns all rows of `runs`; of a measurement that occurs twice, as after a copy, the last.

    Rows do not state the scenario's seed; their own is of the attack, and the same under each.
    """
    rows = {(str(run.setting("seed")), row.identity): row for run in runs for row in run.rows}
    return list(rows.values())


def _load_run(folder: Path) -> Run:
    text, parsed = _scenario(folder / "scenario.yaml")
    plan = _plan(folder)
    rows = _read(folder / RESULTS, ResultRow, optional=plan is not None)
    counts = Counter(row.status for row in rows)
    scored = [row for row in rows if row.status in ("ok", "failed")]
    run = Run(
        folder=folder,
        rows=scored,
        unscored=counts["unscored"],
        unseen=counts["unseen"],
        rounds=_read(folder / "rounds.jsonl", RoundRow, optional=True),
        audits=_read(folder / "audit.jsonl", AuditRow, optional=True),
        record=_record(folder / "record.json"),
        scenario_text=text,
        scenario=parsed,
        plan=plan,
        # A variant that is still to come has no lock yet; the sweep's is in the folder above.
        at_work=is_locked(folder) or bool(plan and plan.variant and is_locked(folder.parent)),
    )
    of_run = {"folder": folder, "ended": run.ended and not run.unscored}
    return replace(run, rows=[row.model_copy(update=of_run) for row in scored])


def _plan(folder: Path) -> Plan | None:
    try:
        return load_plan(folder)
    except (FedsimError, OSError) as error:
        raise ReportError(str(error)) from error


def fits(row: dict[str, Any], name: str) -> bool:
    """Whether `row` may stand in the file of lines called `name`."""
    kinds: dict[str, type[RowPart]] = {
        RESULTS: ResultRow,
        "rounds.jsonl": RoundRow,
        "audit.jsonl": AuditRow,
    }
    try:
        kinds[name].model_validate(row)
    except ValidationError:
        return False
    return True


P = TypeVar("P", bound=RowPart)


def _read(path: Path, kind: type[P], optional: bool = False) -> list[P]:
    if optional and not path.exists():
        return []
    lines = _text(path).splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(kind.model_validate_json(line))
            strict_json(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # a run that is still writing, or was killed, ends in half a line
            if not isinstance(error, ValidationError):
                raise ReportError(f"{path}, line {number}: {error}; remove the line") from error
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "line"
            raise ReportError(
                f"{path}, line {number}: {place}: {first['msg']}; the line was not written by "
                "this version of fedsim, or was changed"
            ) from error
    return rows


def _record(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        record = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not JSON that fedsim writes: {error}") from error
    return _mapping(path, record)


def _scenario(path: Path) -> tuple[str | None, dict[str, Any]]:
    if not path.exists():
        return None, {}
    text = _text(path, MAX_BYTES)
    try:
        return text, _mapping(path, parse_yaml(text, "").value)
    except ScenarioError as error:
        raise ReportError(f"{path}: not YAML that fedsim writes: {error}") from error


def _mapping(path: Path, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ReportError(f"{path}: expected a mapping, got {type(value).__name__}")
    return value


def _text(path: Path, max_bytes: int = paths.LINES) -> str:
    try:
        return paths.text(path, max_bytes)
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read: {error}") from error
