"""Attacks, in a run's folder, what a tap recorded of anybody's app and a witness saw beside it."""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedsim import progress, stages
from fedsim.assessment.clients import (
    AppTraining,
    Examples,
    Picked,
    TappedAnswer,
    freeze_unsent,
    guesser_of,
    observe_exchange,
    pick,
)
from fedsim.assessment.privacy_settings import PrivacySettings, read_privacy
from fedsim.attacking.jobs import Job, Result, Setting
from fedsim.attacking.observe import RANDOM, VictimModel
from fedsim.attacking.replay import simulation_error
from fedsim.attacking.running import Workers
from fedsim.contracts.attack import create
from fedsim.contracts.grant import Grant
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
from fedsim.results.lines import ResultRow, describe_tensor_bound
from fedsim.results.record import Plan as Announced
from fedsim.results.record import Row, Run
from fedsim.scoring import NOT_LEARNED
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

    An attack that fails is a row of the returned run that says why, and no error.

    Args:
        tapped: Folder that `fedsim.tap` was told as `out`, or that of one run in it.
        model: The app's model, or where it is: `module:Class`, `module:function` or
            `module:function(num_classes=10)`. It is never read from the recording. Parameters that
            clients are not sent are frozen in place.
        truth: Folder that `fedsim.witness` was told as `out`; several from several clients.
        out: The folder to fill, made if it is missing; one that holds results is refused.
        settings: What is assessed, and what is known of the app: the fields of `AssessSettings`; an
            unknown name is a TypeError.

    Raises:
        FedsimError: something is missing or does not fit; before any attack.
        ValidationError: a parameter of an attack or a defense is wrong (pydantic).
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
            "again": _command_of(tape.source, model, homes, asked),
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
    privacy: PrivacySettings

    @classmethod
    def read(cls, tapped: Path, homes: Sequence[str | Path], asked: AssessSettings) -> _TappedRun:
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
        # The top-level package of the model's class, or of the name that says where it is.
        module = model.partition(":")[0] if isinstance(model, str) else type(model).__module__
        title = re.sub(r"[^A-Za-z0-9_+-]+", "-", asked.name or module.partition(".")[0])
        self.title = title.strip("-.+_")[:64] or "app"
        self.model = model if isinstance(model, nn.Module) else built_model(model)
        if type(self.model).__module__ == "__main__":
            raise FedsimError(
                f"model: {type(self.model).__name__} is defined in the script itself, where the "
                "processes that attack do not find it; move it to a module"
            )
        first = tape.picked[0]
        freeze_unsent(self.model, first.exchange, asked.prefix)
        shape = asked.input_shape or first.testimony.shape
        classes = asked.classes or _classes_of(self.model, shape)
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
) -> tuple[_AssessmentContext, Setting]:
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
        # Behind a defense that alters, clips or noises updates, any simulation misses.
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
    record.write_lines(folder / "rounds.jsonl", _round_rows(tape.exchanges, stack))
    guesser, guess_is_public = guesser_of(tape.said, tape.picked, app.examples)
    if not guess_is_public:
        app.plan.notes.append(_NO_OTHERS)
    context = _AssessmentContext(
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
_NO_OTHERS = (
    "guess: learned from the victims' own images, as no other client was witnessed; gains over it "
    "are understated; run the app with more clients than are attacked"
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


DEFAULT_ATTACKS: Mapping[str, Mapping[str, object]] = {
    "label_inference": {},
    "inverting_gradients": {"iterations": 300},
}
"""Attacks of an assessment that names none, and their parameters."""


@dataclass(frozen=True, kw_only=True)
class AssessSettings:
    """Options of `fedsim.assess`, checked as they are made.

    An attack that is unknown or needs what is not granted, and `clients` below 1, are a
    FedsimError; a wrong parameter of an attack is a ValidationError of pydantic.
    """

    mean: Sequence[float] | None = None
    """Mean of each channel, which the app subtracts from pixels in [0, 1]; None for 0."""
    std: Sequence[float] | None = None
    """Standard deviation of each channel, by which the app then divides; None for 1."""
    input_shape: tuple[int, int, int] | None = None
    """Shape (C, H, W) of an image; None for that of the truth's images."""
    classes: int | None = None
    """Number of outputs of the model; None to count them by a trial."""
    answer: TappedAnswer = "weights"
    """What clients send: `weights`, a `delta` from the server's weights, or a `gradient`."""
    prefix: str = ""
    """Text before a tensor's name in the model, such as `head.`, which the app's names lack."""
    local: Mapping[str, float] | None = None
    """Values of `batch_size` and `lr`, maybe `epochs` (1), `momentum` (0); None: as witnessed."""
    defenses: Sequence[Mapping[str, object]] = ()
    """Members (`name` and parameters) of the clients' stack; empty for those that were found."""
    attacks: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: DEFAULT_ATTACKS)
    """Name of an attack plugin -> its parameters, those left out at their defaults."""
    grant: Grant = Grant()
    """What the attacker knows beside the observation."""
    rounds: Collection[int] | Literal["last"] = "last"
    """The rounds that are attacked, from 1; `last` for the last one of which a truth is known."""
    clients: int = 2
    """Maximum number of clients that are attacked in each round."""
    run: int | None = None
    """Flower's id of the recorded run; None for the newest."""
    name: str | None = None
    """Title of the report; None for the top-level package of the model."""
    seed: int = 0
    workers: int | None = None
    """Number of processes that attack; None for one a core."""
    quiet: bool = True

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise FedsimError(f"clients: expected at least 1, got {self.clients}")
        for attack, parameters in self.attacks.items():
            if missing := self.grant.lacks(create(attack, parameters).required()):
                raise FedsimError(f"attack {attack} {missing}")


@dataclass(frozen=True)
class _AssessmentContext:
    """Facts that every result of an assessment shares."""

    name: str
    model: str
    grant: Grant
    seen: Mapping[str, tuple[Observation, Picked]]
    """Observation id -> the observation, and the exchange that it is of."""
    guess_is_public: bool
    """Whether the guess was learned from others' images, and not from the victims' own."""
    simulation_errors: Mapping[str, float | None]
    """Observation id -> `fedsim.attacking.replay.simulation_error`."""
    privacy: Mapping[str, Row]
    """Privacy of each observation against the server; empty where nothing is accounted."""

    def row(self, job: Job, result: Result) -> ResultRow:
        observation = result.observation
        exchange = self.seen[observation.id][1].exchange
        return ResultRow.of(
            job,
            result,
            scenario=self.name,
            dataset="the app's own data",
            model={"name": self.model},
            knowledge=self.grant.model_dump(),
            simulation_error=self.simulation_errors.get(observation.id),
            baseline=result.baseline | ({} if self.guess_is_public else NOT_LEARNED),
            theory=describe_tensor_bound(result),
            utility={"train_loss": exchange.number("train_loss")},
            privacy=self.privacy.get(observation.id, {}),
        )


def _round_rows(exchanges: Sequence[Exchange], stack: str) -> list[Row]:
    found = []
    for round in sorted({each.round for each in exchanges}):
        own = [each for each in exchanges if each.round == round]
        losses = [value for each in own if (value := each.number("train_loss")) is not None]
        loss = math.fsum(losses) / len(losses) if losses else None
        found.append(
            {
                "defense": stack,
                "round": round,
                "participants": list(range(len(own))),
                "aggregated": len(own),
                "train_loss": loss if loss is not None and math.isfinite(loss) else None,
            }
        )
    return found


def _command_of(
    source: Path, model: nn.Module | str, homes: Sequence[str | Path], asked: AssessSettings
) -> str:
    """Returns the shell command that repeats the assessment; a model is named by its class."""
    named = model if isinstance(model, str) else f"{type(model).__module__}:{type(model).__name__}"
    words = ["fedsim", "assess", str(source.absolute()), "--model", named, "--out", "again"]
    for home in homes:
        words += ["--truth", str(Path(home).absolute())]
    rounds = asked.rounds
    options = {
        "rounds": rounds if isinstance(rounds, str) else _join_values(sorted(rounds)),
        "mean": asked.mean and _join_values(asked.mean),
        "std": asked.std and _join_values(asked.std),
        "input-shape": asked.input_shape and _join_values(asked.input_shape),
        "classes": asked.classes,
        "answer": None if asked.answer == "weights" else asked.answer,
        "prefix": asked.prefix,
        **{key.replace("_", "-"): value for key, value in (asked.local or {}).items()},
        "clients": asked.clients,
        "name": asked.name,
        "seed": asked.seed,
    }
    for option, value in options.items():
        # What is at its default follows from the app again.
        if value not in (None, ""):
            words += [f"--{option}", str(value)]
    for key, value in asked.grant.model_dump(exclude_defaults=True).items():
        words += ["--grant", f"{key}={value}"]
    plugins = [("attack", name, parameters) for name, parameters in asked.attacks.items()]
    plugins += [("defense", str(each["name"]), each) for each in asked.defenses]
    for option, name, parameters in plugins:
        own = [f"{k}={v}" for k, v in parameters.items() if k != "name" and v is not None]
        words += [f"--{option}", name + (":" + ",".join(own) if own else "")]
    return shlex.join(words)


def _join_values(values: Sequence[float]) -> str:
    return ",".join(map(str, values))


_CALL = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)(?P<call>\(.*\))?", re.S)


