"""Runs the attack stage: every (observation, attack) is a job. Attackers get no truth."""

from __future__ import annotations

import math
import pickle
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch

from fedsim.attacking.jobs import (
    Job,
    Result,
    Setting,
    add_all_sources,
    hide_defenses,
    result_without_attack,
    score_answer,
    seed_of,
    without_tensors,
)
from fedsim.attacking.knowledge import join_solutions, load_earlier, load_granted, questions
from fedsim.attacking.question import (
    AttackAnswer,
    Public,
    Question,
    Surroundings,
    answer_packed,
    pack_questions,
    reason_of,
    unpack_answers,
)
from fedsim.contracts.attack import AttackFailed, Progress
from fedsim.contracts.target import Aids
from fedsim.models.local import mean_gradient_factor, update_noise
from fedsim.privacy.recovery import TensorBound, tensor_bound, tensor_rate
from fedsim.recording.files import load_observation
from fedsim.recording.truth import IncompleteTruth, load_truth
from fedsim.system import processes, threads
from fedsim.system.interrupts import delay_interrupts
from fedsim.types import Observation, RunFailed


class Workers:
    """Starts the processes of an attack stage at its first jobs; they end with its `with` block.

    They keep `Setting` and public data of the first jobs; only `root` may differ later.
    """

    def __init__(self, count: int) -> None:
        """Prepares `count` >= 1 processes that attack, and one that scores for every full four."""
        self.count = count
        self._running = ExitStack()
        self._attackers: Executor | None = None
        self._scorers: Executor | None = None
        self._news: Queue[tuple[int, Progress]]
        self._aids: Aids

    def __enter__(self) -> Workers:
        """Begins the block, in which `run_jobs` starts the processes."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the processes: by an error at once, else when they have done what they work on."""
        self._running.__exit__(*error)

    def _start(self, setting: Setting, around: Surroundings) -> None:
        if self._attackers is not None:
            return
        pool = processes.pool(self.count, around)
        self._attackers, self._news = self._running.enter_context(pool)
        # Scores take far less time than attacks: beside few attackers, this process makes them.
        if scorers := self.count // _ATTACKERS_OF_A_SCORER:
            self._scorers, _ = self._running.enter_context(processes.pool(scorers, setting))
        else:
            self._aids = setting.aids

    def _attack(self, index: int, questions: bytes) -> Future[bytes]:
        """Sends packed `questions`, with progress under `index`; the future has packed answers."""
        assert self._attackers is not None
        with delay_interrupts():
            return self._attackers.submit(answer_packed, index, questions)

    def _score(
        self, setting: Setting, job: Job, answer: AttackAnswer, bound: TensorBound | None
    ) -> Future[Result]:
        """Scores the answer to a job, here if workers are few, and writes the reconstruction."""
        if self._scorers is None:
            done: Future[Result] = Future()
            done.set_result(score_answer(job, answer, bound, setting, self._aids))
            return done
        # Pickled here, since multiprocessing would send a file per tensor.
        packed = pickle.dumps(answer)
        with delay_interrupts():
            return self._scorers.submit(_score_packed, setting.root, job, packed, bound)

    def _report_news(
        self, jobs: Sequence[Job], on_progress: Callable[[Job, Progress], None]
    ) -> None:
        while True:
            try:
                index, progress = self._news.get_nowait()
            except queue.Empty:
                return
            on_progress(jobs[index], progress)


_ATTACKERS_OF_A_SCORER = 4


