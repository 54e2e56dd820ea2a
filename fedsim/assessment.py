"""From what a tap recorded of anybody's Flower app to a report: attacked, scored against truth.

The tap's recording holds what the server saw and nothing else. What an attacker on the server knows
besides (the model's code, the normalization, how clients train) is said here, or read from what the
witness wrote down beside the truth.
"""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsim import progress, scoring
from fedsim.attacking.jobs import Job, Result, Setting, run_jobs
from fedsim.attacking.observe import Subject
from fedsim.attacking.tapped import (
    EXAMPLES,
    Answer,
    Local,
    freeze_unsent,
    gradient_of,
    observed,
)
from fedsim.contracts.attack import Progress, create
from fedsim.contracts.grant import Grant
from fedsim.models import live
from fedsim.models.base import Classifier
from fedsim.recording import files
from fedsim.recording.exchanges import Exchange, left_out, read_exchanges, run_folder
from fedsim.recording.truth import save_truth
from fedsim.recording.witnessed import Testimony, read_witnessed
from fedsim.report import save_grids, save_overview, write_report
from fedsim.results import record, rows
from fedsim.results.record import Row, Run
from fedsim.scenario import build_stack
from fedsim.scenario.build import announced
from fedsim.scenario.model import PluginRef
from fedsim.system import paths
from fedsim.system.lock import locked
from fedsim.system.threads import fixed
from fedsim.types import Effect, FedsimError, GroundTruth, LocalTraining, Mode, Observation
from fedsim.words import number_of

DEFAULT_ATTACKS: Mapping[str, Mapping[str, object]] = {
    "label_inference": {},
    "inverting_gradients": {"iterations": 300},
}
"""Attacks of an assessment that names none, and their parameters."""

