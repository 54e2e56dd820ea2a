"""Defines the lines of results.jsonl, rounds.jsonl and audit.jsonl, each as a class."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from fedsim.contracts.grant import Grant
from fedsim.contracts.target import Target, main_target
from fedsim.scoring import METRICS, OWN_LOSS
from fedsim.types import LARGEST, Manipulation, Status, server_of

if TYPE_CHECKING:
    from fedsim.attacking.jobs import Job, Result

_DIVERGED = 2.0


class RowPart(BaseModel):
    """Base of the parts of a row, which ignore unknown fields; docs/formats.md explains the fields.

    A float that is not finite, or above 1e100 in size, and a value of another type are pydantic's
    ValidationError. None stands where a row does not say, or a field does not apply.
    """

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
    """Yields the floating-point numbers in a field; nested parts check their own."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    # A nested `RowPart` is none of these types: its own validator has checked it.
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))


class Metrics(RowPart):
    """Scores of one reconstruction: `metrics["psnr"]` (dB), or None where that does not apply.

    Keywords such as `psnr` set them; names that are no metric are dropped.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]

    @model_validator(mode="before")
    @classmethod
    def _keep_known(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = (*METRICS, OWN_LOSS, *cls.model_fields)
        return {name: value for name, value in fields.items() if name in known}

    def __getitem__(self, name: str) -> float | None:
        """Returns the value of the metric `name`; None if it does not apply."""
        return self.__pydantic_extra__.get(name)


PerImage = dict[str, list[float | None]]
"""Metric -> its value for each true image, in the order of the truth; None where not scored."""


class DefenseOf(RowPart):
    """Names a stack of defenses; `stack` has, in order, `name` and parameters of each."""

    name: str
    stack: list[dict[str, Any]]


class AttackOf(RowPart):
    """Names an attack, and the label that the scenario gave it.

    It kept one of `restarts` searches. `blind`: it took the update for undefended. `brought` is
    knowledge that no grant names, as `public=photos`. `ignores_update`: it never reads the update.
    """

    name: str
    label: str
    restarts: int = 1
    blind: bool = False
    parameters: dict[str, Any] = {}
    brought: tuple[str, ...] = ()
    ignores_update: bool = False


class ModelOf(RowPart):
    """Names the victim's model plugin, and its resolved parameters."""

    name: str
    parameters: dict[str, Any] = {}


class KnowledgeOf(Grant):
    """States what the attacker was granted; rows of later versions may hold more fields."""

    # What this version does not know is kept: it is something that was granted.
    model_config = ConfigDict(extra="allow")


class BaselineOf(Metrics):
    """Scores of the zero-information guess `name`, such as `mean_image`.

    It was learned from `public` images, `public_per_image` for each image of the guess.
    `near_copies` of the attacked images have a near copy among them. `per_image` has the PSNR, dB.
    """

    name: str | None = None
    public: int | None = None
    public_per_image: float | None = None
    near_copies: int | None = None
    per_image: PerImage = {}


ControlKind = Literal["client", "public", "batch", "release"]
"""Sources of a control's update; `batch` is another one of the same client."""


class ControlOf(RowPart):
    """Scores of the same attack's answer to another update; None and empty without one.

    It is `of` another `client`, `public` images, another `batch` of the client, or `release`.
    `per_image` has the PSNR of each true image; it is empty of a release.
    """

    other_update: Metrics | None = None
    of: ControlKind | None = None
    per_image: PerImage = {}


class CertificateOf(RowPart):
    """States what the attack said that it knows of its own answer, in numbers of images."""

    images: int
    """Number of images that the attack answered with."""
    determined: int | None = None
    """Number of those to which the update leaves one answer; None if the attack does not say."""
    certified: int | None = None
    """Number that the attack certifies to be right; None if it certifies nothing."""
    false: int | None = None
    """Number of certified ones that are wrong; None if there was no truth to compare with."""
    per_image: dict[str, list[bool]] = {}
    """Key `determined` or `certified` -> whether it holds of the answer to each true image."""


