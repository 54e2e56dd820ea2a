"""Defines jobs of the attack stage: each is one attack on one observation, scored and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsim import rng, scoring
from fedsim.attacking.question import AttackAnswer, reason_of
from fedsim.contracts.attack import Attack, AttackState, Progress, Solution, create
from fedsim.contracts.grant import Grant
from fedsim.contracts.metric import GuessChances
from fedsim.contracts.target import Aids, GuessRequest, Resources, targets
from fedsim.models.base import Classifier
from fedsim.privacy.recovery import TensorBound
from fedsim.recording.files import checked_id, load_observation, paths_beside, write_tensors
from fedsim.recording.truth import add_sources, load_truth
from fedsim.types import Effect, Observation, ReleaseSpec, Status, Truth

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Holds what all jobs share: the run's folder `root`, torch `device`, and what is `granted`."""

    root: Path
    device: str
    granted: Grant
    guesser: scoring.Guesser | scoring.RowGuesser | None
    """Guesser of batches that sees no update; None for a closed-form learner."""
    lpips_backbone: scoring.Backbone
    lpips_weights: str | None
    """Path of the backbone's weights; None for those in torchvision's cache, if any."""
    threads: int
    """Number of threads that a job computes on, wherever it runs."""
    models: Mapping[str, Classifier] = field(default_factory=dict)
    """Models that no plugin builds, by the names that observations have for them."""

    @property
    def aids(self) -> Aids:
        """Each target's `part` -> what it prepared for scores; slowly made anew at each access."""
        return scoring.prepare(
            Resources(
                guesser=self.guesser,
                lpips_backbone=self.lpips_backbone,
                lpips_weights=self.lpips_weights,
            )
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """Names a registered `attack`, with `restarts` >= 1 starting points, and its observation."""

    observation: Path
    """Path of the observation's JSON file."""
    attack: str
    label: str
    """Label of the attack in the run; its name, unless the scenario gives one."""
    parameters: dict[str, object]
    restarts: int
    blind: bool = False
    """Whether the attack is not told of the defenses (`hide_defenses`)."""

    @property
    def title(self) -> str:
        """Name of the job in progress displays: `<label> on <stack>/<file of the observation>`."""
        return f"{self.label} on {self.observation.parent.parent.name}/{self.observation.stem}"

    @property
    def plugin(self) -> Attack[AttackState]:
        """The attack with its parameters, made anew at each access; errors are as of `create`."""
        return create(self.attack, self.parameters)

    @property
    def key(self) -> tuple[str, str, str]:
        """(stack, attack label, observation id), which identifies the job's row in a run."""
        round, stack = self.observation.parent, self.observation.parent.parent.name
        return stack, self.label, f"{stack}/{round.name}/{self.observation.stem}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Holds the outcome of a job: the parts of its row that do not depend on the rest of the run.

    `reason` is None if `status` is ok.
    """

    observation: Observation
    """What was attacked, by `score_answer` without its tensors."""
    seed: int
    """Seed of the attack; that of the observation if there was none."""
    status: Status
    reason: str | None
    metrics: dict[str, float | None]
    """Every metric's name -> its value; None where it was not measured."""
    per_image: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> its value for each true image, in the order of the truth without missing ones."""
    certificate: scoring.Certificate | None = None
    """The attack's own certificate of its answer, checked by the truth; None if it gives none."""
    features_by: str | None = None
    """Name of another attack that the attack took its features from; None if none."""
    stages: int | None = None
    """Number of stages that the attack cut the model's body into; None if it cuts none."""
    baseline: dict[str, Any]
    """How a guess without the update scores, as `scoring.score_guess` returns it."""
    victims: list[str] | None = None
    """Digest, 16 hexadecimal digits, of each true image or row that took part, in the order of the
    truth; None if there was no attack."""
    tensor_bound: TensorBound | None = None
    """What theory predicts of the attack's error; None if it does not follow `tensor_rate`."""
    chances: dict[str, GuessChances] = field(default_factory=dict)
    """Metric -> how likely a guess reaches each level of it, see `scoring.measure_chances`."""
    cost: dict[str, float | int | None]
    """Fields that the function `cost` returns."""
    local_losses: tuple[float, float] | None = None
    """Mean loss on the true images before and after local training; None for a single gradient, or
    where nothing is trained."""


def asked_about(
    attack: Attack[AttackState], recorded: Iterable[Observation]
) -> Iterator[Observation]:
    """Yields those of one stack's recordings that `attack` is asked about.

    `recorded` has to be ordered by round, and the order stays. Attacks that join rounds are asked
    once of each watcher and client, at its last recorded update; about sources, once of each
    watcher for all clients. Other attacks are asked about each, and all attacks about each release.
    """

    def watcher(seen: Observation) -> tuple[str, int | None]:
        # A participant is a watcher of its own, and all others see what several clients send.
        together = attack.asked_of_sources and seen.vantage != "client"
        return seen.vantage, None if together else seen.client

    kept = list(recorded)
    last = {watcher(seen): seen.id for seen in kept if seen.payload == "update"}
    for seen in kept:
        # None: no update was recorded there, and each recording is a question of its own.
        if not attack.joins_rounds or last.get(watcher(seen)) in (None, seen.id):
            yield seen


def add_all_sources(truth: Truth, root: Path, path: Path, observation: Observation) -> Truth:
    """Returns a copy of `truth` with the records of all clients that the recording's watcher saw.

    Records are the examples of which source attacks are asked whose they are, see `add_sources`.
    `truth` itself comes back if no candidates were set aside. A FedsimError says that the truth of
    one of those clients is damaged.

    Args:
        truth: That of `observation`.
        root: The run's folder.
        path: The JSON file of `observation`.
        observation: The recording.
    """
    seen = paths_beside(path, observation)
    ids = [f"{each.parents[1].name}/{each.parent.name}/{each.stem}" for each in seen]
    return add_sources(truth, root, ids)


def reconstruction_path(root: Path, label: str, observation_id: str) -> Path:
    """Returns the path of the reconstruction by attack `label`; a FedsimError for an unsafe id."""
    stack, _, rest = checked_id(observation_id).partition("/")
    return root / "reconstructions" / stack / label / f"{rest}.safetensors"


def seed_of(observation: Observation, attack: str) -> int:
    """Returns the seed of the attack of that name on a client's batch.

    It is the same under all defenses and whatever the attack knows: another start alone makes
    decibels.
    """
    training = observation.training
    # No name of a stack is among these, so that all are attacked from the same starting points.
    victim = (observation.round, observation.client, training.batch_size, observation.trial)
    return rng.derive(observation.seed, "attack", attack, *victim)


def hide_defenses(observation: Observation) -> Observation:
    """Returns the observation declared as undefended; tensors stay.

    An altered model and the local training, but for dropout, stay declared.
    """
    # The attacker has the altered model's code and weights.
    spec = observation.spec
    if isinstance(spec, ReleaseSpec):
        spec = replace(spec, sigma=0.0, statistics={})
    return replace(
        observation,
        spec=spec,
        training=replace(observation.training, dropout=0.0),
        effect=Effect(model=observation.effect.model),
        defense=(),
    )


def score_answer(
    job: Job, answer: AttackAnswer, bound: TensorBound | None, setting: Setting, aids: Aids
) -> Result:
    """Scores an attack's answer or failure, writes the reconstruction, and returns the result.

    An answer that cannot be scored or written gives a failed result. A FedsimError says that the
    recording or its truth is missing or damaged.

    Args:
        job: The attack on its observation.
        answer: The answer, or the reason of the failure.
        bound: What theory predicts of the error, for `Result.tensor_bound`.
        setting: What all jobs of the run share.
        aids: `setting.aids`, made once in a process.
    """
    # No attack is loaded here: it could look for the truth, and its package may be missing.
    observation = load_observation(job.observation, setting.device)
    truth = load_truth(setting.root, observation.id, observation.num_clients)
    solution, reason = answer.solution, answer.reason
    found = solution.reconstruction if solution else None
    metrics, per_image = scoring.no_metrics(), {}
    certificate = None
    if found is not None:
        if any(t.of_all_clients and t.answer_of(found) is not None for t in targets().values()):
            truth = add_all_sources(truth, setting.root, job.observation, observation)
        try:
            # The answer is scored before it is written: one that cannot be scored leaves no file.
            scores = scoring.score(found, truth, aids)
            metrics, per_image = scores.metrics(), scores.per_image
            certificate = scoring.certificate(found, truth, scores.assignments)
            path = reconstruction_path(setting.root, job.label, observation.id)
            write_tensors(path, scoring.tensors_to_save(found, truth, scores, aids))
        except Exception as error:  # a third party's attack may answer anything
            reason = reason_of(error)
    losses = truth.local_losses
    request = GuessRequest(
        truth=truth, found=found, granted=setting.granted, observation=observation
    )
    return Result(
        observation=without_tensors(observation),
        seed=seed_of(observation, job.attack),
        status="failed" if reason else "ok",
        reason=reason,
        metrics=metrics,
        per_image=per_image,
        certificate=certificate,
        features_by=found.features_by if found else None,
        stages=found.stages if found else None,
        # The guess needs no answer, so that rows of failed attacks have its scores as well.
        baseline=scoring.score_guess(request, aids),
        chances=scoring.measure_chances(request, aids),
        victims=[
            f"{rng.of_bytes(one.contiguous().numpy().tobytes()):016x}"
            for one in truth.victims().cpu()
        ],
        tensor_bound=bound,
        cost=cost(solution, answer.seconds),
        local_losses=None if losses is None else (float(losses[0]), float(losses[1])),
    )


def cost(solution: Solution | None, seconds: float = 0.0) -> dict[str, float | int | None]:
    """Returns what an attack cost, over all its restarts, as fields of a row.

    They are `seconds`, `iterations`, `iterations_per_second` (None without iterations) and
    `peak_memory_bytes`. The argument `seconds` counts for a failure (None) alone, whose other
    fields are None.
    """
    if solution is None:
        cells = ("iterations", "iterations_per_second", "peak_memory_bytes")
        return {"seconds": seconds, **dict.fromkeys(cells)}
    iterations, seconds = solution.iterations, solution.seconds
    return {
        "seconds": seconds,
        "iterations": iterations,
        "iterations_per_second": iterations / seconds if iterations and seconds else None,
        "peak_memory_bytes": solution.peak_memory_bytes,
    }


def result_without_attack(observation: Observation, status: Status, reason: str) -> Result:
    """Returns a result without an attack: metrics, also of its guess, are None, seconds 0."""
    nothing = scoring.no_metrics()
    return Result(
        observation=observation,
        seed=observation.seed,
        status=status,
        reason=reason,
        metrics=nothing,
        baseline={"name": None, **scoring.NOT_LEARNED, "per_image": {}, **nothing},
        cost=cost(None),
    )


def without_tensors(observation: Observation) -> Observation:
    """Returns the observation with its four mappings of tensors empty, so without a device."""
    return replace(observation, update={}, buffers_update={}, parameters={}, buffers={})
