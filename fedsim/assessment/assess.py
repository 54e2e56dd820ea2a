"""Attacks what a tap recorded of anybody's Flower app, in a run's folder as `fedsim run` fills it.

The recording holds what the server saw. What an attacker knows besides is said here or witnessed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedsim import progress, stages
from fedsim.assessment.lines import AssessmentContext, command_of, round_rows, slug
from fedsim.assessment.local_training import AppTraining
from fedsim.assessment.privacy_settings import PrivacySettings, read_privacy
from fedsim.assessment.settings import AssessSettings
from fedsim.assessment.truth import Examples, Picked, guesser_of, pick
from fedsim.assessment.victim_model import built_model, classes_of, package_of
from fedsim.attacking.jobs import Job, Setting
from fedsim.attacking.observe import RANDOM, VictimModel
from fedsim.attacking.replay import simulation_error
from fedsim.attacking.running import Workers
from fedsim.attacking.tapped import freeze_unsent, observe_exchange
from fedsim.contracts.attack import create
from fedsim.models import live
from fedsim.recording import files
from fedsim.recording.exchanges import (
    Exchange,
    digest_of,
    left_out,
    read_exchanges,
    read_parts,
    run_folder,
)
from fedsim.recording.truth import save_truth
from fedsim.recording.witnessed import Testimony, read_witnessed
from fedsim.report import write_report
from fedsim.results import record
from fedsim.results.record import Plan as Announced
from fedsim.results.record import Row, Run
from fedsim.system import paths
from fedsim.system.lock import lock_folder
from fedsim.system.threads import fix_within
from fedsim.types import FedsimError, GroundTruth, Mode, Observation


def assess(
    tapped: str | Path,
    model: nn.Module | str,
    *,
    truth: str | Path | Sequence[str | Path],
    out: str | Path,
    **settings: Any,
) -> Run:
    """Attacks what a tap recorded, scores it against what a witness saw, and writes a report.

    Args:
        tapped: Folder that `fedsim.tap` was told as `out`, or that of one run in it.
        model: The app's model, or where it is: `module:Class`, `module:function` or
            `module:function(num_classes=10)`. It is never read from the recording.
        truth: Folder that `fedsim.witness` was told as `out`; several from several clients.
        out: The folder to fill; one that holds results is refused.
        settings: What is assessed, and what is known of the app: the fields of `AssessSettings`.

    Raises:
        FedsimError: something is missing or does not fit; before any attack.
        RunFailed: an attacking process died.
    """
    started = time.perf_counter()
    folder = Path(out)
    paths.writable_folder(folder, "--out")
    if (folder / "results.jsonl").exists():
        raise FedsimError(f"--out {folder}: holds results already; name another folder")
    asked = AssessSettings(**settings)
    homes = [truth] if isinstance(truth, str | Path) else list(truth)
    tape = _TappedRun.read(Path(tapped), homes, asked)
    app = _App(model, tape, asked)
    # One thread, as in the processes that attack: each of them has one core.
    with lock_folder(folder), fix_within(1):
        context, setting = _fill(folder, tape, app, asked)
        planned = [
            (_job(files.path_of(folder, id), name, parameters), seen)
            for name, parameters in asked.attacks.items()
            for id, (seen, _) in context.seen.items()
        ]
        origin = f"recording:{digest_of(tape.exchanges)}"
        Announced.of(context.name, {}, 0, planned, resumable=False, origin=origin).save(folder)
        with progress.display(asked.quiet) as display:
            display.stage("attack", len(planned))
            with Workers(asked.workers or os.cpu_count() or 1) as workers:
                stages.attack(
                    [job for job, _ in planned],
                    setting,
                    stages.writer_of(folder / "results.jsonl", context.row, display),
                    display,
                    workers=workers,
                )
        facts = {
            "scenario": context.name,
            "variant": {},
            "seed": asked.seed,
            "device": "cpu",
            "knowledge": asked.grant.model_dump(),
            "seconds": time.perf_counter() - started,
            "again": command_of(tape.source, model, homes, asked),
            "notes": dict(enumerate(dict.fromkeys([*app.plan.notes, *_BASIS]))),
        }
        stages.finish(
            folder, facts, lambda row: (row["attack"]["label"], row["round"], row["client"])
        )
        write_report(folder)
    return Run(folder)


@dataclass(frozen=True)
class _TappedRun:
    """Recording and testimony of one run of an app."""

    source: Path
    exchanges: Sequence[Exchange]
    said: Mapping[str, Testimony]
    picked: Sequence[Picked]
    """Exchanges that are attacked, with their truth."""
    privacy: PrivacySettings

    @classmethod
    def read(cls, tapped: Path, homes: Sequence[str | Path], asked: AssessSettings) -> _TappedRun:
        """Reads the run that `asked` names below `tapped`, and what witnesses wrote to `homes`."""
        source = run_folder(tapped, asked.run)
        exchanges = read_exchanges(source)
        said: dict[str, Testimony] = {}
        for home in homes:
            said |= read_witnessed(Path(home), exchanges[0].run_id)
        chosen = pick(exchanges, said, asked.rounds, asked.clients)
        # A tap on a client notes its mods as well as a witness does.
        tapped_mods = read_parts(source, "mods")
        mods = {
            each.message_id: said[each.message_id].said.mods if each.message_id in said else None
            for each in exchanges
        }
        # What was witnessed is of this very answer; what the tap noted is of the app as a whole.
        known = {id: tapped_mods if found is None else found for id, found in mods.items()}
        strategies = read_parts(source, "strategies")
        privacy = read_privacy(exchanges, known, strategies, left_out(source))
        return cls(source, exchanges, said, chosen, privacy)


class _App:
    """Facts known of the app whose recording is attacked: its model, normalization and training."""

    def __init__(self, model: nn.Module | str, tape: _TappedRun, asked: AssessSettings) -> None:
        self.title = slug(asked.name or package_of(model))
        self.model = model if isinstance(model, nn.Module) else built_model(model)
        if type(self.model).__module__ == "__main__":
            raise FedsimError(
                f"model: {type(self.model).__name__} is defined in the script itself, where the "
                "processes that attack do not find it; move it to a module"
            )
        first = tape.picked[0]
        freeze_unsent(self.model, first.exchange, asked.prefix)
        shape = asked.input_shape or first.testimony.shape
        classes = asked.classes or classes_of(self.model, shape)
        mode: Mode = "train" if first.testimony.said.training_mode else "eval"
        self.victim = VictimModel(
            self.model,
            input_shape=shape,
            classes=classes,
            mean=asked.mean,
            std=asked.std,
            mode=mode,
        )
        self.examples = Examples(asked.mean, asked.std, classes)
        notes = [f"tap, left out: {line}" for line in left_out(tape.source)]
        if self.victim.random:
            notes.append(RANDOM)
        if halves := {value.dtype for value in first.exchange.read_reply().values()} & _HALVES:
            sent = ", ".join(map(str, halves))
            notes.append(f"update: clients send {sent}, whose rounding no attack models")
        found = tape.privacy.defenses
        self.plan = AppTraining(
            answer=asked.answer,
            local=asked.local,
            mode=mode,
            defenses=asked.defenses or (found.announcements if found else ()),
            notes=notes,
            stack="declared" if asked.defenses else "found",
        )


def _fill(
    folder: Path, tape: _TappedRun, app: _App, asked: AssessSettings
) -> tuple[AssessmentContext, Setting]:
    """Writes the recording and its truth as a run's, and returns how it is attacked."""
    seen: dict[str, tuple[Observation, Picked]] = {}
    errors: dict[str, float | None] = {}
    privacy: dict[str, Row] = {}
    for each in tape.picked:
        training = app.plan.training(each)
        stack, announcements, effect = app.plan.describe_defense(training)
        round = each.exchange.round
        observation = replace(
            observe_exchange(
                each.exchange,
                app.victim,
                app.model,
                training,
                answer=asked.answer,
                prefix=asked.prefix,
            ),
            id=files.observation_id(stack, round, each.number, "training"),
            round=round,
            client=each.number,
            defense=announcements,
            effect=effect,
            seed=asked.seed,
        )
        if not any(bool(value.any()) for value in observation.update.values()):
            raise FedsimError(
                f"{each.exchange.path}: the client answered what it was sent; if the app "
                "sends a delta or a gradient, say so (--answer)"
            )
        images, labels = app.examples.read(each.testimony)
        victim = GroundTruth(images=images, labels=labels)
        files.save_observation(observation, folder)
        save_truth(victim, folder, observation.id, each.number)
        errors[observation.id] = error = simulation_error(observation, victim)
        # A defense that alters, clips or noises updates makes any simulation miss: then it says
        # nothing.
        clipped = effect.scaled or effect.scaled_examples
        if error is not None and error > _UNLIKE and effect.exact and not clipped:
            app.plan.notes.append(
                f"training: client {each.number} sent another update than is simulated of what "
                f"it trained on, by {error:.2g} of its length (simulation_error): attacks do "
                f"not know all of its training{app.victim.assumed}, and what they miss says little"
            )
        seen[observation.id] = observation, each
        privacy[observation.id], lines = tape.privacy.describe_privacy(each, training)
        app.plan.notes += lines
    if not any(privacy.values()):
        app.plan.notes.append(_NO_PRIVACY)
    record.write_lines(folder / "rounds.jsonl", round_rows(tape.exchanges, stack))
    guesser, guess_is_public = guesser_of(tape.said, tape.picked, app.examples, app.plan.notes)
    context = AssessmentContext(
        name=app.title,
        model=type(app.model).__name__,
        grant=asked.grant,
        seen=seen,
        guess_is_public=guess_is_public,
        simulation_errors=errors,
        privacy=privacy,
    )
    setting = Setting(
        root=folder,
        device="cpu",
        granted=asked.grant,
        guesser=guesser,
        lpips_backbone="alex",
        lpips_weights=None,
        threads=1,
        models=live.copy_for_processes(app.victim.spec.name),
    )
    return context, setting


_HALVES = {torch.float16, torch.bfloat16}
# Share of the update's length by which the simulated one may be off unsaid.
_UNLIKE = 0.1
_BASIS = (
    "recording: made by fedsim.tap of an app that is not fedsim's; truth is what fedsim.witness "
    "saw the model being called with",
    "accuracy: not measured, since a recording does not tell it",
)
_NO_PRIVACY = (
    "ε: not accounted, since no mod or wrapper for privacy was found; what is inside the app's own "
    "training, such as Opacus, is not read"
)


def _job(observation: Path, name: str, parameters: Mapping[str, object]) -> Job:
    return Job(
        observation=observation,
        attack=name,
        label=name,
        parameters=dict(create(name, parameters).model_dump(mode="json")),
        restarts=1,
    )