class UtilityOf(RowPart):
    """Measures what the defense left of the model, by the last round of its stack.

    `test_accuracy` and `test_chance`, the share of the most frequent class of `test_examples`, are
    in [0, 1]. `local_losses` are before and after local training. None: not measured.
    """

    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_examples: int | None = None
    test_chance: float | None = None
    local_losses: tuple[float | Literal["inf"], float | Literal["inf"]] | None = None

    @property
    def diverged(self) -> bool:
        """Whether local training is known to have more than doubled the loss of its images."""
        if self.local_losses is None:
            return False
        # An infinite loss is written as text, as JSON has no infinity.
        before, after = (float(loss) for loss in self.local_losses)
        return math.isinf(after) or after > _DIVERGED * before


class ClaimOf(RowPart):
    """States the (ε, δ) of the whole stack, as `PrivacyClaim`; "inf": nothing, for the `reason`."""

    epsilon: float | Literal["inf"] | None = None
    delta: float | None = None
    accountant: str | None = None
    unit: str | None = None
    relation: str | None = None
    reason: str | None = None
    covers: str | None = None
    claimed_epsilon: float | None = None


class PrivacyOf(ClaimOf):
    """States the claim of the attacked release, its noise's secret, and what an audit measured."""

    noise_key: str | None = None
    """Source of noise: `scenario` for the scenario's seed, `node` for each node's own secret."""
    audited_epsilon: float | None = None
    """Lower bound of the training's ε by canaries; None without an audit."""
    run: ClaimOf | None = None
    """Claim for all releases of the run; None if this claim is that one."""


class CostOf(RowPart):
    """States wall time, steps and memory of the attack over all restarts; None: not measured."""

    seconds: float | None = None
    iterations: int | None = None
    iterations_per_second: float | None = None
    peak_memory_bytes: int | None = None
    bytes_up: int | None = None
    """Mean bytes of a client's message in the attacked round, no probe; None if none answered."""


class TheoryOf(RowPart):
    """States what theory predicts of the attack, and the most that the privacy claim allows it.

    Attack `tensor_features` has `tensor_*`: how its error grows, up to a constant, an upper bound,
    whether the theorem's conditions hold, and which fails. The largest means that ε and δ allow are
    `psnr` (dB) and `feature_cosine`, on a truth drawn from `limit_prior`; `limit_unit` is what ε
    protects, and `limit_reason` why there is no limit. `membership_*` are the most that ε and δ
    allow: AUC, and shares of members found at 5%, 1% and 0.1% false positives. `membership_p` is
    the claim's p-value by these shares.
    """

    tensor_rate: float | None = None
    tensor_bound: float | None = None
    tensor_bound_valid: bool | None = None
    tensor_bound_reason: str | None = None
    psnr: float | None = None
    feature_cosine: float | None = None
    limit_prior: str | None = None
    limit_unit: str | None = None
    limit_reason: str | None = None
    membership_auc: float | None = None
    membership_tpr: float | None = None
    membership_tpr_at_1_percent: float | None = None
    membership_tpr_at_01_percent: float | None = None
    membership_p: float | None = None


