"""The fit of a head's whole gradient: its formula, its floor, and what ∂L/∂A alone cannot tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedsim import rng
from fedsim.contracts.attack import create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.victim import rebuild
from fedsim.scoring import score
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, Observation
from fedsim_attacks.head_features import _joint_fit
from fedsim_attacks.head_features._head_gradient import HeadGradient, WholeHead, labels_of

HEAD = {"width": 1600, "planted": 1024, "planted_std": 0.1, "planted_gain": 0.1}
LABELS = [2, 2, 4, 4]


def observe(std: float, clip: float | None = None, **head: Any) -> tuple[Observation, GroundTruth]:
    """Two images of each label, alike as those of a barely trained model: d = 36."""
    stream = rng.generator(0, "joint example")
    images = (0.5 + 0.5 * torch.rand(1, 1, 6, 6, generator=stream)).repeat(4, 1, 1, 1)
    images = (images + 0.2 * torch.randn(4, 1, 6, 6, generator=stream)).clamp(0, 1)
    defense: list[dict[str, Any]] = [{"name": "gaussian_noise", "std": std}] if std else []
    if clip:
        defense = [{"name": "clip", "norm": clip}, *defense]
    return make_observation(
        images,
        torch.tensor(LABELS),
        model="mlp",
        model_parameters={"hidden": [], "head": {**HEAD, **head}},
        defense=defense,
    )


@pytest.mark.parametrize("divided", [False, True])
def test_it_is_the_squared_distance_of_the_heads_own_gradient(divided: bool) -> None:
    observation, truth = observe(1e-4, divided=divided)
    seen = HeadGradient.of(observation)
    assert truth.features is not None
    features = truth.features + 0.1 * torch.randn(4, 36, generator=rng.generator(1, "off"))
    head = rebuild(observation).head
    loss = F.cross_entropy(head(features), truth.labels)
    names = [name for name, _ in head.named_parameters()]
    slopes = torch.autograd.grad(loss, list(head.parameters()))
    left = [
        slope - observation.update[f"head.{name}"]
        for name, slope in zip(names, slopes, strict=True)
    ]
    count = sum(each.numel() for each in left)
    expected = sum(each.double().square().sum() for each in left) / count / 1e-8
    value = WholeHead(seen, truth.labels)(features).detach()
    torch.testing.assert_close(value, expected, rtol=0.02, atol=0)  # the noise is estimated


def test_at_the_truth_the_noise_is_left() -> None:
    for clip in (None, 0.05):
        std = 1e-3 if clip is None else 1e-4
        observation, truth = observe(std, clip)
        assert truth.features is not None
        value = WholeHead(HeadGradient.of(observation), truth.labels)(truth.features)
        assert float(value.detach()) == pytest.approx(1, rel=0.02)


def test_it_applies_where_features_stand_out_of_noise() -> None:
    for std, expected in ((0.0, False), (1e-4, True), (1.0, False)):
        assert _joint_fit.joint_fit_applies(HeadGradient.of(observe(std)[0])) == expected


def worst_error(name: str, observation: Observation, truth: GroundTruth) -> float:
    found = solve(create(name), observation, Knowledge(), seed=1).reconstruction
    return max(score(found, truth).per_image["feature_error"])


def test_norms_are_found_behind_clipping_and_noise() -> None:
    """∂L/∂A alone does not tell a factor that is the client's from one that is the features'."""
    case = observe(1e-4, 0.5)
    assert worst_error("head_fit", *case) > 0.5
    assert worst_error("best_features", *case) < 0.1


def test_all_of_the_gradient_tells_more_than_its_part() -> None:
    case = observe(1e-3)
    assert worst_error("best_features", *case) < 1.5 * worst_error("head_fit", *case) < 0.01


def test_labels_are_what_features_do_not_explain() -> None:
    """Of a confident model D is small at the label, and any other entry may be less by noise."""
    observation, truth = observe(0, planted=0)
    seen = HeadGradient.of(observation)
    assert truth.features is not None
    hidden = seen.activation(truth.features @ seen.hidden.T + seen.bias)
    sure = F.one_hot(truth.labels, 10).float()
    weights = torch.linalg.lstsq(hidden, 8 * sure).solution.T
    seen = replace(seen, output=weights)
    errors = ((hidden @ weights.T).softmax(1) - sure).T / 4
    assert float(errors.abs().max()) < 0.01
    errors[7] -= 0.01
    assert errors.argmin(0).tolist() == [7] * 4
    assert labels_of(seen, truth.features, errors).tolist() == LABELS
    clipped = replace(seen, clipped=True)
    errors[7] += 0.01
    assert labels_of(clipped, truth.features, 0.3 * errors).tolist() == LABELS
