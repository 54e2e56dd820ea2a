"""The attack stage: every (observation, attack) is a job, and jobs run in worker processes.

A job reads a recording and its truth from disk, attacks, scores and writes its reconstruction, so
workers share nothing, and a job's result depends neither on which worker ran it nor on when.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.queues import Queue
from pathlib import Path

import torch
from torch import Tensor

from fedsim import rng, scoring
from fedsim.attacking.knowledge import Public
from fedsim.attacking.public_features import MOST, public_features
from fedsim.attacking.targets import question
from fedsim.attacking.theory import observed_rate
from fedsim.contracts.attack import Progress, Solution, create
from fedsim.contracts.grant import Grant
from fedsim.recording.files import (
    checked_id,
    load_observation,
    write_tensors,
)
from fedsim.recording.truth import load_truth
from fedsim.system import processes, threads
from fedsim.system.interrupts import held
from fedsim.types import (
    FedsimError,
    GroundTruth,
    Observation,
    Reconstruction,
    RowTruth,
    RunFailed,
    Truth,
)

OnProgress = Callable[[Progress], None]

_NOT_LEARNED = {"public": None, "public_per_image": None}
"""Of a baseline that no public image has a part in."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all jobs of a run share."""

    root: Path
    """The run's folder."""
    device: str
    granted: Grant
    guesser: scoring.Guesser | None
    """Of batches of images; None where the data are rows, which are guessed from the others."""
    lpips_backbone: scoring.Backbone
    lpips_weights: str | None
    threads: int
    """That a job computes on, wherever it runs."""


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
    """Why it failed; None if it did not."""
    metrics: dict[str, float | None]
    per_image: dict[str, list[float]]
    """Metric -> its value for each true image, in the order of the truth."""
    baseline: dict[str, float | str | None]
    """Metrics of the zero-information guess, its `name`, and how many images it was learned from
    (`public`, and `public_per_image` that it guesses)."""
    victims: list[str] | None
    """A digest of each true image, or row that took part, in the order of the truth; the same for
    the same content. None of an update that was never recorded."""
    tensor_rate: float | None
    """What theory predicts of the attack's error, up to a constant; None if it says nothing."""
    cost: dict[str, float | int | None]
    local_losses: tuple[float, float] | None
    """Mean loss on the images of the truth before local training and after it; None of a single
    gradient, and of rows."""


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
    """Run `jobs` on `workers` processes (in this process if 1), telling of each as it goes on.

    Raises:
        RunFailed: a worker died (most likely for want of memory). What had finished was told.
    """
    if workers == 1:
        with threads.fixed(setting.threads):
            lpips = _lpips(setting)
            for job in jobs:
                on_result(job, run_job(job, setting, lpips, _teller(job, on_progress)))
        return
    try:
        with processes.pool(workers, setting) as (pool, news):
            with held():
                pending: dict[Future[Result], Job] = {
                    pool.submit(_work, index, job): job for index, job in enumerate(jobs)
                }
            while pending:
                done, _ = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
                _drain(news, jobs, on_progress)
                for future in done:
                    on_result(pending.pop(future), future.result())
    except BrokenProcessPool as error:
        raise RunFailed(
            "a worker process of the attack stage died, for want of memory or because a "
            'script calls fedsim.run outside `if __name__ == "__main__":`; finished rows are '
            "kept: continue with --resume (resume=True), and with fewer --workers"
        ) from error


def seed_of(observation: Observation, label: str) -> int:
    """The seed of the attack called `label`: a function of the victim, not of the defense.

    So stacks are compared like for like, from the same starting points.
    """
    training = observation.training
    victim = (observation.round, observation.client, training.batch_size, observation.trial)
    return rng.derive(observation.seed, "attack", label, *victim)


