"""The pipeline, top to bottom: scenario, federation, attacks, scores, record, report."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedsim import jobs, progress, record, recording, rows, scoring
from fedsim.attack import create, solve
from fedsim.jobs import Job, Result, Setting
from fedsim.knowledge import grant
from fedsim.privacy.ledger import claim
from fedsim.record import Row, Run
from fedsim.scenario import Scenario, dump, expand
from fedsim.types import BatchNormKnowledge, FedsimError, Labels, Observation, Reconstruction
from fedsim.workload import Workload, as_pixels, load_dataset, resolve_device


def run(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    workers: int | None = None,
    quiet: bool = True,
) -> Run:
    """Run a scenario: train the federations, record, attack, score, report.

    Args:
        scenario: A file, the same as plain values, or a `Scenario`.
        out: The folder to fill; default `runs/<name>`. A sweep gives each variant a folder in it.
        overrides: `a.b=value` assignments, as with `--set`.
        resume: Continue what an interrupted run of the same scenario left in `out`.
        workers: Processes of the attack stage; default: one per core (one on a GPU).
        quiet: Show no progress.

    Raises:
        FedsimError: the scenario is refused (before any work), or the run could not go on.
    """
    variants = expand(scenario, overrides)
    root = Path(out) if out else Path("runs") / variants[0].scenario.name
    folders = [root / variant.label if variant.label else root for variant in variants]
    plans = [
        _Plan(variant.scenario, variant.assignment, folder, resume, workers)
        for variant, folder in zip(variants, folders, strict=True)
    ]
    if quiet:
        for plan in plans:
            plan.execute(progress.Quiet())
    else:
        with progress.Live(Console(stderr=True)) as display:
            for plan in plans:
                plan.execute(display)
    from fedsim.report import write_report

    write_report(root)
    return Run(root)


def attack(
    observation: Observation | str | Path,
    name: str,
    parameters: Mapping[str, object] | None = None,
    *,
    restarts: int = 1,
    labels: Labels = "inferred",
    bn: BatchNormKnowledge = "none",
    seed: int | None = None,
    device: str = "cpu",
    truth: str | Path | None = None,
    on_progress: jobs.OnProgress | None = None,
) -> tuple[Reconstruction, Row]:
    """Attack one recording; needs neither Flower nor the data it was made from.

    Args:
        observation: A recording, or the path of its JSON file.
        name: The attack, with `parameters` (others at their defaults).
        truth: The run's folder (or any folder that holds `truth/`). It is found by itself beside
            the recording's `observations/`; without it nothing is scored and no label is granted.

    Returns:
        The reconstruction, and a row with what is known: metrics (null without truth) and cost.

    Raises:
        FedsimError: the recording or the attack cannot be used.
    """
    if not isinstance(observation, Observation):
        path = Path(observation)
        observation = recording.load_observation(path, resolve_device(device))
        truth = truth or recording.root_of(path)
    victim = recording.find_truth(Path(truth), observation.id) if truth else None
    if victim is None and (labels == "known" or bn == "exact"):
        raise FedsimError(
            "knowledge of labels: known or bn: exact comes from the ground truth, and none was "
            "found; name the run's folder with --truth, or grant less"
        )
    seen, knowledge = grant(observation, victim, labels, bn)
    chosen = create(name, parameters)
    unmet = chosen.needs.unmet(labels, bn)
    if unmet:
        raise FedsimError(f"{name} {unmet.replace('the scenario grants', 'granted is')}")
    solution = solve(
        chosen,
        seen,
        knowledge,
        observation.seed if seed is None else seed,
        restarts=restarts,
        progress=on_progress,
    )
    found = jobs.on_cpu(solution.reconstruction)
    metrics = scoring.score(found, victim, lpips=None).metrics() if victim else None
    return found, {
        "observation": observation.id,
        "attack": {"name": name, "restarts": restarts, "parameters": chosen.model_dump("json")},
        "knowledge": {"labels": labels, "bn": bn},
        "metrics": metrics,
        "cost": jobs.cost(solution),
    }


class _Plan:
    """One scenario, refused or accepted as a whole before anything is written."""

    def __init__(
        self,
        scenario: Scenario,
        variant: Mapping[str, Any],
        out: Path,
        resume: bool,
        workers: int | None,
    ) -> None:
        self.scenario = scenario
        self.variant = dict(variant)
        self.out = out
        self.resolved = dump(scenario)
        self.device = resolve_device(scenario.device)
        cores = os.cpu_count() or 1
        self.workers = workers or (1 if self.device.startswith("cuda") else cores)
        self.threads = max(1, cores // self.workers)
        self.dataset = load_dataset(scenario)
        self.workloads = {
            name: Workload(scenario, name, self.dataset) for name in scenario.defenses
        }
        for workload in self.workloads.values():
            workload.check()
        self.resume = resume
        self._refuse_occupied()

    def execute(self, display: progress.Display) -> None:
        """Federate every stack, attack every recording, write the record."""
        started = time.perf_counter()
        recording.write_text(self.out / "scenario.yaml", self.resolved)
        self._federate(display)
        self._attack(display)
        self._finish(display, time.perf_counter() - started)

    def _refuse_occupied(self) -> None:
        previous = self.out / "scenario.yaml"
        if not previous.exists():
            return
        if not self.resume:
            raise FedsimError(
                f"{self.out} holds a run already: continue it with --resume, or name another "
                "folder with --out"
            )
        if previous.read_text(encoding="utf-8") != self.resolved:
            raise FedsimError(
                f"{self.out} holds a run of another scenario (its scenario.yaml differs): resume "
                "with the same scenario and --set, or name another folder with --out"
            )

    # Federation

    def _federate(self, display: progress.Display) -> None:
        from fedsim.federation import federate
        from fedsim.federation.records import RoundRecord

        path = self.out / "rounds.jsonl"
        record.drop_torn_line(path)
        for stack, workload in self.workloads.items():
            done = {r["round"] for r in record.read_lines(path) if r["defense"] == stack}
            total = self.scenario.training.rounds
            display.stage(f"train  {stack}", total, len(done))

            def on_round(
                result: RoundRecord, stack: str = stack, workload: Workload = workload
            ) -> None:
                spent = rows.spent(workload, result.round).epsilon
                record.append_line(path, rows.round_row(stack, result, spent))
                display.advance(rows.round_summary(result))

            federate(self.scenario, stack, self.out, resume=self.resume, on_round=on_round)
        latest = {(r["defense"], r["round"]): r for r in record.read_lines(path)}
        order = list(self.workloads)
        record.write_lines(
            path, sorted(latest.values(), key=lambda r: (order.index(r["defense"]), r["round"]))
        )

    # Attacks

    def _attack(self, display: progress.Display) -> None:
        path = self.out / "results.jsonl"
        record.drop_torn_line(path)
        done = {rows.key(row) for row in record.read_lines(path)}
        every = [
            Job(
                observation=observation,
                attack=entry.name,
                label=entry.label or entry.name,
                parameters=entry.parameters,
                restarts=entry.restarts,
            )
            for entry in self.scenario.attacks
            for observation in self._observations()
        ]
        pending = [job for job in every if rows.job_key(self.out, job) not in done]
        display.stage("attack", len(every), len(every) - len(pending))
        context = rows.Context(self.scenario, self.variant, self._final_rounds(), self._claims())

        def on_progress(job: Job, at: Progress) -> None:
            display.detail(job.title, rows.attack_summary(job, at))

        def on_result(job: Job, result: Result) -> None:
            record.append_line(path, context.row(job, result))
            display.advance(rows.result_summary(job, result))

        jobs.run_jobs(
            pending,
            self._setting(),
            workers=self.workers,
            on_progress=on_progress,
            on_result=on_result,
        )

    def _finish(self, display: progress.Display, seconds: float) -> None:
        """Controls, canonical order, record."""
        path = self.out / "results.jsonl"
        found = {rows.key(row): row for row in record.read_lines(path)}
        ordered = sorted(found.values(), key=rows.order(self.scenario))
        rows.add_controls(ordered, self.out)
        record.write_lines(path, ordered)
        for row in ordered:
            if row["status"] == "ok":
                rows.draw_grid(row, self.out)
        recording.write_json(
            self.out / "record.json",
            {
                "scenario": self.scenario.name,
                "variant": self.variant,
                "seed": self.scenario.seed,
                "device": self.device,
                "workers": self.workers,
                "knowledge": self.scenario.knowledge.model_dump(),
                "environment": record.environment(),
                "seconds": seconds,
                "peak_memory_bytes": rows.peak_memory(),
                "bytes_on_wire": sum(
                    row["bytes_up"] + row["bytes_down"]
                    for row in record.read_lines(self.out / "rounds.jsonl")
                ),
                "notes": {"lpips": self._lpips_note()},
            },
        )
