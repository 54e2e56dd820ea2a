"""What `head_fit` is made of: its objective, the ways out of local minima, and the fit of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.victim import rebuild
from fedsim.scoring import score
from fedsim.testing import make_observation
from fedsim.testing.cases import near
from fedsim.types import GroundTruth, Observation
from fedsim_attacks.head_features import _joint_fit, head_fit
from fedsim_attacks.head_features._head_gradient import (
    HeadGradient,
    Objective,
    WholeHead,
    labels_of,
)
from fedsim_attacks.head_features.head_fit import OutputSolver, propose_splits, random_starts

HEAD = {"width": 4160, "planted": 4096, "planted_std": 0.1, "planted_gain": 0.01}
PRUNED = [{"name": "gradient_pruning", "ratio": 0.8}]


def see(
    count: int = 4, defense: list[dict[str, Any]] | None = None, labels: Tensor | None = None
) -> tuple[HeadGradient, Tensor]:
    """The head's gradient and the true features (N, 36)."""
    images = torch.rand(count, 1, 6, 6, generator=rng.generator(0, "head fit"))
    observation, truth = make_observation(
        images,
        (3 * torch.arange(count)) % 10 if labels is None else labels,
        model="mlp",
        model_parameters={"hidden": [], "head": HEAD},
        defense=defense or [],
    )
    assert truth.features is not None
    return HeadGradient.read(observation), truth.features


def worst(found: Tensor, features: Tensor) -> float:
    """The least cosine of a true feature with the found one that is nearest to it."""
    cosines = F.normalize(features, dim=1) @ F.normalize(found, dim=1).T
    return float(cosines.max(1).values.min())


def solved(
    seen: HeadGradient,
    starts: list[Tensor],
    budget: int = 1500,
    second_starts: Sequence[Tensor] = (),
) -> OutputSolver:
    fit = head_fit.OutputFit.start(seen, starts)
    solver = OutputSolver(attempt=fit, budget=budget, second_starts=list(second_starts))
    while not solver.finished:
        solver.improve()
    return solver