class ResultRow(RowPart):
    """Holds a line of `results.jsonl`: one attack on one observed update.

    `variant` has the swept keys and their values; it is empty without a sweep. `release` has `kind`
    and `parameters` of what a closed-form learner releases, and `training` the fields of
    `LocalTraining`. `round` counts from 1; `client` and `trial`, the batch of its probe, from 0.
    `client` is -1 where clients were combined. `seed` is the attack's own. `observation` is the
    recording's id. `status` is `ok`, `failed`, `unscored` (the truth is still elsewhere) or
    `unseen` (the vantage shows no update), with a `reason` unless it is `ok`. `victims` has a
    digest of each true image or row, in the order of the truth; `per_image` has, by metric, the
    values of those scored. Another attack, `features_by`, told the features; the model's body was
    cut into `stages`. `simulation_error` is how far the update simulated at the truth is from the
    recorded one, as a share of its length. None stands where a field does not apply.
    """

    scenario: str
    variant: dict[str, Any] = {}
    dataset: str
    model: ModelOf | None = None
    learner: str = "sgd"
    release: dict[str, Any] | None = None
    training: dict[str, Any] = {}
    defense: DefenseOf
    attack: AttackOf
    vantage: str
    server: Manipulation = "honest"
    knowledge: KnowledgeOf
    batch_size: int
    round: int
    client: int
    trial: int
    releases: int = 1
    """Number of releases of the same batch whose mean was attacked."""
    seed: int
    observation: str | None = None
    status: Status
    reason: str | None = None
    metrics: Metrics | None = None
    victims: list[str] | None = None
    baseline: BaselineOf | None = None
    control: ControlOf | None = None
    theory: TheoryOf | None = None
    utility: UtilityOf | None = None
    privacy: PrivacyOf | None = None
    cost: CostOf | None = None
    per_image: dict[str, list[float]] | None = None
    certificate: CertificateOf | None = None
    features_by: str | None = None
    stages: int | None = None
    simulation_error: float | None = None
    folder: Path = Path()
    """Folder of the run that the row was read from."""
    ended: bool = True
    """Whether that run has ended and all of its attacks are scored."""

    @classmethod
    def of(cls, job: Job, result: Result, **of_run: Any) -> Self:
        """Builds the line of one attack; `of_run` has the fields that a job does not tell."""
        seen, plugin = result.observation, job.plugin
        parts = {name: getattr(result, name) for name in _OF_RESULT}
        return cls.model_validate(
            {
                **parts,
                "model": None,
                "release": None,
                "training": asdict(seen.training),
                "defense": {
                    "name": seen.id.partition("/")[0],
                    "stack": [dict(each) for each in seen.defense],
                },
                "attack": {
                    "name": job.attack,
                    "label": job.label,
                    "restarts": job.restarts,
                    "blind": job.blind,
                    "parameters": dict(job.parameters),
                    "brought": plugin.brings(),
                    "ignores_update": plugin.ignores_update,
                },
                **{name: getattr(seen, name) for name in _OF_OBSERVATION},
                "batch_size": seen.training.batch_size,
                "observation": seen.id,
                "certificate": result.certificate and asdict(result.certificate),
                "control": {},
                **of_run,
            }
        )

    def dump(self) -> dict[str, Any]:
        """Returns the row as `results.jsonl` holds it, without `folder` and `ended`."""
        # `simulation_error` is written only where it was set: rows of runs lack the field.
        beside = {"folder", "ended"} | ({"simulation_error"} - set(self.model_fields_set))
        return self.model_dump(mode="json", exclude=beside)

    @model_validator(mode="before")
    @classmethod
    def _least_server(cls, row: Any) -> Any:
        parameters = nested(row, "model", "parameters")
        if not isinstance(row, dict) or not isinstance(parameters, dict):
            return row
        stated, least = row.get("server", "honest"), server_of(parameters)
        # `Manipulation` rises from value to value: a row cannot claim less than its model shows.
        known = get_args(Manipulation)
        if stated in known and known.index(stated) < known.index(least):
            return {**row, "server": least}
        return row

    @property
    def ok(self) -> bool:
        """Whether the attack returned something that could be scored."""
        return self.status == "ok"

    @property
    def other_update(self) -> Metrics | None:
        """Scores of the same attack's answer to another update; None without a control."""
        return self.control.other_update if self.control else None

    @property
    def main(self) -> Target:
        """Main kind of leak of what the clients sent, such as images, whatever was answered."""
        return main_target(self.release["kind"] if self.release else "update")

    @property
    def computed(self) -> str:
        """Name of the model that was trained, or of the learner that trains none."""
        return self.model.name if self.model else self.learner

    @property
    def epsilon(self) -> float | None:
        """ε of all releases of the run, perhaps infinite; None if it was not accounted."""
        claimed = self.claimed.epsilon if self.claimed else None
        return math.inf if claimed == "inf" else claimed

    @property
    def claimed(self) -> ClaimOf | None:
        """Claim for all releases of the run; None if it was not accounted."""
        return (self.privacy.run or self.privacy) if self.privacy else None

    @property
    def cell(self) -> str:
        """JSON text that identifies the leaderboard line in which this trial is pooled."""
        fields = {"scenario", "variant", "dataset", "model", "learner", "training", "defense"}
        fields |= {"release"} if self.release else set()
        fields |= {"attack", "vantage", "server", "knowledge", "batch_size", "round", "releases"}
        return canonical(self.model_dump(include=fields))

    @property
    def place(self) -> str:
        """Text that tells this trial from all others at the same seed of the scenario."""
        fields = {"client", "trial", "seed"}
        return self.cell + canonical(self.model_dump(include=fields))

    @cached_property
    def content(self) -> str:
        """SHA-256, in hexadecimal, of the measurement: equal for copies of one trial."""
        return digest_of(self.model_dump(exclude=_BESIDE))


