"""Describes the lines of results.jsonl, rounds.jsonl and audit.jsonl, as they are read again."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from fedsim.contracts.grant import Grant
from fedsim.scoring import METRICS
from fedsim.types import LARGEST, Server, server_of

_DIVERGED = 2.0
"""Local training diverges if it multiplies the loss by more than this."""


Subject = Literal["images", "rows"]


class RowPart(BaseModel):
    # Rows of a later version may hold more; what is read here is checked.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="after")
    def _summable(self) -> Self:
        for name, value in self:
            for number in _numbers(value):
                if abs(number) > LARGEST:
                    said = f"expected at most {LARGEST:g} in size, got {number:g}"
                    raise ValueError(f"{name}: {said}")
        return self


def _numbers(value: object) -> Iterator[float]:
    """Yields the floating-point numbers in a field, but for those of a part that has its own."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))


class Metrics(RowPart):
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
        """Returns the value of the metric `name`; None if it does not apply."""
        return self.__pydantic_extra__.get(name)


PerImage = dict[str, list[float | None]]
"""Metric -> its value for each true image, in the order of the truth; None of what was not
scored."""


class DefenseOf(RowPart):
    """Names a stack, and its members with their parameters."""

    name: str
    stack: list[dict[str, Any]]


class AttackOf(RowPart):
    """Names an attack, and the label that the scenario gave it."""

    name: str
    label: str
    restarts: int = 1
    parameters: dict[str, Any] = {}
    brought: tuple[str, ...] = ()
    """What the attack had that no grant names, as `public=photos`."""
    ignores_update: bool = False
    """Whether it never looks at the update, as a control does."""

    @model_validator(mode="before")
    @classmethod
    def _default_brought(cls, fields: Any) -> Any:
        """Rows that do not say what was brought name it in a parameter, if anything was.

        That is the public data that something was trained on or, if no parameter names these, each
        file that one names.
        """
        if not isinstance(fields, dict) or "brought" in fields:
            return fields
        parameters = fields.get("parameters")
        if not isinstance(parameters, dict):
            return fields
        if isinstance(public := parameters.get("public"), str):
            return {**fields, "brought": (f"public={public}",)}
        brought = [f"{key}={name}" for key, value in parameters.items() for name in _files(value)]
        return {**fields, "brought": tuple(brought)}


def _files(value: object) -> Iterator[str]:
    """Yields the names of what reads as files in a parameter, wherever they lie."""
    if isinstance(value, str):
        path = PurePath(value)
        if path.name and ("/" in value or _SUFFIX.fullmatch(path.suffix)):
            yield path.name
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _files(item)


_SUFFIX = re.compile(r"\.[A-Za-z]\w*")
"""Of a file; `0.5` has none."""


class ModelOf(RowPart):
    """Names the victim's architecture."""

    name: str
    parameters: dict[str, Any] = {}


class KnowledgeOf(Grant):
    """States what the attacker was granted; a row of a later version may hold more."""

    # What this version does not know is kept: it is something that was granted.
    model_config = ConfigDict(extra="allow")


class BaselineOf(Metrics):
    """Scores of the zero-information guess, and what it was learned from."""

    public: int | None = None
    """Number of public images; None for a guess that uses none, and if the row does not say."""
    public_per_image: float | None = None
    near_copies: int | None = None
    """Number of attacked images of which a public one is a near copy."""
    per_image: PerImage = {}


ControlKind = Literal["client", "public", "batch", "release"]
"""What another update is of: another client, public images, another batch of the same client, or
another release of a table."""


class ControlOf(RowPart):
    """Scores the same attack's reconstruction of another update against this truth."""

    other_update: Metrics | None = None
    of: ControlKind | None = None
    """None without any, and in rows that do not say."""
    per_image: PerImage = {}


class CertificateOf(RowPart):
    """States what the attack said that it knows of its own answer, in images of its batch."""

    images: int
    determined: int | None = None
    certified: int | None = None
    """None of an attack that certifies nothing."""
    false: int | None = None
    """How many certificates are false by the truth; None if that cannot be told."""


class UtilityOf(RowPart):
    """Measures what the defense left of the model."""

    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_examples: int | None = None
    test_chance: float | None = None
    """Share of the test set's most frequent class."""
    local_losses: tuple[float | Literal["inf"], float | Literal["inf"]] | None = None
    """Loss on the recorded images, before local training and after it."""

    @property
    def diverged(self) -> bool:
        """Whether local training more than doubled the loss of its own images, or ended at inf."""
        if self.local_losses is None:
            return False
        before, after = (float(loss) for loss in self.local_losses)
        return math.isinf(after) or after > _DIVERGED * before


class PrivacyOf(RowPart):
    """States the claim of the whole stack, and what an audit found. None: not accounted."""

    epsilon: float | Literal["inf"] | None = None
    delta: float | None = None
    accountant: str | None = None
    unit: str | None = None
    relation: str | None = None
    """Which data sets count as neighbours."""
    reason: str | None = None
    covers: str | None = None
    """Which releases it covers, in words."""
    audited_epsilon: float | None = None
    run: PrivacyOf | None = None
    """The claim for all releases of the run, if this one is for a single release."""