@pytest.mark.parametrize("defense", [None, PRUNED])
def test_the_truth_explains_everything(defense: list[dict[str, Any]] | None) -> None:
    seen, features = see(defense=defense)
    value = Objective(seen)(features)
    assert value.loss < 1e-10
    assert Objective(seen)(near(features, 0.3)).loss > 1e-4
    # One error signal an image: negative at its label only, and none in all.
    assert value.errors.argmin(0).tolist() == [0, 3, 6, 9]
    torch.testing.assert_close(value.errors.sum(0), torch.zeros(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("defense", [None, PRUNED])
def test_the_slope_is_the_derivative(defense: list[dict[str, Any]] | None) -> None:
    seen, features = see(defense=defense)
    objective, at = Objective(seen), near(features, 0.3)
    along = torch.randn(at.shape, generator=rng.generator(2, "along"))
    along *= 1e-3 * at.norm() / along.norm()
    rise = objective(at + along).loss - objective(at - along).loss
    expected = 2 * (objective(at).slope * along).sum()
    assert float(rise) == pytest.approx(float(expected), rel=0.02)


def test_removed_entries_count_where_they_are_predicted_too_large() -> None:
    """The residual of a removed entry is what exceeds the least kept one; of a kept one, all."""
    seen, features = see(defense=PRUNED)
    at = near(features, 0.3)
    value = Objective(seen)(at)
    predicted = value.errors @ seen.activation(at @ seen.hidden.T + seen.bias)
    kept = seen.grad_output != 0
    bound = seen.grad_output[kept].abs().min()
    excess = predicted.abs().sub(bound).clamp(min=0) * predicted.sign()
    assert bool((excess[~kept] != 0).any())
    expected = torch.where(kept, seen.grad_output - predicted, -excess)
    torch.testing.assert_close(value.residual, expected, atol=1e-5, rtol=1e-4)
    # The best D: nothing of the residual is in the hidden values' span.
    hidden = seen.activation(at @ seen.hidden.T + seen.bias)
    assert bool((value.residual @ hidden.T).norm() < 1e-4 * value.residual.norm() * hidden.norm())


@pytest.mark.parametrize("std", [0.001, 0.1])
def test_noise_is_estimated_from_outside_the_span(std: float) -> None:
    seen, features = see(defense=[{"name": "gaussian_noise", "std": std}])
    assert seen.noise == pytest.approx(std**2, rel=0.05)
    objective = Objective(seen)
    loss = float(objective(features).loss)
    assert loss == pytest.approx(objective.noise_floor(seen.noise), rel=0.1)
    assert see()[0].noise == 0


def test_a_move_frees_a_feature_that_stands_for_two_images() -> None:
    """Two images of one label have one feature; what is left over corrects it."""
    seen, features = see(6, labels=torch.tensor([1, 1, 4, 4, 7, 9]))
    mean = (features[0] + features[1]) / 2
    stuck = torch.cat([mean[None], near(mean[None], 0.2), features[2:]])
    first = next(iter(propose_splits(Objective(seen), stuck)))
    assert worst(first, features) > worst(stuck, features) + 0.01
    assert worst(solved(seen, [first], 400).best[1], features) > 0.9999


def see_alike() -> tuple[HeadGradient, Tensor]:
    """Eight images of two labels, those of one alike."""
    base = torch.rand(2, 1, 6, 6, generator=rng.generator(4, "alike"))
    shift = torch.rand(8, 1, 6, 6, generator=rng.generator(5, "alike"))
    observation, truth = make_observation(
        (base.repeat_interleave(4, 0) + shift) / 2,
        torch.tensor([1, 1, 1, 1, 4, 4, 4, 4]),
        model="mlp",
        model_parameters={"hidden": [], "head": HEAD},
    )
    assert truth.features is not None
    return HeadGradient.read(observation), truth.features


def fitted(seen: HeadGradient, seed: int, second_starts: list[Tensor]) -> OutputSolver:
    starts = [*random_starts(seen, 1, rng.generator(seed, "start"))]
    return solved(seen, starts, second_starts=second_starts)


@pytest.mark.slow
def test_moves_are_what_frees_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, features = see_alike()
    for moving in (True, False):
        if not moving:
            monkeypatch.setattr(head_fit, "propose_splits", lambda objective, features: iter(()))
        found = [worst(fitted(seen, seed, []).best[1], features) for seed in range(3)]
        assert min(found) > 0.999 if moving else min(found) < 0.95, found


def test_rows_tell_features_that_few_entries_of_the_output_do_not() -> None:
    """Pruning per tensor leaves ∂L/∂A few entries, and ∂L/∂W its share."""
    seen, features = see(defense=[{"name": "gradient_pruning", "ratio": 0.7, "scope": "tensor"}])
    assert head_fit.rows_suffice(seen)
    start = near(features, 0.05)
    errors = Objective(seen)(features).errors
    found = start
    for _ in range(6):
        found = head_fit.fit_rows(seen, found, errors)
    assert head_fit.rows_unexplained(seen, features, errors) < 1e-8
    assert head_fit.rows_unexplained(seen, start, errors) > 1e-4
    assert worst(start, features) < 0.999 < worst(found, features)
    # A coordinate that few rows tell of may be off, which one by how the processor rounds.
    off = [float((each - features).abs().median()) for each in (start, found)]
    assert off[1] < 0.02 * off[0]


JOINT_HEAD = {"width": 1600, "planted": 1024, "planted_std": 0.1, "planted_gain": 0.1}
LABELS = [2, 2, 4, 4]


def observe_alike(
    std: float, clip: float | None = None, **head: Any
) -> tuple[Observation, GroundTruth]:
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
        model_parameters={"hidden": [], "head": {**JOINT_HEAD, **head}},
        defense=defense,
    )


@pytest.mark.parametrize("divided", [False, True])
def test_it_is_the_squared_distance_of_the_heads_own_gradient(divided: bool) -> None:
    observation, truth = observe_alike(1e-4, divided=divided)
    seen = HeadGradient.read(observation)
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
        observation, truth = observe_alike(std, clip)
        assert truth.features is not None
        value = WholeHead(HeadGradient.read(observation), truth.labels)(truth.features)
        assert float(value.detach()) == pytest.approx(1, rel=0.02)


def test_it_applies_where_features_stand_out_of_noise() -> None:
    for std, expected in ((0.0, False), (1e-4, True), (1.0, False)):
        assert _joint_fit.joint_fit_applies(HeadGradient.read(observe_alike(std)[0])) == expected


def worst_error(name: str, observation: Observation, truth: GroundTruth) -> float:
    found = solve(create(name), observation, Knowledge(), seed=1).reconstruction
    return max(score(found, truth).per_image["feature_error"])


@pytest.mark.slow
def test_norms_are_found_behind_clipping_and_noise() -> None:
    """∂L/∂A alone does not tell a factor that is the client's from one that is the features'."""
    case = observe_alike(1e-4, 0.5)
    assert worst_error("head_fit", *case) > 0.5
    assert worst_error("best_features", *case) < 0.1


def test_all_of_the_gradient_tells_more_than_its_part() -> None:
    case = observe_alike(1e-3)
    assert worst_error("best_features", *case) < 1.5 * worst_error("head_fit", *case) < 0.01


def test_labels_are_what_features_do_not_explain() -> None:
    """Of a confident model D is small at the label, and any other entry may be less by noise."""
    observation, truth = observe_alike(0, planted=0)
    seen = HeadGradient.read(observation)
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