def run_jobs(
    jobs: Sequence[Job],
    setting: Setting,
    *,
    workers: Workers,
    on_progress: Callable[[Job, Progress], None],
    on_result: Callable[[Job, Result], None],
) -> None:
    """Runs and scores attacks, writes their reconstructions, and returns when all are done.

    Args:
        jobs: The attacks, each on one observation.
        setting: What they share.
        workers: Processes of the stage, within their block.
        on_progress: Called with a job and its progress now and then, in this process.
        on_result: Called so with each job and its result, in the order in which they end.

    Raises:
        RunFailed: a worker process died.
        FedsimError: a recording, its truth or granted public data are missing or damaged. Truth of
            too few clients is a failed result, and so is an attack's failure.
        PluginError, ValidationError: an attack cannot be made, see `create`.
    """
    if setting.device.startswith("cuda"):
        torch.cuda.empty_cache()  # what this process trained with is the attacks' now
    public = load_granted(setting.root, setting.granted)
    around = Surroundings(
        device=setting.device, threads=setting.threads, public=public, models=setting.models
    )
    pending: dict[Future[Any], Callable[[Any], None]] = {}
    asking = 0

    def take(asked: _AskedJob, number: int, answers: bytes) -> None:
        nonlocal asking
        asking -= 1
        asked.take(number, unpack_answers(answers))
        settle(asked)

    def settle(asked: _AskedJob) -> None:
        # Called after each answer and once all is asked, since either may come last.
        if asked.done:
            scored = workers._score(setting, asked.job, asked.answer(), asked.bound)
            pending[scored] = partial(on_result, asked.job)

    try:
        with threads.fix_within(setting.threads):
            workers._start(setting, around)
            left = _scorable(jobs, setting, public, on_result)
            asked = next(left, None)
            while asked or pending:
                while asked and asking < _AHEAD * workers.count:
                    if questions := asked.next():
                        future = workers._attack(asked.index, questions)
                        pending[future] = partial(take, asked, asked.sent)
                        asking += 1
                    else:
                        settle(asked)
                        asked = next(left, None)
                # The timeout lets news of progress through while no future ends.
                done, _ = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
                workers._report_news(jobs, on_progress)
                for future in done:
                    # `take` follows on answers, `on_result` on scores.
                    pending.pop(future)(future.result())
    except BrokenProcessPool as error:
        raise RunFailed(
            "a worker process of the attack stage died, most likely for want of memory; finished "
            "rows are kept: continue with --resume (resume=True), and with fewer --workers"
        ) from error


_AHEAD = 2
"""Number of loads of questions under way for each worker: the one it answers, and the next."""

_AT_ONCE = 16
"""Maximum number of questions in a load, which holds their observation once."""


def _scorable(
    jobs: Sequence[Job], setting: Setting, public: Public, on_result: Callable[[Job, Result], None]
) -> Iterator[_AskedJob]:
    for index, job in enumerate(jobs):
        try:
            yield _AskedJob(index, job, setting, public)
        except IncompleteTruth as error:
            seen = without_tensors(load_observation(job.observation))
            on_result(job, result_without_attack(seen, "failed", str(error)))


class _AskedJob:
    """Keeps track of a job whose questions are being asked and answered."""

    def __init__(self, index: int, job: Job, setting: Setting, public: Public) -> None:
        self.index, self.job = index, job
        observation = load_observation(job.observation)
        truth = load_truth(setting.root, observation.id, observation.num_clients)
        attack = job.plugin
        if attack.asked_of_sources:
            truth = add_all_sources(truth, setting.root, job.observation, observation)
        # Theory speaks of what was released, also to an attack that is not told of the defenses.
        self.bound = _observed_bound(observation) if attack.follows_tensor_rate else None
        seen = load_earlier(attack, job.observation, observation)
        if job.blind:
            observation = hide_defenses(observation)
            seen = tuple(map(hide_defenses, seen))
        self._left = questions(
            attack,
            observation,
            truth,
            setting.granted,
            seed_of(observation, job.attack),
            public=public,
            restarts=job.restarts,
            seen=seen,
        )
        self._answers: dict[int, list[AttackAnswer]] = {}
        self._reason: str | None = None
        self._failed, self._asking = False, True
        self.sent = 0

    def next(self) -> bytes | None:
        """Returns the next packed questions; None if none are left, or if the job has failed."""
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
        return pack_questions(questions)

    def take(self, number: int, answers: list[AttackAnswer]) -> None:
        self._answers[number] = answers
        self._failed |= answers[-1].solution is None

    @property
    def done(self) -> bool:
        return not self._asking and len(self._answers) == self.sent

    def answer(self) -> AttackAnswer:
        """Returns all answers as one; the first failure is that of the whole job."""
        # Loads come back in any order; rows of a table are joined in the order of the questions.
        answers = [one for number in sorted(self._answers) for one in self._answers[number]]
        solution, reason = None, self._reason
        for one in answers:
            reason = reason or one.reason
        if reason is None:
            try:
                solution = join_solutions([one.solution for one in answers if one.solution])
            except AttackFailed as error:
                reason = str(error)
        seconds = math.fsum(one.seconds for one in answers)
        return AttackAnswer(solution=solution, reason=reason, seconds=seconds)


