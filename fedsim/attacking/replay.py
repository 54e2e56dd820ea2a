"""Attacks one recording on any machine, without Flower and the data that it was made from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsim import scoring
from fedsim.attacking import jobs
from fedsim.attacking.knowledge import (
    join_solutions,
    load_earlier,
    load_granted,
    questions,
    unanswerable,
)
from fedsim.attacking.observe import checked_examples
from fedsim.attacking.question import on_cpu
from fedsim.contracts.attack import Attack, AttackState, create
from fedsim.contracts.grant import Grant
from fedsim.models.base import normalize
from fedsim.models.local import gradient, local_update, loss_function
from fedsim.models.victim import rebuild
from fedsim.recording import files
from fedsim.recording.truth import count, load_truth
from fedsim.system.device import move_tensors, resolve_device
from fedsim.system.threads import fix_within
from fedsim.types import FedsimError, GroundTruth, Observation, Reconstruction, Truth


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
    truth: str | Path | tuple[Tensor, Tensor] | None = None,
    on_progress: jobs.OnProgress | None = None,
) -> tuple[Reconstruction, dict[str, Any]]:
    """Attacks one recording.

    Args:
        observation: A recording, or the path of its JSON file.
        name: Name of the attack.
        parameters: The attack's hyper-parameters; others are at their defaults.
        restarts: Number of starting points, at least 1; the one with the least own loss is kept.
        grant: Knowledge that the threat model grants, as `knowledge` in a scenario.
        seed: Seed of the attack; None: that of an attack of this name in the recorded run.
        device: Where a recording given by path is attacked (`cpu`, `cuda`, `auto`).
        threads: Number of threads that compute, at least 1; with as many as the recorded run had
            (`threads` of its scenario), results on its machine are the same to the byte.
        truth: What the client really used, as (images, labels): pixels in [0, 1] of shape (N, C, H,
            W), and N integers. Or the run's folder that holds `truth/`, and the public images; for
            a recording given by path it is found by itself. Without truth nothing is scored.
        on_progress: Called with the attack's progress now and then; None: nothing is.

    Returns:
        The reconstruction, and a row. The row has the id of the `observation`, the resolved
            `attack`, the kind of `server`, the granted `knowledge`, and the `cost`. Null without
            truth are `metrics`, the number of images that are `missing` from the reconstruction and
            left out of metrics, and the `simulation_error`. Further fields are those of
            `results.jsonl`, which docs/formats-results.md describes.

    Raises:
        FedsimError: the recording or the attack cannot be used, or the attack failed.
        ValidationError: a parameter is unknown, missing or out of its range.
    """
    path = None if isinstance(observation, Observation) else Path(observation)
    observation, root, victim = _find(observation, truth, device)
    chosen = create(name, parameters)
    if threads < 1:
        raise FedsimError(f"threads: expected at least 1, got {threads}")
    _refuse_unfit(chosen, name, observation, victim, grant)
    # Sources are asked of the records of all clients, and `victim` has those of one.
    if chosen.asked_of_sources and path and root and victim:
        victim = jobs.add_all_sources(victim, root, path, observation)
    with fix_within(threads):
        start = jobs.seed_of(observation, name) if seed is None else seed
        public = load_granted(root, grant)
        seen = load_earlier(chosen, path, observation) if path else ()
        seen = tuple(move_tensors(each, observation.device) for each in seen)
        asked = questions(
            chosen, observation, victim, grant, start, public=public, restarts=restarts, seen=seen
        )
        solution = join_solutions([each.answer(on_progress) for each in asked])
        found = on_cpu(solution.reconstruction)
        scores = scoring.score(found, victim) if victim else None
        told = scoring.certificate(found, victim, scores.assignments if scores else {})
    return found, {
        "observation": observation.id,
        "attack": {
            "name": name,
            "restarts": restarts,
            "parameters": chosen.model_dump(mode="json"),
            "brought": list(chosen.brings()),
        },
        "server": observation.server,
        "knowledge": grant.model_dump(),
        "metrics": scores and scores.metrics(),
        "missing": scores and scores.missing,
        "certificate": told and asdict(told),
        "features_by": found.features_by,
        "stages": found.stages,
        "simulation_error": simulation_error(observation, victim),
        "cost": jobs.cost(solution),
    }


def _find(
    observation: Observation | str | Path,
    truth: str | Path | tuple[Tensor, Tensor] | None,
    device: str,
) -> tuple[Observation, Path | None, Truth | None]:
    root = Path(truth) if isinstance(truth, str | Path) else None
    if not isinstance(observation, Observation):
        path = Path(observation)
        observation = files.load_observation(path, resolve_device(device))
        root = root or files.root_of(path)
    if isinstance(truth, tuple):
        images, labels = checked_examples(
            *truth, observation.model, observation.num_images, where="truth: "
        )
        return observation, root, GroundTruth(images=images, labels=labels)
    if root is None or not count(root, observation.id):
        return observation, root, None
    return observation, root, load_truth(root, observation.id, observation.num_clients)


def _refuse_unfit(
    attack: Attack[AttackState],
    name: str,
    observation: Observation,
    victim: Truth | None,
    grant: Grant,
) -> None:
    if victim is None and (secrets := grant.from_truth()):
        raise FedsimError(
            f"{', '.join(secrets)}: only the truth holds that, and none was found: name the "
            "run's folder (--truth), or grant less"
        )
    if reason := unanswerable(attack, observation, victim):
        raise FedsimError(reason)
    if missing := grant.lacks(attack.required()):
        raise FedsimError(f"attack {name} {missing}")


def simulation_error(observation: Observation, truth: Truth | None) -> float | None:
    """Returns how far the update that attacks simulate at the truth is from the recorded one.

    It is the L2 distance over the recorded update's length: 0 to rounding where attacks know all of
    the client's training and defense. Noise makes it larger, and all that attacks do not model,
    such as the order of images in several steps.

    None stands for no truth of images, several clients, batches that vary in size or were not all
    recorded, an update of 0, or a simulation that diverges.
    """
    training = observation.training
    parts = training.distinct_batches
    several = observation.num_clients > 1 or training.sizes_vary
    known = truth.tensors() if truth else {}
    if "images" not in known or several or len(known["images"]) % parts:
        return None
    device = observation.device
    # The client's dropout masks are not recorded; a mask drawn here would be another one.
    model, training = rebuild(observation), replace(training, dropout=0.0)
    buffers = {name: value.clone() for name, value in observation.buffers.items()}
    loss = loss_function(model, buffers, training)
    images = normalize(known["images"].to(device), observation.model)
    labels = known["labels"].to(device)
    batches = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))
    # Where batches are the `same`, the one batch serves every step.
    batches *= training.steps // parts
    simulated = local_update(partial(gradient, loss), observation.parameters, batches, training)
    off, size = (
        math.sqrt(math.fsum(float(each.detach().double().square().sum()) for each in tensors))
        for tensors in (
            [simulated[name] - value for name, value in observation.update.items()],
            list(observation.update.values()),
        )
    )
    # A simulation that diverges has no meaningful distance, nor has an update of zeros.
    return off / size if size and math.isfinite(off) else None
