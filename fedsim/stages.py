"""Stages of every run once its folder has recordings: attack and score them, then report."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.attacking.jobs import Job, Result, Setting
from fedsim.attacking.running import Workers, run_jobs
from fedsim.contracts.attack import Progress
from fedsim.progress import Display
from fedsim.recording import files
from fedsim.report import save_grids, save_overview
from fedsim.results import controls, record, rows
from fedsim.results.lines import ResultRow
from fedsim.results.record import Row

Finished = Callable[[Job, Result], None]


def writer_of(path: Path, row: Callable[[Job, Result], ResultRow], display: Display) -> Finished:
    """Returns a callback that appends `row(job, result)` to JSONL `path` and advances `display`."""

    def on_result(job: Job, result: Result) -> None:
        # On the disk before the display says that it is done: a kill loses no finished attack.
        record.append_line(path, row(job, result).dump())
        display.advance(_summary(job, result))

    return on_result


def attack(
    jobs: Sequence[Job],
    setting: Setting,
    on_result: Finished,
    display: Display,
    *,
    workers: Workers,
) -> None:
    """Runs and scores every attack; reconstructions are written to the run's folder.

    Args:
        jobs: The attacks, each on one observation.
        setting: What the jobs share, such as the run's folder and the device.
        on_result: Called with each job and its result, in the order in which they end.
        display: Shows the loss of the attacks that are at work; `on_result` has to advance it.
        workers: Processes of the stage, inside their `with` block.

    Raises:
        RunFailed: a worker process died.
        FedsimError: a recording, its truth or the granted images are missing or damaged, or an
            attack cannot be made.
    """

    def on_progress(job: Job, at: Progress) -> None:
        of = f"/{at.total}" if at.total else ""
        display.detail(job.title, f"{job.title} {at.iteration}{of} loss {at.loss:.2e}")

    run_jobs(jobs, setting, workers=workers, on_progress=on_progress, on_result=on_result)


def finish(
    folder: Path,
    facts: Mapping[str, Any],
    order: Callable[[Row], Any],
    *,
    attack_public: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> None:
    """Sorts results.jsonl of a run and adds its controls, draws pictures, writes record.json.

    Args:
        folder: The run's folder.
        facts: Fields of record.json, to which the environment and the peak memory are added.
        order: Sort key of a row.
        attack_public: Called with all rows before their controls are computed. It may attack
            updates of public images, the control of rows without another client's update. By
            default it does nothing.

    Raises:
        FedsimError: results.jsonl or a reconstruction is damaged.
    """
    path = folder / "results.jsonl"
    # A resumed run may have written a row twice: the last one of a key counts.
    latest = {rows.key(row): row for row in record.read_lines(path)}
    found = sorted(latest.values(), key=order)
    # Before the controls, which are scored from what these attacks write.
    attack_public(found)
    controls.add_controls(found, folder)
    record.write_lines(path, found)
    save_grids(folder)
    save_overview(folder)
    files.write_json(
        folder / "record.json",
        {**facts, "environment": record.environment(), "peak_memory_bytes": _peak_memory()},
    )


def _summary(job: Job, result: Result) -> str:
    psnr, guess = result.metrics["psnr"], result.baseline["psnr"]
    if result.reason:
        return f"{job.title}: {result.status}"
    if (auc := result.metrics["membership_auc"]) is not None:
        return f"{job.title}: AUC {auc:.2f} of membership (guess 0.50)"
    if psnr is None or guess is None:
        return job.title
    return f"{job.title}: {psnr:.1f} dB (guess {guess:.1f})"


def _peak_memory() -> int:
    """Returns the largest resident set of this process or of one ended worker, in bytes."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    # Linux counts in KiB. Of children it has the largest one, and not their sum.
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) * 1024
