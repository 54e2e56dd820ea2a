"""Two-layer heads of small multi-layer perceptrons, and what attacks on them find."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.scoring import Scores, score
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, Observation
from fedsim_attacks.head_features._head_gradient import HeadGradient

HEAD = {"width": 4160, "planted": 4096, "planted_std": 0.1}


def draw(count: int, name: str = "feature example", side: int = 6, seed: int = 0) -> Tensor:
    return torch.rand(count, 1, side, side, generator=rng.generator(seed, name))


def observe(
    images: Tensor | int,
    head: dict[str, Any] | None = None,
    *,
    labels: list[int] | None = None,
    hidden: list[int] | None = None,
    **case: Any,
) -> tuple[Observation, GroundTruth]:
    """Without `hidden` layers features are the normalized images: d = 36, their norm is about 7."""
    images = draw(images) if isinstance(images, int) else images
    truth = (3 * torch.arange(len(images))) % 10 if labels is None else torch.tensor(labels)
    parameters = {"hidden": hidden or [], "head": {**HEAD, **(head or {})}}
    return make_observation(images, truth, model="mlp", model_parameters=parameters, **case)


def read(case: tuple[Observation, GroundTruth]) -> tuple[HeadGradient, Tensor]:
    """The head's gradient and the true features."""
    return HeadGradient.read(case[0]), case[1].features


def attack(name: str, observation: Observation, truth: GroundTruth, **parameters: Any) -> Scores:
    found = solve(create(name, parameters), observation, Knowledge(), seed=1).reconstruction
    return score(found, truth)


def span_error(name: str, case: tuple[Observation, GroundTruth], **parameters: Any) -> float:
    return attack(name, *case, **parameters)["subspace_error"]