def built_model(named: str) -> nn.Module:
    """Imports and returns the model that `named` says, built if it is not yet.

    `named` is `module:Class`, `module:function(key=value)` with literal values, or `module:name` of
    a built model. The working directory is put first on `sys.path`, unless it is there. A
    FedsimError says that `named` has another form, the module fails, or no model comes of it.
    """
    match = _CALL.fullmatch(named.strip())
    if not match:
        raise FedsimError(
            f"--model: expected module:Class or module:function(key=value), got {named!r}"
        )
    # A program's path begins with its own folder; the app's model lies where the user is.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(match["module"])
        for part in match["name"].split("."):
            found = getattr(found, part)
        if not isinstance(found, nn.Module):
            positional, keywords = _arguments(match["call"] or "()")
            found = found(*positional, **keywords)
    except FedsimError:
        raise
    except Exception as error:  # somebody else's code, of any kind
        raise FedsimError(
            f"--model {named}: {type(error).__name__}: {error}; run it in the app's folder, and "
            "name what builds the model"
        ) from error
    if not isinstance(found, nn.Module):
        raise FedsimError(f"--model {named}: expected an nn.Module, got {type(found).__name__}")
    return found


def _arguments(call: str) -> tuple[list[Any], dict[str, Any]]:
    tree = ast.parse(f"f{call}", mode="eval").body
    if not isinstance(tree, ast.Call) or any(each.arg is None for each in tree.keywords):
        raise FedsimError(f"--model: expected a call of literals, got {call!r}")
    keywords = {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords}
    return [ast.literal_eval(each) for each in tree.args], keywords


def _classes_of(model: nn.Module, shape: tuple[int, int, int]) -> int:
    """Returns the number of the model's outputs, by a trial on images of `shape` (C, H, W)."""
    # Of each module: an app may keep some, such as a frozen batch norm, in another mode.
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.no_grad():
            answer: Any = model.eval()(torch.zeros(2, *shape))
        # Models of Hugging Face return an object that holds the logits.
        answer = getattr(answer, "logits", answer)
        return int((answer[0] if isinstance(answer, tuple) else answer).shape[-1])
    except Exception as error:  # somebody else's code, of any kind
        raise FedsimError(
            f"model: it does not take images of shape {shape}: {type(error).__name__}: {error}; "
            "say --input-shape and --classes"
        ) from error
    finally:
        for part, was_training in modes:
            part.training = was_training