_UNDEFENDED, _DEFENDED = "none", "declared"
"""Names of the stack."""
_ROUNDING = 0.02
"""Pixels may be so far outside of [0, 1] when mean and std are taken back."""
_CALL = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)(?P<call>\(.*\))?", re.S)
_LEAST_PUBLIC = 2


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
    for name, parameters in chosen.items():
        if missing := grant.lacks(create(name, parameters).required()):
            raise FedsimError(f"attack {name} {missing}")
    source = run_folder(Path(tapped), run)
    exchanges = read_exchanges(source)
    homes = [truth] if isinstance(truth, str | Path) else list(truth)
    said: dict[str, Testimony] = {}
    for home in homes:
        said |= read_witnessed(Path(home), exchanges[0].run_id)
    picked = _pick(exchanges, said, rounds, clients)
    built = model if isinstance(model, nn.Module) else built_model(model)
    if type(built).__module__ == "__main__":
        raise FedsimError(
            f"model: {type(built).__name__} is defined in the script itself, where the processes "
            "that attack do not find it; move it to a module"
        )
    freeze_unsent(built, picked[0].exchange, prefix)
    pixels = _Pixels.of(mean, std)
    shape = input_shape or _shape(picked[0].testimony)
    mode: Mode = "train" if picked[0].testimony.said.training_mode else "eval"
    subject = Subject(
        built,
        input_shape=shape,
        classes=classes or _classes(built, shape),
        mean=mean,
        std=std,
        mode=mode,
    )
    notes = [f"tap, left out: {line}" for line in left_out(source)]
    plan = _Plan(answer=answer, local=local, mode=mode, defenses=defenses, notes=notes)
    with locked(folder), fixed(1):
        seen: dict[str, tuple[Observation, _Picked]] = {}
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
            save_truth(_truth(each, pixels), folder, observation.id, each.number)
            seen[observation.id] = observation, each
        guesser = _guesser(said, picked, pixels, notes)
        context = _Context(
            name=_slug(name or _package(model)),
            model=type(built).__name__,
            grant=grant,
            seen=seen,
        )
        models = live.kept(subject.spec.name)
        _attack(folder, context, chosen, guesser, models, workers, quiet)
        found = sorted(
            record.read_lines(folder / "results.jsonl"),
            key=lambda row: (row["attack"]["label"], row["round"], row["client"]),
        )
        rows.add_controls(found, folder)
        record.write_lines(folder / "results.jsonl", found)
        record.write_lines(folder / "rounds.jsonl", _round_rows(exchanges, stack))
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
                "again": _command(
                    source,
                    model,
                    homes,
                    rounds,
                    {
                        "mean": mean and _listed(mean),
                        "std": std and _listed(std),
                        "input-shape": input_shape and _listed(input_shape),
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


_BASIS = (
    "recording: made by fedsim.tap of an app that is not fedsim's; truth is what fedsim.witness "
    "saw the model being called with",
    "accuracy and ε: not measured and not accounted, since a recording tells neither",
)


@dataclass(frozen=True)
class _Picked:
    """An exchange that is attacked, and its truth."""

    exchange: Exchange
    testimony: Testimony
    number: int
    """Of the client."""


def _pick(
    exchanges: Sequence[Exchange],
    said: Mapping[str, Testimony],
    rounds: Collection[int] | Literal["last"],
    clients: int,
) -> list[_Picked]:
    """Returns the exchanges that are attacked: those with truth, of the chosen rounds and clients.

    Raises:
        FedsimError: there is none.
    """
    known = [each for each in exchanges if each.message_id in said]
    if not known:
        raise FedsimError(
            f"--truth: nothing was witnessed of any of {number_of(len(exchanges), 'exchange')} of "
            "this recording; name the folder that fedsim.witness wrote to during the same run"
        )
    wanted = {known[-1].round} if rounds == "last" else set(rounds)
    numbers = _numbers(exchanges, said)
    picked: list[_Picked] = []
    for round in sorted(wanted):
        own = sorted((e for e in known if e.round == round), key=lambda e: numbers[e.node_id])
        picked += [_Picked(e, said[e.message_id], numbers[e.node_id]) for e in own[:clients]]
    if not picked:
        there = sorted({each.round for each in known})
        raise FedsimError(f"rounds: expected some of {there}, got {sorted(wanted)}")
    for each in picked:
        if each.testimony.said.left_out:
            raise FedsimError(
                f"{each.testimony.path}: the witness left out "
                f"{number_of(each.testimony.said.left_out, 'image')}, so that the truth is not "
                "whole; give fedsim.witness a larger max_images, or attack another client"
            )
    return picked


def _numbers(exchanges: Sequence[Exchange], said: Mapping[str, Testimony]) -> Mapping[int, int]:
    """Numbers each node: by its partition-id where all have one, else in order of node."""
    nodes = sorted({each.node_id for each in exchanges})
    partitions = {t.said.node_id: t.said.partition for t in said.values()}
    known = [partitions.get(node) for node in nodes]
    given = [number for number in known if number is not None and 0 <= number < 1_000_000]
    if len(given) == len(nodes) == len(set(given)):
        return dict(zip(nodes, given, strict=True))
    return {node: place for place, node in enumerate(nodes)}


class _Plan:
    """What is known of the app's training, and what has to be said of it."""

    def __init__(
        self,
        *,
        answer: Answer,
        local: Mapping[str, float] | None,
        mode: Mode,
        defenses: Sequence[Mapping[str, object]],
        notes: list[str],
    ) -> None:
        self._answer = answer
        self._local = None if local is None else dict(local)
        self._mode = mode
        self._refs = [
            PluginRef(name=str(each.get("name")), parameters=_resolved(each)) for each in defenses
        ]
        self._stack = build_stack(self._refs)
        self.notes = notes

    def training(self, each: _Picked) -> LocalTraining:
        """Returns the local training of one client, as attacks are told it."""
        said = each.testimony.said
        if self._answer == "gradient":
            return gradient_of(said.images, self._mode)
        if self._local is None:
            return self._witnessed(each).training()
        unknown = set(self._local) - {"batch_size", "epochs", "lr", "momentum"}
        if unknown or not {"batch_size", "lr"} <= set(self._local):
            raise FedsimError(
                "local: expected batch_size and lr, and maybe epochs and momentum, got "
                f"{', '.join(sorted(self._local)) or 'nothing'}"
            )
        examples = each.exchange.number(EXAMPLES)
        if examples is None or not 1 <= examples < 2**31:
            raise FedsimError(
                f"{each.exchange.path}: the client does not say {EXAMPLES!r}, from which its steps "
                "follow; leave local out, so that it is read from the witness"
            )
        declared = Local.declared(
            int(examples),
            batch_size=int(self._local["batch_size"]),
            epochs=int(self._local.get("epochs", 1)),
            lr=float(self._local["lr"]),
            momentum=float(self._local.get("momentum", 0.0)),
            mode=self._mode,
        )
        if declared.steps != said.steps:
            self.notes.append(
                f"local: {number_of(declared.steps, 'step')} follow from what was declared, and "
                f"the witness saw {said.steps}"
            )
        return declared.training()

    def _witnessed(self, each: _Picked) -> Local:
        said = each.testimony.said
        if said.optimizer is None or "lr" not in said.settings:
            raise FedsimError(
                f"{each.testimony.path}: the witness saw no optimizer, so that the learning rate "
                "is not known; say how the app trains (--batch-size and --lr), or that it sends a "
                "gradient (--answer gradient)"
            )
        if "SGD" not in said.optimizer and "DP" not in said.optimizer:
            self.notes.append(
                f"local: clients step with {said.optimizer}, and attacks take steps for those of "
                "SGD: what they miss says little"
            )
        epochs = max(1, round(sum(said.sizes) / said.images))
        if epochs > 1 and said.steps > epochs:
            self.notes.append(
                f"local: {epochs} epochs of several batches are attacked as one epoch of the same "
                "total weight, which is an approximation"
            )
        if len(set(said.sizes)) > 1:
            self.notes.append("local: batches differ in size, and attacks take them for equal ones")
        return Local(
            examples=said.images,
            steps=said.steps,
            per_epoch=max(1, round(said.steps / epochs)),
            lr=said.settings["lr"],
            momentum=said.settings.get("momentum", 0.0),
            mode=self._mode,
        )

    def defended(
        self, training: LocalTraining
    ) -> tuple[str, tuple[Mapping[str, object], ...], Effect]:
        """Returns name, announcement and effect of what clients do to their update."""
        if not self._refs:
            return _UNDEFENDED, (), Effect()
        told = announced(self._stack, self._refs, training, None)
        return _DEFENDED, told, self._stack.effect(training)


def _resolved(each: Mapping[str, object]) -> dict[str, Any]:
    from fedsim.scenario.build import plugin_class

    plugin = plugin_class("fedsim.defenses", str(each.get("name")))
    given = {key: value for key, value in each.items() if key != "name"}
    return plugin.model_validate(given).model_dump(mode="json")


@dataclass(frozen=True)
class _Pixels:
    """Takes the app's normalization back."""

    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @classmethod
    def of(cls, mean: Sequence[float] | None, std: Sequence[float] | None) -> _Pixels:
        return cls(
            None if mean is None else tuple(map(float, mean)),
            None if std is None else tuple(map(float, std)),
        )

    def __call__(self, images: Tensor, what: Path) -> Tensor:
        """Returns pixels in [0, 1] of normalized `images`.

        Raises:
            FedsimError: they are not in [0, 1].
        """
        for option, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != images.shape[1]:
                raise FedsimError(
                    f"{option}: expected {number_of(images.shape[1], 'number')}, one a channel, "
                    f"got {len(values)}"
                )
        std = torch.tensor(self.std or (1.0,)).view(1, -1, 1, 1)
        mean = torch.tensor(self.mean or (0.0,)).view(1, -1, 1, 1)
        pixels = images * std + mean
        low, high = float(pixels.min()), float(pixels.max())
        if low < -_ROUNDING or high > 1 + _ROUNDING:
            raise FedsimError(
                f"{what}: pixels are {low:.3g} to {high:.3g} with this mean and std, and not in "
                "[0, 1]; say what the app normalizes by (--mean 0.5,0.5,0.5 --std 0.5,0.5,0.5)"
            )
        return pixels.clamp(0, 1)


def _truth(each: _Picked, pixels: _Pixels) -> GroundTruth:
    images, labels = each.testimony.images()
    return GroundTruth(images=pixels(images, each.testimony.path), labels=labels)


def _guesser(
    said: Mapping[str, Testimony],
    picked: Sequence[_Picked],
    pixels: _Pixels,
    notes: list[str],
) -> scoring.Guesser:
    """Learns the zero-information guess from what other clients trained on.

    Where nobody else was witnessed, from the victims themselves: a guess that is better than any
    outsider's, so that gains over it are understated.
    """
    victims = {each.exchange.node_id for each in picked}
    others = {t.said.node_id: t for t in said.values() if t.said.node_id not in victims}
    pool = list(others.values()) or [each.testimony for each in picked]
    images = [(pixels(each.images()[0], each.path), each.images()[1]) for each in pool]
    found = torch.cat([each for each, _ in images])
    if not others:
        notes.append(
            "guess: learned from the victims' own images, as no other client was witnessed; gains "
            "over it are understated"
        )
    levels = (found * 255).round().to(torch.uint8)
    return scoring.Guesser(levels, torch.cat([labels for _, labels in images]))


def _attack(
    folder: Path,
    context: _Context,
    attacks: Mapping[str, Mapping[str, object]],
    guesser: scoring.Guesser,
    models: Mapping[str, Classifier],
    workers: int | None,
    quiet: bool,
) -> None:
    """Runs every attack on every observation; its rows go to results.jsonl as they come."""
    jobs = [
        Job(
            observation=files.path_of(folder, id),
            attack=name,
            label=name,
            parameters=dict(create(name, parameters).model_dump(mode="json")),
            restarts=1,
        )
        for name, parameters in attacks.items()
        for id in context.seen
    ]
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


@dataclass(frozen=True)
class _Context:
    """What every row of an assessment has in common."""

    name: str
    model: str
    grant: Grant
    seen: Mapping[str, tuple[Observation, _Picked]]

    def row(self, job: Job, result: Result) -> Row:
        """Returns the line of one attack on one exchange."""
        observation = result.observation
        exchange = self.seen[observation.id][1].exchange
        return {
            "scenario": self.name,
            "variant": {},
            "dataset": "the app's own data",
            "model": {"name": self.model, "parameters": {}},
            "learner": "sgd",
            "release": None,
            "training": asdict(observation.training),
            "defense": {
                "name": observation.id.partition("/")[0],
                "stack": [dict(each) for each in observation.defense],
            },
            "attack": {
                "name": job.attack,
                "label": job.label,
                "restarts": job.restarts,
                "parameters": dict(job.parameters),
            },
            "vantage": observation.vantage,
            "server": observation.server,
            "knowledge": self.grant.model_dump(),
            "batch_size": observation.training.batch_size,
            "round": observation.round,
            "client": observation.client,
            "trial": 0,
            "releases": 1,
            "observation": observation.id,
            "seed": result.seed,
            "status": result.status,
            "reason": result.reason,
            "metrics": result.metrics,
            "per_image": result.per_image,
            "victims": result.victims,
            "baseline": result.baseline,
            "control": {"other_update": None},
            "theory": {"tensor_rate": result.tensor_rate},
            "utility": {"train_loss": exchange.number("train_loss")},
            "privacy": {},
            "cost": result.cost,
        }


def _round_rows(exchanges: Sequence[Exchange], stack: str) -> list[Row]:
    """Returns a line for each recorded round."""
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


def _shape(testimony: Testimony) -> tuple[int, int, int]:
    channels, height, width = testimony.images()[0].shape[1:]
    return channels, height, width


def _classes(model: nn.Module, shape: tuple[int, int, int]) -> int:
    """Returns how many outputs the model has.

    Raises:
        FedsimError: it does not take such images.
    """
    was_training = model.training
    try:
        with torch.no_grad():
            answer: Any = model.eval()(torch.zeros(2, *shape))
        answer = getattr(answer, "logits", answer)
        return int((answer[0] if isinstance(answer, tuple) else answer).shape[-1])
    except Exception as error:  # somebody else's code, of any kind
        raise FedsimError(
            f"model: it does not take images of shape {shape}: {type(error).__name__}: {error}; "
            "say --input-shape and --classes"
        ) from error
    finally:
        model.train(was_training)


def built_model(named: str) -> nn.Module:
    """Returns the model that `named` says: `module:Class` or `module:function(key=value, ...)`.

    The module is found as Python finds it from the current folder. Values are literals.

    Raises:
        FedsimError: it cannot be imported, built, or is no model.
    """
    match = _CALL.fullmatch(named.strip())
    if not match:
        raise FedsimError(
            f"--model: expected module:Class or module:function(key=value), got {named!r}"
        )
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


def _command(
    source: Path,
    model: nn.Module | str,
    homes: Sequence[str | Path],
    rounds: Collection[int] | Literal["last"],
    options: Mapping[str, object],
    plugins: Mapping[str, Mapping[str, Mapping[str, object]]],
) -> str:
    """Returns the command that makes the same assessment.

    A model that was handed over as an object has to be named in it by who runs it.
    """
    named = model if isinstance(model, str) else f"{type(model).__module__}:{type(model).__name__}"
    words = ["fedsim", "assess", str(source.absolute()), "--model", named, "--out", "again"]
    for home in homes:
        words += ["--truth", str(Path(home).absolute())]
    words += ["--rounds", rounds if isinstance(rounds, str) else _listed(sorted(rounds))]
    for option, value in options.items():
        if value not in (None, ""):
            words += [f"--{option}", str(value)]
    for option, chosen in plugins.items():
        for name, parameters in chosen.items():
            own = [f"{k}={v}" for k, v in parameters.items() if k != "name" and v is not None]
            words += [f"--{option}", name + (":" + ",".join(own) if own else "")]
    return shlex.join(words)


def _listed(values: Sequence[float]) -> str:
    return ",".join(map(str, values))


def _package(model: nn.Module | str) -> str:
    module = model.partition(":")[0] if isinstance(model, str) else type(model).__module__
    return module.partition(".")[0]


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_+-]+", "-", name).strip("-.+_")[:64] or "app"