_OF_RESULT = (
    *("seed", "status", "reason", "metrics", "per_image", "features_by", "stages", "victims"),
    *("baseline", "cost"),
)

_OF_OBSERVATION = ("vantage", "server", "round", "client", "trial", "releases")

_BESIDE = {"variant", "control", "theory", "utility", "privacy", "cost", "folder", "ended"}
"""Fields of a row that are no part of its `content`."""


class RoundRow(RowPart):
    """Holds a line of `rounds.jsonl`: one round, from 1, of the training of stack `defense`.

    The clients `participants` were asked, and `aggregated` updates are in the new model (0: it
    stayed as it was). `test_accuracy` and `test_chance`, the share of the most frequent class of
    `test_examples`, are in [0, 1]. ε is that of all rounds so far, and `sigma` the σ of rows σ I
    that each client appends to its table. `failures` has the number of updates left out, by reason,
    and `details` a line on each, at most 20. `zero_updates` of the aggregated were zero everywhere,
    and `probe_failures` probes left no recording. `seconds` are wall time. None: not measured.
    """

    defense: str
    round: int
    participants: list[int] = []
    aggregated: int | None = None
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_examples: int | None = None
    test_chance: float | None = None
    epsilon: float | Literal["inf"] | None = None
    privacy: PrivacyOf | None = None
    sigma: float | None = None
    failures: dict[str, int] = {}
    details: list[str] = []
    zero_updates: int = 0
    probe_failures: int = 0
    seconds: float | None = None


class AuditRow(RowPart):
    """Holds a lower bound of ε of stack `defense`; `method` is `two_worlds` or `one_run`.

    `holds` says whether the claim is not below that bound.
    """

    defense: str
    method: str
    audited_epsilon: float
    holds: bool


def describe_tensor_bound(result: Result) -> dict[str, float | bool | str | None]:
    """Returns name -> `tensor_*` field of `TheoryOf`; empty if `result` has no tensor bound."""
    bound = result.tensor_bound
    if bound is None:
        return {}
    return {
        "tensor_rate": bound.rate,
        "tensor_bound": bound.value,
        "tensor_bound_valid": bound.is_valid,
        "tensor_bound_reason": bound.reason,
    }


def nested(mapping: Any, *path: str) -> Any:
    """Returns `mapping[path[0]][path[1]]…`; None where a key is missing or there is no dict."""
    for key in path:
        mapping = mapping.get(key) if isinstance(mapping, dict) else None
    return mapping


def canonical(value: object) -> str:
    """Returns `value` as JSON with sorted keys; what JSON does not have is written as its `str`."""
    return json.dumps(value, sort_keys=True, default=str)


def digest_of(value: object) -> str:
    """Returns the SHA-256, in hexadecimal, of `canonical(value)`, its JSON with sorted keys."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()
