"""From what a tap recorded of anybody's Flower app to a report: attacked, scored against truth.

The tap's recording holds what the server saw and nothing else. What an attacker on the server knows
besides (the model's code, the normalization, how clients train) is said here, or read from what the
witness wrote down beside the truth.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fedsim import progress, scoring
from fedsim.assessment.lines import Context, command_of, listed, round_rows, slug
from fedsim.assessment.local_training import Plan
from fedsim.assessment.truth import Picked, Pixels, guesser_of, pick, truth_of
from fedsim.assessment.victim_model import built_model, classes_of, package_of
from fedsim.attacking.jobs import Job, Result, Setting, run_jobs
from fedsim.attacking.observe import RANDOM, Subject
from fedsim.attacking.replay import simulation_error
from fedsim.attacking.tapped import Answer, freeze_unsent, observed
from fedsim.contracts.attack import Progress, create
from fedsim.contracts.grant import Grant
from fedsim.models import live
from fedsim.models.base import Classifier
from fedsim.recording import files
from fedsim.recording.exchanges import digest_of, left_out, read_exchanges, run_folder
from fedsim.recording.truth import save_truth
from fedsim.recording.witnessed import Testimony, read_witnessed
from fedsim.report import save_grids, save_overview, write_report
from fedsim.results import record, rows
from fedsim.results.plan import Plan as Announced
from fedsim.results.record import Run
from fedsim.system import paths
from fedsim.system.lock import locked
from fedsim.system.threads import fixed
from fedsim.types import FedsimError, Mode, Observation

DEFAULT_ATTACKS: Mapping[str, Mapping[str, object]] = {
    "label_inference": {},
    "inverting_gradients": {"iterations": 300},
}
"""Attacks of an assessment that names none, and their parameters."""


def assess(
    tapped: str | Path,
    model: nn.Module | str,
    *,
    truth: str | Path | Sequence[str | Path],
    out: str | Path,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    input_shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    answer: Answer = "weights",
    prefix: str = "",
    local: Mapping[str, float] | None = None,
    attacks: Mapping[str, Mapping[str, object]] | None = None,
    grant: Grant = Grant(),
    defenses: Sequence[Mapping[str, object]] = (),
    rounds: Collection[int] | Literal["last"] = "last",
    clients: int = 2,
    run: int | None = None,
    name: str | None = None,
    seed: int = 0,
    workers: int | None = None,
    quiet: bool = True,
) -> Run:
    """Attacks what a tap recorded, scores it against what a witness saw, and writes a report.

    Args:
        tapped: What `fedsim.tap` was told as `out`, or the folder of one run in it.
        model: The app's model, or where it is: `module:Class`, `module:function` or
            `module:function(num_classes=10)`. It is never read from the recording.
        truth: What `fedsim.witness` was told as `out`; several of several clients' disks.
        out: The folder to fill.
        mean: Of each channel, which the app normalizes pixels in [0, 1] by; default 0.
        std: As `mean`; default 1.
        input_shape: (C, H, W); default that of the truth's images.
        classes: Outputs of the model; default as many as it has.
        answer: What the app's clients answer.
        prefix: Stands before the names that the app sends in the model's own, if it sends a part.
        local: Of the app's training: `batch_size`, `lr`, and `epochs`, `momentum`, where they
            apply; default what the witness saw.
        attacks: Names and parameters; default `DEFAULT_ATTACKS`.
        grant: What the attacker is granted besides.
        defenses: What the app's clients do to their update before it leaves, as in a scenario.
        rounds: Which are attacked; default the last one recorded.
        clients: Of how many clients, in each round.
        run: Which of the recorded runs; default the newest.
        name: Title of the report; default the package of the model.
        seed: Of attacks.
        workers: Processes that attack; default one a core.
        quiet: Show no progress.

    Raises:
        FedsimError: something is missing or does not fit; before any attack.
        RunFailed: an attacking process died.
    """
    started = time.perf_counter()
    folder = Path(out)
    paths.writable_folder(folder, "--out")
    if (folder / "results.jsonl").exists():
        raise FedsimError(f"--out {folder}: holds results already; name another folder")
    if clients < 1:
        raise FedsimError(f"clients: expected at least 1, got {clients}")
    chosen = DEFAULT_ATTACKS if attacks is None else attacks
    for attack, parameters in chosen.items():
        if missing := grant.lacks(create(attack, parameters).required()):
            raise FedsimError(f"attack {attack} {missing}")
    source = run_folder(Path(tapped), run)
    exchanges = read_exchanges(source)
    homes = [truth] if isinstance(truth, str | Path) else list(truth)
    said: dict[str, Testimony] = {}
    for home in homes:
        said |= read_witnessed(Path(home), exchanges[0].run_id)
    picked = pick(exchanges, said, rounds, clients)
    built = model if isinstance(model, nn.Module) else built_model(model)
    if type(built).__module__ == "__main__":
        raise FedsimError(
            f"model: {type(built).__name__} is defined in the script itself, where the processes "
            "that attack do not find it; move it to a module"
        )
    freeze_unsent(built, picked[0].exchange, prefix)
    pixels = Pixels.of(mean, std)
    shape = input_shape or picked[0].testimony.shape
    mode: Mode = "train" if picked[0].testimony.said.training_mode else "eval"
    subject = Subject(
        built,
        input_shape=shape,
        classes=classes or classes_of(built, shape),
        mean=mean,
        std=std,
        mode=mode,
    )
    notes = [f"tap, left out: {line}" for line in left_out(source)]
    if subject.random:
        notes.append(RANDOM)
    halves = {value.dtype for value in picked[0].exchange.reply().values()} & _HALVES
    if halves:
        notes.append(
            f"update: clients send {', '.join(map(str, halves))}, whose rounding no attack models"
        )
    plan = Plan(answer=answer, local=local, mode=mode, defenses=defenses, notes=notes)
    with locked(folder), fixed(1):
        seen: dict[str, tuple[Observation, Picked]] = {}
        errors: dict[str, float | None] = {}
        for each in picked:
            training = plan.training(each)
            stack, announcements, effect = plan.defended(training)
            observation = observed(
                each.exchange,
                subject,
                built,
                training,
                answer=answer,
                prefix=prefix,
                stack=stack,
                client=each.number,
                defense=announcements,
                effect=effect,
                seed=seed,
            )
            if not any(bool(value.any()) for value in observation.update.values()):
                raise FedsimError(
                    f"{each.exchange.path}: the client answered what it was sent; if the app "
                    "sends a delta or a gradient, say so (--answer)"
                )
            files.save_observation(observation, folder)
            victim = truth_of(each, pixels)
            save_truth(victim, folder, observation.id, each.number)
            errors[observation.id] = error = simulation_error(observation, victim)
            if error is not None and error > _UNLIKE and effect.exact:
                notes.append(
                    f"training: client {each.number} sent another update than is simulated of what "
                    f"it trained on, by {error:.2g} of its length (simulation_error): attacks do "
                    f"not know all of its training{subject.assumed}, and what they miss says little"
                )
            seen[observation.id] = observation, each
        guesser, guess_is_public = guesser_of(said, picked, pixels, notes)
        context = Context(
            name=slug(name or package_of(model)),
            model=type(built).__name__,
            grant=grant,
            seen=seen,
            guess_is_public=guess_is_public,
            simulation_errors=errors,
        )
        models = live.kept(subject.spec.name)
        _attack(folder, context, chosen, guesser, models, workers, quiet, digest_of(exchanges))
        found = sorted(
            record.read_lines(folder / "results.jsonl"),
            key=lambda row: (row["attack"]["label"], row["round"], row["client"]),
        )
        rows.add_controls(found, folder)
        record.write_lines(folder / "results.jsonl", found)
        record.write_lines(folder / "rounds.jsonl", round_rows(exchanges, stack))
        save_grids(folder)
        save_overview(folder)
        files.write_json(
            folder / "record.json",
            {
                "scenario": context.name,
                "variant": {},
                "seed": seed,
                "device": "cpu",
                "knowledge": grant.model_dump(),
                "environment": record.environment(),
                "seconds": time.perf_counter() - started,
                "again": command_of(
                    source,
                    model,
                    homes,
                    rounds,
                    {
                        "mean": mean and listed(mean),
                        "std": std and listed(std),
                        "input-shape": input_shape and listed(input_shape),
                        "classes": classes,
                        "answer": None if answer == "weights" else answer,
                        "prefix": prefix,
                        **{key.replace("_", "-"): value for key, value in (local or {}).items()},
                        "clients": clients,
                        "name": name,
                        "seed": seed,
                    },
                    {"attack": chosen, "defense": {str(d["name"]): d for d in defenses}},
                ),
                "notes": dict(enumerate(dict.fromkeys([*plan.notes, *_BASIS]))),
            },
        )
        write_report(folder)
    return Run(folder)


_HALVES = {torch.float16, torch.bfloat16}
_UNLIKE = 0.1
"""Of the update's length, by which the simulated one may be off unsaid."""
_BASIS = (
    "recording: made by fedsim.tap of an app that is not fedsim's; truth is what fedsim.witness "
    "saw the model being called with",
    "accuracy and ε: not measured and not accounted, since a recording tells neither",
)