def _score_packed(root: Path, job: Job, packed: bytes, bound: TensorBound | None) -> Result:
    setting, aids = _shared_setting()
    answer: AttackAnswer = pickle.loads(packed)  # noqa: S301 - the parent wrote it
    return score_answer(job, answer, bound, replace(setting, root=root), aids)


@cache
def _shared_setting() -> tuple[Setting, Aids]:
    # `setting.aids` takes long to make: each worker makes it once.
    setting: Setting = processes.get_shared()
    threads.fix(setting.threads)
    return setting, setting.aids


def _observed_rate(observation: Observation) -> float | None:
    head = observation.model.parameters.get("head")
    seen = observation.update.get("head.output.weight")
    variance = update_noise(observation)
    effect = observation.effect
    if not head or seen is None or variance is None or not observation.training.sums_gradients:
        return None
    if not replace(effect, noise=(), drawn=False).exact:
        return None
    images, training = observation.num_images, observation.training
    factor = mean_gradient_factor(training)
    variance *= factor**2
    # E[(signal + noise)²] = signal² + variance: the noise is independent of the signal.
    energy = factor**2 * float(seen.double().square().mean()) - variance
    # By chance the noise may be larger than all that was observed.
    part = math.sqrt(max(energy, 0.0) / images)
    if variance and not part:
        return None
    return tensor_rate(
        width=head.get("planted") or head["width"],
        dimension=observation.parameters["head.hidden.weight"].shape[1],
        images=images,
        classes=observation.model.num_classes,
        noise=math.sqrt(variance) / part if variance else 0.0,
        kept=1 - training.dropout,
    )


def _observed_bound(observation: Observation) -> TensorBound:
    head, effect = observation.model.parameters.get("head"), observation.effect
    if not head or "head.output.weight" not in observation.update:
        return TensorBound(reason="the model has no two-layer head")
    if effect.removed:
        return TensorBound(
            reason="entries that are kept depend on the weights, so that Stein's lemma does not "
            "apply (section 3.6)"
        )
    rate, training = _observed_rate(observation), observation.training
    if rate is None:
        return TensorBound(
            reason="entries are rounded, mixed or an optimizer's steps, or noise is unknown or all "
            "there is"
        )
    planted = head.get("planted") or 0
    found = tensor_bound(
        rate,
        width=max(1, math.floor((1 - training.dropout) * (planted or head["width"]))),
        dimension=observation.parameters["head.hidden.weight"].shape[1],
        images=observation.num_images,
        classes=observation.model.num_classes,
        activation=head.get("activation", "relu"),
        steps=1 if training.algorithm == "fedsgd" else training.steps,
    )
    # Assumption A.1 is of weights N(0, I) and of unit features.
    assumed = {
        "the weights of the head are not planted, and so not normal": not planted,
        "features are not brought to unit length": not head.get("unit_features", False),
    }
    broken = next((why for why, is_so in assumed.items() if is_so), None)
    return replace(found, reason=broken or found.reason)
