"""Reads run folders: results, rounds, record and scenario, checked against what a row holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from fedsim.contracts.grant import Grant
from fedsim.results.record import strict_json
from fedsim.results.settings import differences
from fedsim.scoring import METRICS
from fedsim.system import paths
from fedsim.types import FedsimError, Server, server_of

RESULTS = "results.jsonl"
_DIVERGED = 2.0
"""Times the loss that local training starts from, from which it diverges."""

Subject = Literal["images", "rows"]


class ReportError(FedsimError):
    """A run folder cannot be read."""


class _Part(BaseModel):
    # Rows of a later version may hold more; what is read here is checked.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Metrics(_Part):
    """Scores of one reconstruction, by the names of the table of metrics."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]

    @model_validator(mode="before")
    @classmethod
    def _known(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {k: v for k, v in fields.items() if k in METRICS or k in cls.model_fields}

    def __getitem__(self, name: str) -> float | None:
        """Value of the metric `name`; None if it does not apply."""
        return self.__pydantic_extra__.get(name)


class DefenseOf(_Part):
    """A stack's label, and its members with their parameters."""

    name: str
    stack: list[dict[str, Any]]


class AttackOf(_Part):
    """An attack, and the label that the scenario gave it."""

    name: str
    label: str
    restarts: int = 1
    parameters: dict[str, Any] = {}


class ModelOf(_Part):
    """The victim's architecture."""

    name: str
    parameters: dict[str, Any] = {}


class KnowledgeOf(Grant):
    """What the attacker was granted; a row of a later version may hold more."""

    model_config = ConfigDict(extra="ignore")


class BaselineOf(Metrics):
    """Scores of the zero-information guess, and what it was learned from."""

    public: int | None = None
    """Images; None of a guess that none has a part in, and of rows that do not tell."""
    public_per_image: float | None = None


class ControlOf(_Part):
    """The same attack's reconstruction of another update, scored against this truth."""

    other_update: Metrics | None = None


class UtilityOf(_Part):
    """What the defense left of the model."""

    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_examples: int | None = None
    test_chance: float | None = None
    """Share of the test set's most frequent class."""
    local_losses: tuple[float | Literal["inf"], float | Literal["inf"]] | None = None
    """On the recorded images, before local training and after it."""

    @property
    def diverged(self) -> bool:
        """Whether local training has more than doubled the loss of its own images."""
        if self.local_losses is None:
            return False
        before, after = (float(loss) for loss in self.local_losses)
        return after > _DIVERGED * before


class PrivacyOf(_Part):
    """The claim of the whole stack, and what an audit found. None: not accounted."""

    epsilon: float | Literal["inf"] | None = None
    delta: float | None = None
    accountant: str | None = None
    unit: str | None = None
    relation: str | None = None
    """Which data sets count as neighbours."""
    reason: str | None = None
    covers: str | None = None
    """Which releases it is of, in words."""
    audited_epsilon: float | None = None
    run: PrivacyOf | None = None
    """That of all releases of the run, where this one is of a single release."""


class CostOf(_Part):
    """What the attack took."""

    seconds: float | None = None
    iterations: int | None = None


class TheoryOf(_Part):
    """What theory predicts of the attack."""

    tensor_rate: float | None = None
    """How its error grows, up to a constant; None if theory says nothing of it."""
    membership_auc: float | None = None
    """The most that the privacy claim allows; None if it says nothing of one row's presence."""
    membership_tpr: float | None = None


class ResultRow(_Part):
    """A line of `results.jsonl`: one attack on one observed update."""

    scenario: str
    variant: dict[str, Any] = {}
    dataset: str
    model: ModelOf | None = None
    """None of a learner that trains none."""
    learner: str = "sgd"
    release: dict[str, Any] | None = None
    """What a closed-form learner released, its kind and the learner's parameters; else None."""
    training: dict[str, Any] = {}
    defense: DefenseOf
    attack: AttackOf
    vantage: str
    server: Server = "honest"
    """What the server has done to the model; of rows that do not say, what the model's parameters
    tell."""
    knowledge: KnowledgeOf
    batch_size: int
    round: int
    client: int
    trial: int
    releases: int = 1
    """Of the same batch, of which the attacked update is the mean."""
    seed: int
    observation: str | None = None
    """Id of the attacked recording."""
    status: Literal["ok", "failed"]
    reason: str | None = None
    metrics: Metrics | None = None
    victims: list[str] | None = None
    """A digest of each true image, or row of a table that took part."""
    baseline: BaselineOf | None = None
    control: ControlOf | None = None
    theory: TheoryOf | None = None
    utility: UtilityOf | None = None
    privacy: PrivacyOf | None = None
    cost: CostOf | None = None
    per_image: dict[str, list[float]] | None = None
    folder: Path = Path()
    """Of the run that it was read from."""

    @model_validator(mode="before")
    @classmethod
    def _server_told(cls, row: Any) -> Any:
        if not isinstance(row, dict) or "server" in row:
            return row
        parameters = nested(row, "model", "parameters")
        told = server_of(parameters) if isinstance(parameters, dict) else "honest"
        return {**row, "server": told}

    @property
    def ok(self) -> bool:
        """Whether the attack returned something that could be scored."""
        return self.status == "ok"

    @property
    def subject(self) -> Subject:
        """What the attack is after."""
        return "images" if self.release is None else "rows"

    @property
    def computed(self) -> str:
        """The model that was trained, or the learner that trains none."""
        return self.model.name if self.model else self.learner

    @property
    def epsilon(self) -> float | None:
        """Of all releases of the run, as a number; None if not accounted."""
        claimed = self.claimed.epsilon if self.claimed else None
        return math.inf if claimed == "inf" else claimed

    @property
    def claimed(self) -> PrivacyOf | None:
        """The claim of all releases of the run; None if not accounted."""
        return (self.privacy.run or self.privacy) if self.privacy else None

    @property
    def cell(self) -> str:
        """What the trials of one leaderboard line share."""
        kept = {"scenario", "variant", "dataset", "model", "learner", "training", "defense"}
        kept |= {"release"} if self.release else set()
        kept |= {"attack", "vantage", "server", "knowledge", "batch_size", "round", "releases"}
        return canonical(self.model_dump(include=kept))

    @property
    def identity(self) -> str:
        """What tells this measurement from every other of its scenario's seed."""
        kept = {"client", "trial", "seed"}
        return self.cell + canonical(self.model_dump(include=kept))


class RoundRow(_Part):
    """A line of `rounds.jsonl`: one round of one stack's training."""

    defense: str
    round: int
    participants: list[int] = []
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_examples: int | None = None
    test_chance: float | None = None
    epsilon: float | Literal["inf"] | None = None
    privacy: PrivacyOf | None = None
    sigma: float | None = None
    failures: dict[str, int] = {}
    """Reason -> how many updates were left out of the round."""
    details: list[str] = []
    zero_updates: int = 0
    probe_failures: int = 0


class AuditRow(_Part):
    """A line of `audit.jsonl`: what canaries showed of one stack's claim."""

    defense: str
    method: str
    audited_epsilon: float
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """One folder with a `results.jsonl`: a run, or one variant of a sweep."""

    folder: Path
    rows: list[ResultRow]
    rounds: list[RoundRow]
    audits: list[AuditRow]
    record: dict[str, Any]
    """`record.json`; empty if there is none."""
    scenario_text: str | None
    scenario: dict[str, Any]
    """`scenario.yaml`, as text and parsed; None and empty if there is none."""

    def setting(self, *path: str) -> Any:
        """A value of the scenario by its keys; None if it is not there."""
        return nested(self.scenario, *path)


def nested(mapping: Any, *path: str) -> Any:
    """`mapping[path[0]][path[1]]…`; None where a key is missing or a value is no mapping."""
    for key in path:
        mapping = mapping.get(key) if isinstance(mapping, dict) else None
    return mapping


def load_runs(folders: Iterable[Path | str]) -> list[Run]:
    """Every run below `folders`, in order of path, each folder once.

    Raises:
        ReportError: a folder is missing or holds no results, or a file in it is damaged.
    """
    found: dict[Path, None] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            said = "a file and no folder" if folder.exists() else "no such folder"
            raise ReportError(f"{folder}: {said}; name a run's output folder")
        paths = sorted(folder.rglob(RESULTS))
        if not paths:
            raise ReportError(
                f"{folder}: no {RESULTS} in it or below it; run `fedsim run` with --out {folder}"
            )
        found |= dict.fromkeys(path.parent.resolve() for path in paths)
    return _told_apart([_load_run(folder) for folder in found])


def _told_apart(runs: list[Run]) -> list[Run]:
    """Runs of one scenario with other settings become variants of it: they measure other things."""
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        if run.rows:
            groups.setdefault(run.rows[0].scenario, []).append(index)
    told = list(runs)
    for members in groups.values():
        own = [runs[index] for index in members]
        apart = differences([r.scenario for r in own], [r.rows[0].variant for r in own])
        for index, run, more in zip(members, own, apart, strict=True):
            rows = [row.model_copy(update={"variant": {**row.variant, **more}}) for row in run.rows]
            told[index] = replace(run, rows=rows)
    return told


def measurements(runs: Iterable[Run]) -> list[ResultRow]:
    """All rows of `runs`, a measurement that occurs twice (as after a copy) only once, the last.

    Rows do not state the scenario's seed; their own is of the attack, and the same under each.
    """
    rows = {(str(run.setting("seed")), row.identity): row for run in runs for row in run.rows}
    return list(rows.values())


def canonical(value: object) -> str:
    """JSON with sorted keys: equal for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def _load_run(folder: Path) -> Run:
    text, parsed = _scenario(folder / "scenario.yaml")
    rows = _read(folder / RESULTS, ResultRow)
    return Run(
        folder=folder,
        rows=[row.model_copy(update={"folder": folder}) for row in rows],
        rounds=_read(folder / "rounds.jsonl", RoundRow, optional=True),
        audits=_read(folder / "audit.jsonl", AuditRow, optional=True),
        record=_record(folder / "record.json"),
        scenario_text=text,
        scenario=parsed,
    )


def fits(row: dict[str, Any], name: str) -> bool:
    """Whether `row` may stand in the file of lines called `name`."""
    kinds: dict[str, type[_Part]] = {
        RESULTS: ResultRow,
        "rounds.jsonl": RoundRow,
        "audit.jsonl": AuditRow,
    }
    try:
        kinds[name].model_validate(row)
    except ValidationError:
        return False
    return True


P = TypeVar("P", bound=_Part)


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
    text = _text(path)
    try:
        return text, _mapping(path, yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not YAML that fedsim writes: {error}") from error


def _mapping(path: Path, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ReportError(f"{path}: expected a mapping, got {type(value).__name__}")
    return value


def _text(path: Path) -> str:
    try:
        return paths.text(path, paths.LINES)
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read: {error}") from error