class CostOf(RowPart):
    """States what the attack took."""

    seconds: float | None = None
    iterations: int | None = None


class TheoryOf(RowPart):
    """States what theory predicts of the attack."""

    tensor_rate: float | None = None
    """How the attack's error grows, up to a constant; None if theory predicts nothing."""
    membership_auc: float | None = None
    """The largest area that the privacy claim allows; None if it does not bound membership."""
    membership_tpr: float | None = None


class ResultRow(RowPart):
    """Holds a line of `results.jsonl`: one attack on one observed update."""

    scenario: str
    variant: dict[str, Any] = {}
    dataset: str
    model: ModelOf | None = None
    """None for a learner that trains no model."""
    learner: str = "sgd"
    release: dict[str, Any] | None = None
    """The kind of a closed-form release and the learner's parameters; None for updates of a
    model."""
    training: dict[str, Any] = {}
    defense: DefenseOf
    attack: AttackOf
    vantage: str
    server: Server = "honest"
    """What the server has done to the model: what the row says, or what the model's parameters say
    if that is more."""
    knowledge: KnowledgeOf
    batch_size: int
    round: int
    client: int
    trial: int
    releases: int = 1
    """Number of releases of the same batch whose mean was attacked."""
    seed: int
    observation: str | None = None
    """Id of the attacked recording."""
    status: Literal["ok", "failed", "unscored", "unseen"]
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
    certificate: CertificateOf | None = None
    """None if the attack says nothing of what it knows, and in rows before there were any."""
    features_by: str | None = None
    """Which other attack was asked for the features; None if none, and in rows before."""
    stages: int | None = None
    """Number of stages that the attack cut the body into; None if it cuts none, and in rows
    before."""
    folder: Path = Path()
    """Folder of the run that it was read from."""
    ended: bool = True
    """Whether that run has ended, and is scored to its end."""

    @model_validator(mode="before")
    @classmethod
    def _least_server(cls, row: Any) -> Any:
        parameters = nested(row, "model", "parameters")
        if not isinstance(row, dict) or not isinstance(parameters, dict):
            return row
        stated, least = row.get("server", "honest"), server_of(parameters)
        known = get_args(Server)
        if stated in known and known.index(stated) < known.index(least):
            return {**row, "server": least}
        return row

    @property
    def ok(self) -> bool:
        """Whether the attack returned something that could be scored."""
        return self.status == "ok"

    @property
    def other_update(self) -> Metrics | None:
        """Scores of the same attack on another update, against this truth; None without any."""
        return self.control.other_update if self.control else None

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
        """ε of all releases of the run, as a number; None if it was not accounted."""
        claimed = self.claimed.epsilon if self.claimed else None
        return math.inf if claimed == "inf" else claimed

    @property
    def claimed(self) -> PrivacyOf | None:
        """Claim for all releases of the run; None if it was not accounted."""
        return (self.privacy.run or self.privacy) if self.privacy else None

    @property
    def cell(self) -> str:
        """Identifies the leaderboard line that this trial belongs to."""
        fields = {"scenario", "variant", "dataset", "model", "learner", "training", "defense"}
        fields |= {"release"} if self.release else set()
        fields |= {"attack", "vantage", "server", "knowledge", "batch_size", "round", "releases"}
        return canonical(self.model_dump(include=fields))

    @property
    def place(self) -> str:
        """Identifies, among trials of one scenario and seed, which one this is, by names alone."""
        fields = {"client", "trial", "seed"}
        return self.cell + canonical(self.model_dump(include=fields))

    @cached_property
    def content(self) -> str:
        """Digest of what was measured: of whom, how, and with which figures.

        Left out is what a copy may lack or state otherwise: what other rows of its run make of it,
        and what the attack took.
        """
        return digest_of(self.model_dump(exclude=_BESIDE))


_BESIDE = {"variant", "control", "theory", "utility", "privacy", "cost", "folder", "ended"}
"""Fields of a row that are no part of its `content`."""


class RoundRow(RowPart):
    """Holds a line of `rounds.jsonl`: one round of one stack's training."""

    defense: str
    round: int
    participants: list[int] = []
    aggregated: int | None = None
    """How many updates moved the model; None if the line does not say."""
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
    seconds: float | None = None
    """What the round took; None if the line does not say."""


class AuditRow(RowPart):
    """Holds a line of `audit.jsonl`: what canaries showed of one stack's claim."""

    defense: str
    method: str
    audited_epsilon: float
    holds: bool


def nested(mapping: Any, *path: str) -> Any:
    """Returns `mapping[path[0]][path[1]]…`; None where a key is missing."""
    for key in path:
        mapping = mapping.get(key) if isinstance(mapping, dict) else None
    return mapping


def canonical(value: object) -> str:
    """Returns JSON with sorted keys: equal for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def digest_of(value: object) -> str:
    """Returns a digest that is equal for equal values alone."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()
