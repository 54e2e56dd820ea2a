"""The attack stage: every (observation, attack) is a job.

This process reads a recording and its truth, and takes out of the truth what is granted. Workers
that attack are handed questions (`question`) and nothing else; others score the answers and write
the reconstructions. A job's result depends neither on which worker ran it nor on when.
"""

from __future__ import annotations

import math
import pickle
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch

from fedsim import rng, scoring
from fedsim.attacking.knowledge import Public
from fedsim.attacking.question import (
    Answer,
    Question,
    Surroundings,
    answered,
    opened,
    reason_of,
    sealed,
)
from fedsim.attacking.targets import questions, together
from fedsim.attacking.theory import observed_rate
from fedsim.contracts.attack import AttackFailed, Progress, Solution, create
from fedsim.contracts.grant import Grant
from fedsim.contracts.target import Aids, GuessRequest, Resources
from fedsim.models.base import Classifier
from fedsim.recording.files import (
    checked_id,
    load_observation,
    write_tensors,
)
from fedsim.recording.truth import IncompleteTruth, load_truth
from fedsim.system import processes, threads
from fedsim.system.interrupts import delay_interrupts
from fedsim.types import Observation, RunFailed, Truth

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all jobs of a run share."""

    root: Path
    """The run's folder."""
    device: str
    granted: Grant
    guesser: scoring.Guesser | scoring.RowGuesser | None
    """Of batches of images; None where the data are rows, which are guessed from the others."""
    lpips_backbone: scoring.Backbone
    lpips_weights: str | None
    threads: int
    """That a job computes on, wherever it runs."""
    models: Mapping[str, Classifier] = field(default_factory=dict)
    """Those that no plugin builds, by the names that observations have for them."""

    @property
    def aids(self) -> Aids:
        """What each target needs for its scores; takes long to make."""
        return scoring.prepare(
            Resources(
                guesser=self.guesser,
                lpips_backbone=self.lpips_backbone,
                lpips_weights=self.lpips_weights,
            )
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attack on one observation."""

    observation: Path
    """Its JSON file."""
    attack: str
    label: str
    parameters: dict[str, object]
    restarts: int

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.label} on {self.observation.parent.parent.name}/{self.observation.stem}"

    @property
    def brought(self) -> list[str]:
        """What the attack has that no grant names."""
        return list(create(self.attack, self.parameters).brings())

    @property
    def ignores_update(self) -> bool:
        """Whether the attack is a control that never looks at the update."""
        return create(self.attack, self.parameters).ignores_update

    @property
    def key(self) -> tuple[str, str, str]:
        """(stack, attack label, observation id): what identifies the job's row in a run."""
        round, stack = self.observation.parent, self.observation.parent.parent.name
        return stack, self.label, f"{stack}/{round.name}/{self.observation.stem}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a job leaves: the parts of its row that it knows."""

    observation: Observation
    """Without its tensors."""
    seed: int
    reason: str | None
    """Why it failed, or was not scored; None if it was."""
    metrics: dict[str, float | None]
    per_image: dict[str, list[float]]
    """Metric -> its value for each true image, in the order of the truth."""
    certificate: scoring.Certificate | None = None
    """What the attack says that it knows of its answer; None if it says nothing."""
    features_by: str | None = None
    """Which other attack it asked for its features; None if none."""
    stages: int | None = None
    """Number of stages that it cut the body into; None if it cuts none."""
    baseline: dict[str, Any]
    """Metrics of the zero-information guess, its `name`, how many images it was learned from
    (`public`, and `public_per_image` that it guesses), and PSNR `per_image`."""
    victims: list[str] | None
    """A digest of each true image, or row that took part, in the order of the truth; the same for
    the same content. None of an update that was never recorded."""
    tensor_rate: float | None
    """What theory predicts of the attack's error, up to a constant; None if it says nothing."""
    cost: dict[str, float | int | None]
    unscored: bool = False
    """Whether the truth is elsewhere, so that nobody has attacked yet."""
    unseen: bool = False
    """Whether the vantage shows no update, so that there is nothing to attack."""
    local_losses: tuple[float, float] | None
    """Mean loss on the images of the truth before local training and after it; None of a single
    gradient, and of rows."""

    @property
    def status(self) -> str:
        """What the row says came of it."""
        if self.unscored:
            return "unscored"
        if self.unseen:
            return "unseen"
        return "failed" if self.reason else "ok"


def reconstruction_path(root: Path, label: str, observation_id: str) -> Path:
    """Where the reconstruction of an observation by the attack called `label` is written."""
    stack, _, rest = checked_id(observation_id).partition("/")
    return root / "reconstructions" / stack / label / f"{rest}.safetensors"


def run_jobs(
    jobs: Sequence[Job],
    setting: Setting,
    *,
    workers: int,
    on_progress: Callable[[Job, Progress], None],
    on_result: Callable[[Job, Result], None],
) -> None:
    """Run `jobs`, attacking in `workers` processes, telling of each as it goes on.

    As many others score, or this process if there is one worker.

    Raises:
        RunFailed: a worker died (most likely for want of memory). What had finished was told.
    """
    if setting.device.startswith("cuda"):
        torch.cuda.empty_cache()  # what this process trained with is the attacks' now
    public = Public.of(setting.root, setting.granted)
    around = Surroundings(
        device=setting.device,
        threads=setting.threads,
        public_images=public.images,
        models=setting.models,
    )
    pending: dict[Future[Any], Callable[[Any], None]] = {}
    asking = 0

    def take(asked: _Asked, number: int, answers: bytes) -> None:
        nonlocal asking
        asking -= 1
        asked.take(number, opened(answers))
        settle(asked)

    def settle(asked: _Asked) -> None:
        if asked.done:
            pending[score(asked.job, asked.outcome())] = partial(on_result, asked.job)

    try:
        with ExitStack() as running:
            running.enter_context(threads.fix_within(setting.threads))
            attackers, news = running.enter_context(processes.pool(workers, around))
            score: Callable[[Job, Outcome], Future[Result]]
            if workers > 1:
                scorers, _ = running.enter_context(processes.pool(workers, setting))
                score = partial(_in_worker, scorers)
            else:
                score = partial(_at_once, setting, setting.aids)
            left = _all_asked(jobs, setting, public, on_result)
            asked = next(left, None)
            while asked or pending:
                while asked and asking < _AHEAD * workers:
                    if questions := asked.next():
                        with delay_interrupts():
                            future = attackers.submit(answered, asked.index, questions)
                        pending[future] = partial(take, asked, asked.sent)
                        asking += 1
                    else:
                        settle(asked)
                        asked = next(left, None)
                done, _ = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
                _drain(news, jobs, on_progress)
                for future in done:
                    pending.pop(future)(future.result())
    except BrokenProcessPool as error:
        raise RunFailed(
            "a worker process of the attack stage died, most likely for want of memory; finished "
            "rows are kept: continue with --resume (resume=True), and with fewer --workers"
        ) from error


_AHEAD = 2
"""Loads of questions for each worker that attacks: one that it is at, and the next."""

_AT_ONCE = 16
"""Questions about one observation that are sent in one load, which holds it once."""


def _all_asked(
    jobs: Sequence[Job],
    setting: Setting,
    public: Public,
    on_result: Callable[[Job, Result], None],
) -> Iterator[_Asked]:
    """One job after the other, but for those that nobody could score, of which it is told."""
    for index, job in enumerate(jobs):
        try:
            yield _Asked(index, job, setting, public)
        except IncompleteTruth as error:
            seen = _without_tensors(load_observation(job.observation))
            on_result(job, nothing_recorded(seen, str(error)))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a job's attack."""

    answer: Answer
    tensor_rate: float | None


class _Asked:
    """A job whose questions are being asked and answered."""

    def __init__(self, index: int, job: Job, setting: Setting, public: Public) -> None:
        """Load what it is about.

        Raises:
            IncompleteTruth: nobody could score it.
        """
        self.index, self.job = index, job
        observation = load_observation(job.observation)
        truth = load_truth(setting.root, observation.id, observation.num_clients)
        attack = create(job.attack, job.parameters)
        self._rate = observed_rate(observation) if attack.follows_tensor_rate else None
        self._left = questions(
            attack,
            observation,
            truth,
            setting.granted,
            seed_of(observation, job.label),
            public=public,
            restarts=job.restarts,
        )
        self._answers: dict[int, list[Answer]] = {}
        self._reason: str | None = None
        self._failed, self._asking = False, True
        self.sent = 0
        """How often questions were sent so far."""

    def next(self) -> bytes | None:
        """The next questions; None if there are none, or one has failed."""
        questions: list[Question] = []
        try:
            if not self._failed:
                questions = list(islice(self._left, _AT_ONCE))
        except Exception as error:  # what a recording holds, an attack may not be able to read
            self._reason = reason_of(error)
        if not questions:
            self._asking = False
            return None
        self.sent += 1
        return sealed(questions)

    def take(self, number: int, answers: list[Answer]) -> None:
        """Note the answers to what was sent as `number`."""
        self._answers[number] = answers
        self._failed |= answers[-1].solution is None

    @property
    def done(self) -> bool:
        """Whether there is nothing more to ask or to be answered."""
        return not self._asking and len(self._answers) == self.sent

    def outcome(self) -> Outcome:
        """All answers as one; the first failure is that of the whole."""
        answers = [one for number in sorted(self._answers) for one in self._answers[number]]
        solution, reason = None, self._reason
        for answer in answers:
            reason = reason or answer.reason
        if reason is None:
            try:
                solutions = [one.solution for one in answers if one.solution]
                solution = together(solutions)
            except AttackFailed as error:
                reason = str(error)
        seconds = math.fsum(answer.seconds for answer in answers)
        answer = Answer(solution=solution, reason=reason, seconds=seconds)
        return Outcome(answer=answer, tensor_rate=self._rate)


def seed_of(observation: Observation, label: str) -> int:
    """The seed of the attack called `label`: a function of the victim, not of the defense.

    So stacks are compared like for like, from the same starting points.
    """
    training = observation.training
    victim = (observation.round, observation.client, training.batch_size, observation.trial)
    return rng.derive(observation.seed, "attack", label, *victim)


def finish(job: Job, outcome: Outcome, setting: Setting, aids: Aids) -> Result:
    """Score what was recovered and write it. A failure is a value, and what it cost is kept."""
    observation = load_observation(job.observation, setting.device)
    truth = load_truth(setting.root, observation.id, observation.num_clients)
    solution, reason = outcome.answer.solution, outcome.answer.reason
    found = solution.reconstruction if solution else None
    metrics, per_image = scoring.no_metrics(), {}
    certificate = None
    if found is not None:
        try:
            scores = scoring.score(found, truth, aids)
            metrics, per_image = scores.metrics(), scores.per_image
            certificate = scoring.certificate(found, truth, scores.assignments)
            path = reconstruction_path(setting.root, job.label, observation.id)
            write_tensors(path, scoring.tensors_to_save(found, truth, scores, aids))
        except Exception as error:  # a third party's attack may answer anything
            reason = reason_of(error)
    return Result(
        observation=_without_tensors(observation),
        seed=seed_of(observation, job.label),
        reason=reason,
        metrics=metrics,
        per_image=per_image,
        certificate=certificate,
        features_by=found.features_by if found else None,
        stages=found.stages if found else None,
        baseline=scoring.baseline(
            GuessRequest(
                truth=truth, found=found, granted=setting.granted, observation=observation
            ),
            aids,
        ),
        victims=_victims(truth),
        tensor_rate=outcome.tensor_rate,
        cost=cost(solution) if solution else _failed_cost(outcome.answer.seconds),
        local_losses=_local_losses(truth),
    )


def cost(solution: Solution) -> dict[str, float | int | None]:
    """What an attack cost, over all its restarts."""
    iterations, seconds = solution.iterations, solution.seconds
    return {
        "seconds": seconds,
        "iterations": iterations,
        "iterations_per_second": iterations / seconds if iterations and seconds else None,
        "peak_memory_bytes": solution.peak_memory_bytes,
    }


def _local_losses(truth: Truth) -> tuple[float, float] | None:
    if truth.local_losses is None:
        return None
    before, after = truth.local_losses.tolist()
    return before, after


def _victims(truth: Truth) -> list[str]:
    each = truth.victims().cpu()
    return [f"{rng.of_bytes(one.contiguous().numpy().tobytes()):016x}" for one in each]


def nothing_recorded(observation: Observation, reason: str) -> Result:
    """The result of every attack on an update that never reached the server."""
    nothing = scoring.no_metrics()
    return Result(
        observation=observation,
        seed=observation.seed,
        reason=reason,
        metrics=nothing,
        per_image={},
        baseline={"name": None, **scoring.NOT_LEARNED, "per_image": {}, **nothing},
        victims=None,
        tensor_rate=None,
        cost=_failed_cost(0.0),
        local_losses=None,
    )


def unscored(observation: Observation) -> Result:
    """The result of every attack on a recording whose truth is where the clients are."""
    reason = "the truth is with the clients: join it with fedsim collect"
    return replace(nothing_recorded(observation, reason), unscored=True)


def unseen(observation: Observation) -> Result:
    """The result of every attack of an eavesdropper on an encrypted wire: nothing to attack.

    It is no guess either: nothing is scored.
    """
    reason = "the wire is encrypted (federation.tls): it shows sizes and times, and no update"
    return replace(nothing_recorded(observation, reason), unseen=True)


def _failed_cost(seconds: float) -> dict[str, float | int | None]:
    cells = ("iterations", "iterations_per_second", "peak_memory_bytes")
    return {"seconds": seconds, **dict.fromkeys(cells)}


def _without_tensors(observation: Observation) -> Observation:
    return replace(observation, update={}, buffers_update={}, parameters={}, buffers={})


def _drain(
    news: Queue[tuple[int, Progress]],
    jobs: Sequence[Job],
    on_progress: Callable[[Job, Progress], None],
) -> None:
    while True:
        try:
            index, progress = news.get_nowait()
        except queue.Empty:
            return
        on_progress(jobs[index], progress)


def _at_once(
    setting: Setting,
    aids: Aids,
    job: Job,
    outcome: Outcome,
) -> Future[Result]:
    """Score in this process."""
    done: Future[Result] = Future()
    done.set_result(finish(job, outcome, setting, aids))
    return done


def _in_worker(scorers: Executor, job: Job, outcome: Outcome) -> Future[Result]:
    """Score in a worker. Pickled here, since multiprocessing would send a file per tensor."""
    with delay_interrupts():
        return scorers.submit(_score_job, job, pickle.dumps(outcome))


def _score_job(job: Job, outcome: bytes) -> Result:
    """In a worker that scores."""
    setting, aids = _prepared()
    return finish(job, pickle.loads(outcome), setting, aids)  # noqa: S301 - the parent wrote it


@cache
def _prepared() -> tuple[Setting, Aids]:
    """In a worker that scores, before its first job."""
    setting: Setting = processes.get_shared()
    threads.fix(setting.threads)
    return setting, setting.aids
