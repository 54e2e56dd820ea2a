"""The lines of an assessment, as those of any other run, and the command that repeats it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedsim.assessment.settings import AssessSettings
from fedsim.assessment.truth import Picked
from fedsim.attacking.jobs import Job, Result
from fedsim.contracts.grant import Grant
from fedsim.recording.exchanges import Exchange
from fedsim.results.lines import ResultRow, describe_tensor_bound
from fedsim.results.record import Row
from fedsim.scoring import NOT_LEARNED
from fedsim.types import Observation


@dataclass(frozen=True)
class AssessmentContext:
    """Facts that every result of an assessment shares.

    `name` is the title of the report, `model` the class name of the app's model, and `grant` what
    the attacker was granted.
    """

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
        """Returns the line of `results.jsonl` for one attack on one exchange."""
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


def round_rows(exchanges: Sequence[Exchange], stack: str) -> list[Row]:
    """Returns a line of `rounds.jsonl` for each recorded round, in the order of rounds.

    `stack` names the clients' defenses. `participants` numbers the answers from 0. `train_loss` is
    the plain mean of the losses that are stated; None if none is, or if it is not finite.
    """
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


def command_of(
    source: Path, model: nn.Module | str, homes: Sequence[str | Path], asked: AssessSettings
) -> str:
    """Returns the shell command that repeats the assessment of the run in `source`.

    A model that is an object is named by its class, which may not be what builds it.
    """
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


def slug(name: str) -> str:
    """Returns `name` as a file may be called, of at most 64 characters; `app` if none is left."""
    return re.sub(r"[^A-Za-z0-9_+-]+", "-", name).strip("-.+_")[:64] or "app"
