"""Updates of small ResNets, whose bodies are deep enough to be taken apart."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.grant import Knowledge
from fedsim.data.bundled import Photos
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, LocalTraining, Observation
from fedsim_attacks.images_from_features._stages import StagedBody
from fedsim_attacks.images_from_features.factored_inversion import (
    FactoredInversion,
    _FactoredInversionState,
)

HEAD = {"width": 640, "planted": 512, "planted_std": 0.3, "planted_gain": 0.1}
RESNET: dict[str, Any] = {"width": 16, "stem": "imagenet", "norm": "group", "head": HEAD}

VICTIMS = pytest.mark.parametrize(
    ("defense", "mode", "norm"),
    [
        ([], "train", "group"),
        ([], "train", "batch"),
        ([], "eval", "batch"),
        ([{"name": "clip", "norm": 1e-3}], "train", "group"),
        ([{"name": "gradient_pruning", "ratio": 0.9}], "train", "group"),
    ],
    ids=["none", "batch norm", "batch norm, eval", "clip", "pruning"],
)


def photos(count: int) -> tuple[Tensor, Tensor]:
    data = Photos().load()
    chosen = (37 * torch.arange(count) + 5) % 64
    return data.test_images[chosen].float() / 255, data.test_labels[chosen]


def observe(
    defense: list[dict[str, Any]],
    count: int = 2,
    mode: Literal["train", "eval"] = "train",
    model: str = "resnet18",
    steps: int = 1,
    lr: float = 0.001,
    **parameters: Any,
) -> tuple[Observation, GroundTruth]:
    training = LocalTraining(
        algorithm="fedsgd" if steps == 1 else "fedavg",
        steps=steps,
        batch_size=count,
        lr=lr,
        mode=mode,
        batches="same",
    )
    own = RESNET if model == "resnet18" else {"width": 8, "head": HEAD}
    return make_observation(
        *photos(count),
        model=model,
        model_parameters={**own, **parameters},
        defense=defense,
        training=training,
    )


def staged(observation: Observation, width: float = 0.0) -> StagedBody:
    return StagedBody(observation, rng.generator(0, "stages"), width=width)


def descend(
    attack: FactoredInversion, observation: Observation
) -> tuple[_FactoredInversionState, list[type]]:
    """The last state, and the kind of misfit in each step."""
    state = attack.init(observation, Knowledge(), rng.generator(0, "phases"))
    kinds = []
    while not attack.terminate(state):
        state = attack.step(state)
        kinds.append(type(state.phase.misfit))
    return state, kinds
