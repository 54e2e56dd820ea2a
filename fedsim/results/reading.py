"""Reads run folders: results, rounds, record and scenario, checked against what a row holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedsim.results.lines import (
    AuditRow,
    ResultRow,
    RoundRow,
    RowPart,
    canonical,
    digest_of,
    nested,
)
from fedsim.results.record import PLAN, Line, Plan, describe_fault, strict_json
from fedsim.scenario.document import ScenarioError
from fedsim.scenario.reader import MAX_BYTES, parse_yaml
from fedsim.system import paths
from fedsim.system.lock import is_locked
from fedsim.types import FedsimError

_DECISIVE = (
    "data",
    "learner",
    "model",
    "training",
    "federation.participation",
    "federation.strategy",
    "federation.strategy_parameters",
    "observe.plant",
    "privacy",
)
"""Keys of a scenario that decide figures and that not all rows state. The seed is none of them,
since trials are pooled over it."""
_NEVER = ("training.evaluate_every",)


def differences(
    scenarios: Sequence[Mapping[str, Any]], stated: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns, for each scenario with all defaults, the settings that tell it from the others.

    Settings are dotted keys and their values, None where a scenario lacks the key; only those that
    decide figures count, and the seed is none of them. A stack, `defenses.NAME`, is compared among
    the scenarios that have one of its name. `stated` has, for each scenario, the settings that rows
    show already, such as those of a sweep; these are left out for all. An empty scenario, of a run
    that lost its file, has no settings.
    """
    shown = {key for variant in stated for key in variant}
    settings = [
        {
            key: value
            for key, value in leaves_of(scenario)
            if _within(key, _DECISIVE) and not _within(key, _NEVER)
        }
        for scenario in scenarios
    ]
    keys = {key: None for setting in settings for key in setting if not _within(key, shown)}
    # A run that lost its scenario has no values to differ in, and gets none.
    present = [setting for setting in settings if setting]
    differing = [key for key in keys if any(s.get(key) != present[0].get(key) for s in present)]
    found = [scenario.get("defenses") for scenario in scenarios]
    stacks = [each if isinstance(each, Mapping) else {} for each in found]
    names = {name: None for own in stacks for name in own if not _within(f"defenses.{name}", shown)}
    # A stack that only one run has is no difference: its rows have a name of their own.
    defined = {name: [own[name] for own in stacks if name in own] for name in names}
    other = [name for name, own in defined.items() if any(each != own[0] for each in own)]
    return [
        {key: setting.get(key) for key in differing if setting}
        | {f"defenses.{name}": own[name] for name in other if name in own}
        for setting, own in zip(settings, stacks, strict=True)
    ]