def _attack(
    folder: Path,
    context: Context,
    attacks: Mapping[str, Mapping[str, object]],
    guesser: scoring.Guesser,
    models: Mapping[str, Classifier],
    workers: int | None,
    quiet: bool,
    recording: str,
) -> None:
    """Runs every attack on every observation; its rows go to results.jsonl as they come."""
    planned = [
        (
            Job(
                observation=files.path_of(folder, id),
                attack=name,
                label=name,
                parameters=dict(create(name, parameters).model_dump(mode="json")),
                restarts=1,
            ),
            seen,
        )
        for name, parameters in attacks.items()
        for id, (seen, _) in context.seen.items()
    ]
    jobs = [job for job, _ in planned]
    origin = f"recording:{recording}"
    Announced.of(context.name, {}, 0, planned, resumable=False, origin=origin).save(folder)
    setting = Setting(
        root=folder,
        device="cpu",
        granted=context.grant,
        guesser=guesser,
        lpips_backbone="alex",
        lpips_weights=None,
        threads=1,
        models=models,
    )
    with progress.display(quiet) as display:
        display.stage("attack", len(jobs))

        def on_progress(job: Job, at: Progress) -> None:
            of = f"/{at.total}" if at.total else ""
            display.detail(job.title, f"{job.title} {at.iteration}{of} loss {at.loss:.2e}")

        def on_result(job: Job, result: Result) -> None:
            record.append_line(folder / "results.jsonl", context.row(job, result))
            display.advance(job.title)

        run_jobs(
            jobs,
            setting,
            workers=workers or os.cpu_count() or 1,
            on_progress=on_progress,
            on_result=on_result,
        )