def run_job(
    job: Job,
    setting: Setting,
    lpips: scoring.LpipsMetric | scoring.Unavailable,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Attack one observation and score what was recovered. A failure is a value."""
    observation = load_observation(job.observation, setting.device)
    truth = load_truth(setting.root, observation.id, observation.num_clients)
    seed = seed_of(observation, job.label)
    started = time.perf_counter()
    solution: Solution | None = None
    found: Reconstruction | None = None
    metrics: dict[str, float | None] = dict.fromkeys(scoring.METRICS)
    per_image: dict[str, list[float]] = {}
    reason = None
    attack = create(job.attack, job.parameters)
    rate = observed_rate(observation) if attack.follows_tensor_rate else None
    try:
        solution = question(
            attack,
            observation,
            truth,
            setting.granted,
            seed,
            public=Public.of(setting.root, setting.granted),
            restarts=job.restarts,
            progress=progress,
        )
        found = on_cpu(solution.reconstruction)
        scores = _score(found, truth, setting, lpips)
        metrics, per_image = scores.metrics(), scores.per_image
        path = reconstruction_path(setting.root, job.label, observation.id)
        _save(path, found, truth, scores.assignment, setting.guesser)
    except FedsimError as error:
        reason = str(error)
    except Exception as error:  # a third party's attack may raise anything: the row says what
        reason = f"{type(error).__name__}: {error}"
    return Result(
        observation=_without_tensors(observation),
        seed=seed,
        reason=reason,
        metrics=metrics,
        per_image=per_image,
        baseline=_baseline(observation, truth, found, setting, lpips),
        victims=_victims(truth),
        tensor_rate=rate,
        cost=cost(solution) if solution else _failed_cost(time.perf_counter() - started),
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


def on_cpu(found: Reconstruction) -> Reconstruction:
    """The same reconstruction in CPU memory, images and features as float32."""
    return replace(
        found,
        images=None if found.images is None else found.images.detach().float().cpu(),
        labels=None if found.labels is None else found.labels.cpu(),
        features=None if found.features is None else found.features.detach().float().cpu(),
        rows=None if found.rows is None else found.rows.detach().cpu(),
        membership=None if found.membership is None else found.membership.detach().cpu(),
    )


def _local_losses(truth: Truth) -> tuple[float, float] | None:
    if isinstance(truth, RowTruth) or truth.local_losses is None:
        return None
    before, after = truth.local_losses.tolist()
    return before, after


def _baseline(
    observation: Observation,
    truth: Truth,
    found: Reconstruction | None,
    setting: Setting,
    lpips: scoring.LpipsMetric | scoring.Unavailable,
) -> dict[str, float | str | None]:
    """The guess of someone who is granted what the attack is, matched as `found` is.

    Of features too, where `found` has them, or may have had: where there is nothing.
    """
    if isinstance(truth, RowTruth):
        return {"name": "mean_of_others", **_NOT_LEARNED, **scoring.row_baseline(truth)}
    assert setting.guesser is not None
    known = truth.labels.tolist() if setting.granted.labels == "known" else None
    guess = setting.guesser(len(truth.labels), known)
    alone = found is not None and found.images is None and found.features is None
    name = "labels" if alone else guess.name
    return {
        "name": name,
        "public": guess.public,
        "public_per_image": guess.public_per_image,
        **scoring.baseline(guess, truth, labels_alone=alone, lpips=lpips),
        **_of_features(observation, truth, found, setting),
    }


def _of_features(
    observation: Observation, truth: GroundTruth, found: Reconstruction | None, setting: Setting
) -> dict[str, float]:
    assert setting.guesser is not None
    if truth.features is None or (found is not None and found.features is None):
        return {}
    public = public_features(observation, setting.guesser.public(MOST))
    return {} if public is None else scoring.feature_baseline(public, truth.features)


def _victims(truth: Truth) -> list[str]:
    targets = truth.rows[truth.members] if isinstance(truth, RowTruth) else truth.images
    return [f"{rng.of_bytes(each.contiguous().numpy().tobytes()):016x}" for each in targets.cpu()]


def _score(
    found: Reconstruction,
    truth: Truth,
    setting: Setting,
    lpips: scoring.LpipsMetric | scoring.Unavailable,
) -> scoring.Scores:
    if isinstance(truth, RowTruth):
        return scoring.score_rows(found, truth)
    assert setting.guesser is not None
    return scoring.score(found, truth, lpips=lpips, guess=setting.guesser.mean)


def _save(
    path: Path,
    found: Reconstruction,
    truth: Truth,
    assignment: list[int],
    guesser: scoring.Guesser | None,
) -> None:
    """Write the truth and, in the order of the truth, exactly what was scored against it."""
    if isinstance(truth, RowTruth):
        _save_rows(path, found, truth)
        return
    assert guesser is not None
    tensors = {"truth": truth.images, "truth_labels": truth.labels}
    if found.images is not None:
        tensors["reconstruction"] = scoring.matched_images(found.images, assignment, guesser.mean)
    if found.labels is not None:
        # With images or features, a label belongs to the one that it came with.
        none = found.labels.new_tensor(scoring.MISSING)
        tensors["labels"] = (
            scoring.align(found.labels, assignment, none) if assignment else found.labels
        )
    if found.features is not None and truth.features is not None:
        nothing = torch.zeros_like(truth.features[0])
        tensors["features"] = scoring.align(found.features, assignment, nothing)
        tensors["truth_features"] = truth.features
    write_tensors(path, tensors)


def _save_rows(path: Path, found: Reconstruction, truth: RowTruth) -> None:
    tensors: dict[str, Tensor] = {"members": truth.members, "scored": truth.scored}
    tensors["classes"] = torch.tensor(truth.classes)
    if found.rows is not None:
        tensors |= {"truth_rows": truth.rows[truth.members], "rows": found.rows}
    if found.membership is not None:
        tensors["membership"] = found.membership
    write_tensors(path, tensors)


def nothing_recorded(observation: Observation, reason: str) -> Result:
    """The result of every attack on an update that never reached the server."""
    nothing: dict[str, float | None] = dict.fromkeys(scoring.METRICS)
    return Result(
        observation=observation,
        seed=observation.seed,
        reason=reason,
        metrics=nothing,
        per_image={},
        baseline={"name": None, **_NOT_LEARNED, **nothing},
        victims=None,
        tensor_rate=None,
        cost=_failed_cost(0.0),
        local_losses=None,
    )


def _failed_cost(seconds: float) -> dict[str, float | int | None]:
    cells = ("iterations", "iterations_per_second", "peak_memory_bytes")
    return {"seconds": seconds, **dict.fromkeys(cells)}


def _without_tensors(observation: Observation) -> Observation:
    return replace(observation, update={}, buffers_update={}, parameters={}, buffers={})


def _lpips(setting: Setting) -> scoring.LpipsMetric | scoring.Unavailable:
    if setting.guesser is None:
        return scoring.Unavailable("the data are no images")
    return scoring.load_lpips(setting.lpips_backbone, setting.lpips_weights)


def _teller(job: Job, on_progress: Callable[[Job, Progress], None]) -> Callable[[Progress], None]:
    return lambda progress: on_progress(job, progress)


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


def _work(index: int, job: Job) -> Result:
    """In a worker: run the job that the parent knows by `index`."""
    setting, lpips = _prepared()

    def progress(at: Progress) -> None:
        processes.tell((index, at))

    return run_job(job, setting, lpips, progress)


@cache
def _prepared() -> tuple[Setting, scoring.LpipsMetric | scoring.Unavailable]:
    """In a worker, before its first job."""
    setting: Setting = processes.shared()
    threads.fix(setting.threads)
    return setting, _lpips(setting)