def leaves_of(mapping: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (`path` + dotted key, value) of each leaf of a nested mapping; a list is one value."""
    for key, value in mapping.items():
        # An empty mapping is a value: it would yield no key at all.
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _within(key: str, parts: Sequence[str] | set[str]) -> bool:
    return any(key == part or key.startswith(f"{part}.") for part in parts)


RESULTS = "results.jsonl"


class ReportError(FedsimError):
    """Raised where a run's folder cannot be read, or holds something else than fedsim writes."""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """Holds the content of one folder of results: a run, or one variant of a sweep."""

    folder: Path
    rows: list[ResultRow]
    """Rows of attacks that were scored or failed."""
    unscored: int
    """Number of rows that wait for the truth, which is elsewhere."""
    unseen: int
    """Number of rows of a vantage that shows no update."""
    rounds: list[RoundRow]
    audits: list[AuditRow]
    record: dict[str, Any]
    """Content of record.json; like that of scenario.yaml and plan.json, empty or None without."""
    scenario_text: str | None
    scenario: dict[str, Any]
    plan: Plan | None
    at_work: bool
    """Whether a process was at work in the folder when it was read; False also without locks."""
    apart: dict[str, Any] = field(default_factory=dict)
    """Settings (dotted keys) or digests (`data`, `recording`, `run`, `figures`) that set it apart
    from runs of its name; empty if nothing has to."""

    @property
    def attack_runs(self) -> int:
        """Number of attack runs that have a row, scored or not."""
        return len(self.rows) + self.unscored + self.unseen

    @property
    def lines(self) -> set[Line]:
        """(stack, attack label, vantage, batch size, round) of each leaderboard line in `rows`."""
        return {
            (row.defense.name, row.attack.label, row.vantage, row.batch_size, row.round)
            for row in self.rows
        }

    @property
    def rounds_trained(self) -> int:
        """Number of rounds trained, of all defense stacks together."""
        return len({(row.defense, row.round) for row in self.rounds})

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end; rows may still wait for their truth."""
        if self.plan is None:
            # Of a folder that holds rows alone, nothing says that more will come.
            return bool(self.record) or self.scenario_text is None
        return bool(self.record) and self.attack_runs >= self.plan.attack_runs

    @property
    def name(self) -> str:
        """Name of the scenario, or of the folder if no file states one."""
        stated = self.rows[0].scenario if self.rows else self.setting("name")
        return str(stated or (self.plan and self.plan.scenario) or self.folder.name)

    @property
    def variant(self) -> dict[str, Any]:
        """Keys and values that set the run apart: those of a sweep, and `apart`; may be empty."""
        assigned = self.record.get("variant") or (self.plan.variant if self.plan else {})
        if self.rows:
            assigned = self.rows[0].variant
        return (assigned if isinstance(assigned, dict) else {}) | self.apart

    @property
    def origin(self) -> str:
        """Kind and digest of what the run measures, see `Plan.origin`; empty if not known."""
        return self.plan.origin if self.plan else ""

    @property
    def is_remote(self) -> bool:
        """Whether its clients were nodes that keep data and secrets to themselves."""
        return self.origin.startswith("run:")

    @property
    def figures(self) -> dict[str, str]:
        """Text that identifies a row's trial, seed included -> digest of what it measured."""
        seed = str(self.setting("seed"))
        return {seed + row.place: row.content for row in self.rows}

    def setting(self, *path: str) -> Any:
        """Returns the scenario's value by its keys, as `setting("training", "rounds")`, or None."""
        return nested(self.scenario, *path)


def load_runs(folders: Iterable[Path | str]) -> list[StoredRun]:
    """Reads every run in or below `folders`, in order of path, each folder once.

    Runs of one name that differ in settings, data or figures are told apart by `StoredRun.apart`. A
    ReportError says that a folder is missing or holds no run, or that a file is damaged.
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
        for path in paths:
            # Such a name has bytes that are no UTF-8, and could be written into no page.
            if str(path) != str(path).encode(errors="replace").decode():
                raise ReportError(f"{str(path)!r}: the name is no text; rename the folder")
        # Resolved, so that a folder that is named twice, or through a link, is read once.
        parents |= dict.fromkeys(path.parent.resolve() for path in paths)
    # In the order of paths: that of the arguments decides nothing.
    return _set_apart([_load_run(folder) for folder in sorted(parents)])


def _set_apart(runs: list[StoredRun]) -> list[StoredRun]:
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(run.name, []).append(index)
    apart = list(runs)
    for indices in groups.values():
        if len(indices) == 1:
            continue
        members = [runs[index] for index in indices]
        # By settings and origin first; figures tell only those apart that are still alike.
        settings = differences(_scenarios(members), [run.variant for run in members])
        members = [
            _with_variant(run, setting | origin)
            for run, setting, origin in zip(members, settings, _origins(members), strict=True)
        ]
        by_variant: dict[str, list[int]] = {}
        for place, run in enumerate(members):
            by_variant.setdefault(canonical(run.variant), []).append(place)
        for places in by_variant.values():
            same = [members[place] for place in places]
            for place, run, own in zip(places, same, _contradictions(same), strict=True):
                members[place] = _with_variant(run, own)
        for index, run in zip(indices, members, strict=True):
            apart[index] = run
    return apart


def _with_variant(run: StoredRun, apart: dict[str, Any]) -> StoredRun:
    if not apart:
        return run
    rows = [row.model_copy(update={"variant": row.variant | apart}) for row in run.rows]
    return replace(run, rows=rows, apart=run.apart | apart)


def _scenarios(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Returns the scenario of each run; if no run has one, the stacks that its rows state."""
    if any(run.scenario for run in runs):
        return [run.scenario for run in runs]
    return [{"defenses": {r.defense.name: r.defense.stack for r in run.rows}} for run in runs]


def _origins(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """Returns the origin of each run, or nothing for all if no two runs state different ones."""
    if len({run.origin for run in runs if run.origin}) < 2:
        return [{} for _ in runs]
    parts = [run.origin.partition(":") for run in runs]
    return [{kind: digest[:_SHOWN]} if digest else {} for kind, _, digest in parts]


_SHOWN = 12
"""Number of characters of a digest that are shown to tell runs apart."""


def _contradictions(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """Returns a digest of each run's figures, if two runs state different ones for one place."""
    figures = [run.figures for run in runs]
    stated: dict[str, str] = {}
    for own in figures:
        # `setdefault` returns what an earlier run stated of the place, if one did.
        if any(stated.setdefault(place, content) != content for place, content in own.items()):
            break
    else:
        return [{} for _ in runs]
    contents = [frozenset(own.items()) for own in figures]
    digests = {each: digest_of(sorted(each)) for each in contents}
    # Each run goes with the largest one that holds all its figures; the digest breaks ties.
    wholes = [
        max((each for each in contents if each >= own), key=lambda e: (len(e), digests[e]))
        for own in contents
    ]
    return [
        {"figures": digests[whole][:_SHOWN]} if own else {}
        for own, whole in zip(contents, wholes, strict=True)
    ]


def name_by_place(runs: Iterable[StoredRun], root: Path | str) -> list[StoredRun]:
    """Returns copies of `runs`, whose folders all lie in or below `root`.

    Digests of recordings, runs and figures in `apart` are replaced by the folder's path from there.
    """
    named = []
    for run in runs:
        digests = [kind for kind in ("recording", "run", "figures") if kind in run.apart]
        place = str(run.folder.relative_to(Path(root).resolve()))
        named.append(_with_variant(run, dict.fromkeys(digests, place)))
    return named


def measurements(runs: Iterable[StoredRun]) -> list[ResultRow]:
    """Returns the rows of `runs`, each measurement once, in the place of its first copy.

    Copies are rows of equal seed, variant and `ResultRow.content`. That of the largest ε stays,
    where None counts as 0; of equals one whose run has ended, or that has a control.
    """
    rows: dict[tuple[str, str, str], ResultRow] = {}
    for run in runs:
        for row in run.rows:
            key = trial_of(run, row)
            # The weakest claim wins: a copy must not make the run look more private.
            if key not in rows or _rank_copy(row) >= _rank_copy(rows[key]):
                rows[key] = row
    return list(rows.values())


def trial_of(run: StoredRun, row: ResultRow) -> tuple[str, str, str]:
    """Returns what copies of one row of `run` have in common: seed, variant and content."""
    # The same row at another seed or in another variant is a trial of its own.
    return str(run.setting("seed")), canonical(row.variant), row.content


def _rank_copy(row: ResultRow) -> tuple[float, bool, bool]:
    """Ranks equal rows: by ε, then by whether their run ended, then by whether it has controls."""
    return (row.epsilon or 0.0, row.ended, row.other_update is not None)


def _load_run(folder: Path) -> StoredRun:
    text, parsed = _scenario(folder / "scenario.yaml")
    plan = _load_plan(folder)
    rows = _read(folder / RESULTS, ResultRow, optional=plan is not None)
    # Rows that wait for truth, or that saw nothing, are counted and enter no table.
    counts = Counter(row.status for row in rows)
    scored = [row for row in rows if row.status in ("ok", "failed")]
    run = StoredRun(
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
    # Known only once the run is put together: `ended` compares its rows with the plan.
    of_run = {"folder": folder, "ended": run.ended and not run.unscored}
    return replace(run, rows=[row.model_copy(update=of_run) for row in scored])


def _load_plan(folder: Path) -> Plan | None:
    path = folder / PLAN
    if not path.exists():
        return None
    try:
        return Plan.model_validate(strict_json(_text(path, paths.TEXT)))
    except (ValueError, TypeError, RecursionError) as error:
        raise ReportError(
            f"{path}: not what fedsim writes: {describe_fault(error)}; remove it, and "
            "nothing tells how far the run is"
        ) from error


def fits(row: dict[str, Any], name: str) -> bool:
    """Returns whether file `name` (results.jsonl, rounds.jsonl, audit.jsonl) may hold `row`."""
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
            # Parsed again: pydantic looks for NaN in none of the fields that it ignores.
            strict_json(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # a run that is still writing, or was killed, ends in half a line
            remedy = "remove the line"
            if isinstance(error, ValidationError):
                remedy = "the line was not written by this version of fedsim, or was changed"
            raise ReportError(
                f"{path}, line {number}: {describe_fault(error)}; {remedy}"
            ) from error
    return rows


def _record(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        record = strict_json(_text(path))
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
    except (FedsimError, OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read: {error}") from error
