"""Attack one recording, anywhere: needs neither Flower nor the data that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsim import scoring
from fedsim.attacking import jobs
from fedsim.attacking.knowledge import Public
from fedsim.attacking.question import on_cpu
from fedsim.attacking.targets import question, unanswerable
from fedsim.contracts.attack import create
from fedsim.contracts.grant import Grant
from fedsim.recording import files
from fedsim.recording.truth import has_truth, load_truth
from fedsim.system.device import resolve_device
from fedsim.system.threads import fixed
from fedsim.types import FedsimError, Observation, Reconstruction, RowTruth, Truth


def attack(
    observation: Observation | str | Path,
    name: str,
    parameters: Mapping[str, object] | None = None,
    *,
    restarts: int = 1,
    grant: Grant = Grant(),
    seed: int | None = None,
    device: str = "cpu",
    threads: int = 1,
    truth: str | Path | None = None,
    on_progress: jobs.OnProgress | None = None,
) -> tuple[Reconstruction, dict[str, Any]]:
    """Attack one recording.

    Args:
        observation: A recording, or the path of its JSON file.
        name: The attack; `parameters` are its hyper-parameters (others at their defaults).
        restarts: Starting points; the one with the least own loss is kept.
        grant: What the threat model grants, as `knowledge` in a scenario.
        seed: Of the attack; default: as in the recorded run, for an attack labelled by its name.
        device: Where a recording given by path is attacked (`cpu`, `cuda`, `auto`).
        threads: That compute, at least 1; the recorded run's (`threads` of its scenario) give the
            same bytes.
        truth: The run's folder that holds `truth/`, and the public images. For a recording given
            by path it is found by itself. Without truth nothing is scored.
        on_progress: Told of the attack's loss now and then.

    Returns:
        The reconstruction, and a row with the observation's id, the resolved attack, the kind of
        server, knowledge, metrics (null without truth), how many images are `missing` from the
        reconstruction, which no metric of images is of (null without truth), and cost.

    Raises:
        FedsimError: the recording or the attack cannot be used, or the attack failed.
    """
    root = Path(truth) if truth else None
    if not isinstance(observation, Observation):
        path = Path(observation)
        observation = files.load_observation(path, resolve_device(device))
        root = root or files.root_of(path)
    known = root is not None and has_truth(root, observation.id)
    victim = load_truth(root, observation.id, observation.num_clients) if root and known else None
    if victim is None and (secrets := grant.from_truth()):
        raise FedsimError(
            f"{', '.join(secrets)}: only the ground truth holds that, and none was found: name the "
            "run's folder (--truth), or grant less"
        )
    if threads < 1:
        raise FedsimError(f"threads: expected at least 1, got {threads}")
    chosen = create(name, parameters)
    if reason := unanswerable(chosen, observation, victim):
        raise FedsimError(reason)
    if missing := grant.lacks(chosen.required()):
        raise FedsimError(f"attack {name} {missing}")
    public = Public.of(root, grant)
    with fixed(threads):
        solution = question(
            chosen,
            observation,
            victim,
            grant,
            jobs.seed_of(observation, name) if seed is None else seed,
            public=public,
            restarts=restarts,
            progress=on_progress,
        )
        found = on_cpu(solution.reconstruction)
        scores = _scores(found, victim)
    return found, {
        "observation": observation.id,
        "attack": {
            "name": name,
            "restarts": restarts,
            "parameters": chosen.model_dump(mode="json"),
        },
        "server": observation.server,
        "knowledge": grant.model_dump(),
        "metrics": scores and scores.metrics(),
        "missing": scores and scores.missing,
        "cost": jobs.cost(solution),
    }


def _scores(found: Reconstruction, truth: Truth | None) -> scoring.Scores | None:
    if truth is None:
        return None
    # Only a run has the public images that a guess is learned from.
    if isinstance(truth, RowTruth):
        return scoring.score_rows(found, truth)
    return scoring.score(found, truth)
