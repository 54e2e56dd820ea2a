"""The tensor attack's formulas against their definitions, and its rate."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import create, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import HeadConfig
from fedsim.models.head import TwoLayerHead
from fedsim.scoring import score
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features.tensor_features import (
    combine_rows,
    derivative_moments,
    fourth_along,
    independent_rows,
    inverse_root,
    order_greedily,
    power_method,
    second_moment,
    third_along,
    third_moment,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=rng.generator(seed, "tensor"), dtype=torch.float64)


def tensors_of(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """H_2, H_3, H_4 of each point, every entry."""
    eye = torch.eye(w.shape[1], dtype=w.dtype)
    two = torch.einsum("ma,mb->mab", w, w)
    three = torch.einsum("mab,mc->mabc", two, w)
    four = torch.einsum("mabc,md->mabcd", three, w)
    for one, pair in (("a", "bc"), ("b", "ac"), ("c", "ab")):
        three = three - torch.einsum(f"m{one},{pair}->mabc", w, eye)
    for pair, other in (("ab", "cd"), ("ac", "bd"), ("ad", "bc")):
        four = four - torch.einsum(f"m{pair},{other}->mabcd", two, eye)
        four = four - torch.einsum(f"m{other},{pair}->mabcd", two, eye)
        four = four + torch.einsum(f"{pair},{other}->abcd", eye, eye)
    return two - eye, three, four


def test_contracted_moments_are_those_of_the_full_tensors() -> None:
    w, g = normal(40, 4), normal(40, seed=1)
    a = F.normalize(normal(4, seed=2), dim=0)
    two, three, four = tensors_of(w)
    mean = g / len(g)
    torch.testing.assert_close(second_moment(g, w), torch.einsum("m,mab->ab", mean, two))
    torch.testing.assert_close(third_moment(g, w), torch.einsum("m,mabc->abc", mean, three))
    torch.testing.assert_close(third_along(g, w, a), torch.einsum("m,mabc,c->ab", mean, three, a))
    torch.testing.assert_close(fourth_along(g, w, a), torch.einsum("m,mabcd,d->abc", mean, four, a))


def test_steins_lemma() -> None:
    """E[σ(w'x) H_p(w)] = E[σ^(p)] x⊗p for unit x: by Monte-Carlo, within its error."""
    x = F.normalize(normal(3, seed=3), dim=0)
    w = normal(400_000, 3, seed=4)
    moments = derivative_moments("softplus")
    g = F.softplus(w @ x)
    torch.testing.assert_close(
        second_moment(g, w), moments[2] * torch.outer(x, x), rtol=0, atol=0.01
    )
    a = F.normalize(normal(3, seed=5), dim=0)
    expected = moments[4] * torch.einsum("i,j,k->ijk", x, x, x) * (x @ a)
    torch.testing.assert_close(fourth_along(g, w, a), expected, rtol=0, atol=0.05)


def test_moments_of_the_activations_derivatives() -> None:
    relu, tanh = derivative_moments("relu"), derivative_moments("tanh")
    peak = 1 / math.sqrt(2 * math.pi)
    assert relu[2] == pytest.approx(peak, abs=1e-6)
    assert relu[3] == pytest.approx(0, abs=1e-9)  # so k_3 = 4
    assert relu[4] == pytest.approx(-peak, abs=1e-6)
    assert tanh[2] == pytest.approx(0, abs=1e-9)  # so k_2 = 3
    assert tanh[3] < -0.1


def test_the_power_method_finds_eigenvalues_of_both_signs() -> None:
    axes = torch.linalg.qr(normal(6, 6))[0]
    matrix = axes @ torch.diag(torch.tensor([5.0, -4, 1, 0.5, 0.1, 0]).double()) @ axes.T
    basis = power_method([matrix], 2, 200, rng.generator(0, "power"))
    torch.testing.assert_close(basis @ basis.T, axes[:, :2] @ axes[:, :2].T)


@pytest.mark.parametrize(
    ("activation", "count"), [("relu", 1), ("relu", 2), ("tanh", 1), ("softplus", 1)]
)
def test_the_error_falls_with_the_root_of_the_width(activation: str, count: int) -> None:
    widths, errors = [2**k for k in (11, 13, 15)], []
    for width in widths:
        found = []
        for trial in range(6):
            images = torch.rand(count, 1, 4, 4, generator=rng.generator(trial, "rate"))
            head = {
                "width": width,
                "planted": width,
                "planted_std": 0.2,
                "planted_rows": "two_groups",
                "planted_gain": 0.01,
                "activation": activation,
            }
            parameters = {"hidden": [], "head": head}
            observation, truth = make_observation(
                images,
                torch.tensor([0, 7])[:count],
                model="mlp",
                model_parameters=parameters,
                seed=trial,
            )
            attack = create("tensor_features")
            result = solve(attack, observation, Knowledge(), seed=trial).reconstruction
            error = score(result, truth)["subspace_error"]
            assert error is not None
            found.append(error)
        errors.append(sum(found) / len(found))
    slope = math.log(errors[-1] / errors[0]) / math.log(widths[-1] / widths[0])
    # By -1/2 in theory; less where the narrowest head tells next to nothing, as of tanh.
    assert -0.75 < slope < -0.2, errors


def errors_of(*options: dict[str, object], labels: list[int], **head: object) -> list[float]:
    """Mean span error of each over five heads: random images of 64 features, 2,048 neurons."""
    totals = [0.0] * len(options)
    planted = {"width": 2048, "planted": 2048, "planted_std": 0.1, **head}
    for seed in range(5):
        observation, truth = make_observation(
            torch.rand(len(labels), 1, 8, 8, generator=rng.generator(seed, "options")),
            torch.tensor(labels),
            model="mlp",
            model_parameters={"hidden": [], "head": planted},
            seed=seed,
        )
        for place, option in enumerate(options):
            found = solve(create("tensor_features", option), observation, Knowledge(), seed=1)
            error = score(found.reconstruction, truth)["subspace_error"]
            assert error is not None
            totals[place] += error / 5
    return totals


def test_whitening_helps() -> None:
    reduced = {"variance_reduction": True}
    before, after = errors_of(reduced, {**reduced, "whiten": True}, labels=[3])
    assert after < 0.68 * before, (before, after)


def test_all_rows_tell_images_of_different_labels_apart() -> None:
    reduced = {"variance_reduction": True, "whiten": True}
    one, several = errors_of(reduced, {**reduced, "rows": "all"}, labels=[0, 7, 4, 2])
    assert several < 0.6 * one, (one, several)


def test_the_inverse_root_makes_a_covariance_one() -> None:
    w = normal(50, 6)
    covariance = w.T @ w / 50
    root = inverse_root(covariance)
    torch.testing.assert_close(root @ covariance @ root, torch.eye(6).double())
    few = inverse_root(w[:3].T @ w[:3])  # of rank 3
    projection = few @ w[:3].T @ w[:3] @ few
    torch.testing.assert_close(projection @ projection, projection)
    assert float(projection.trace()) == pytest.approx(3)


def test_independent_rows_span_what_is_above_rounding_and_noise() -> None:
    hidden = normal(3, 400, seed=1)
    outer = normal(10, 3, seed=2) @ hidden
    rows = independent_rows(outer + 1e-8 * normal(10, 400, seed=3), 8, 0.0)
    assert rows.shape == (3, 400)
    torch.testing.assert_close(rows @ rows.T / 400, torch.eye(3).double())
    kept = torch.linalg.lstsq(rows.T, hidden.T).solution
    torch.testing.assert_close((rows.T @ kept).T, hidden, rtol=0, atol=1e-5)
    assert len(independent_rows(outer, 2, 0.0)) == 2
    alike = normal(10, 3, seed=2)
    alike[:, 2] = alike[:, 1] + 1e-5 * alike[:, 2]  # error signals of two images of one label
    assert len(independent_rows((alike @ hidden).float().double(), 8, 0.0)) == 3
    noisy = outer + 0.1 * normal(10, 400, seed=3)
    assert len(independent_rows(noisy, 8, 0.01)) == 3
    assert len(independent_rows(normal(10, 400, seed=3), 8, 1.0)) == 1


def test_the_greedy_order_is_that_of_the_truth_with_its_signs() -> None:
    truth = normal(4, 20, seed=5)
    found = F.normalize(truth[[2, 0, 3, 1]] * torch.tensor([[-1.0], [1], [-2], [3]]), dim=1)
    torch.testing.assert_close(order_greedily(found, truth), F.normalize(truth, dim=1))
    one = order_greedily(found[:1], truth)
    assert one[2] @ truth[2] > 0
    assert not one[[0, 1, 3]].any()


def test_the_oracle_needs_the_truth_and_gives_its_order() -> None:
    head = {"width": 8192, "planted": 8192, "planted_std": 0.25, "planted_rows": "two_groups"}
    observation, truth = make_observation(
        torch.rand(2, 1, 4, 4, generator=rng.generator(0, "oracle")),
        torch.tensor([0, 7]),
        model="mlp",
        model_parameters={"hidden": [], "head": head},
    )
    assert truth.features is not None
    oracle = create("tensor_features", {"oracle": True, "variance_reduction": True})
    assert Grant(labels="known", bn="exact").lacks(oracle.required()) is not None
    assert Grant.least(features="known").lacks(oracle.required()) is None
    assert Grant.least().lacks(create("tensor_features").required()) is None
    for order in ([0, 1], [1, 0]):
        knowledge = Knowledge(
            grant=Grant.least(features="known"), true_features=truth.features[order]
        )
        found = solve(oracle, observation, knowledge, seed=1).reconstruction.features
        assert found is not None
        assert bool((F.cosine_similarity(found, truth.features[order]) > 0.9).all())


@pytest.mark.parametrize("classes", [4, 5, 7])
def test_a_class_of_each_group_is_combined(classes: int) -> None:
    """Also where one group has a class more: their planted weights cancel."""
    config = HeadConfig(width=8, planted=6, planted_rows="two_groups")
    outer = TwoLayerHead(config, 3, classes).output.weight.detach()
    seen = SimpleNamespace(grad_output=outer, planted=slice(2, None), config=config)
    assert not combine_rows(cast(HeadGradient, seen)).any()


@pytest.mark.parametrize(
    ("defense", "count", "head"),
    [
        ([{"name": "gaussian_noise", "std": 0.01}], 3, {}),
        ([{"name": "gaussian_noise", "std": 1e3}], 3, {}),
        ([{"name": "gradient_pruning", "ratio": 0.9}], 3, {}),
        ([], 12, {}),  # more images than classes
        ([], 3, {"width": 40, "planted": 20}),  # fewer planted neurons than entries of a feature
        ([], 3, {"activation": "tanh"}),
        ([], 1, {}),
    ],
)
def test_all_rows_give_a_direction_for_each_image(
    defense: list[dict[str, object]], count: int, head: dict[str, object]
) -> None:
    observation, _ = make_observation(
        torch.rand(count, 1, 6, 6, generator=rng.generator(0, "directions")),
        torch.arange(count) * 3 % 10,
        model="mlp",
        model_parameters={"hidden": [], "head": {"width": 512, "planted": 512} | head},
        defense=defense,
    )
    attack = create("tensor_features", {"variance_reduction": True, "whiten": True, "rows": "all"})
    found = solve(attack, observation, Knowledge(), seed=1).reconstruction.features
    assert found is not None
    assert found.shape == (count, 36)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(count))


@pytest.mark.parametrize(
    "defense",
    [[], [{"name": "clip", "norm": 1e-3}], [{"name": "gaussian_noise", "std": 1e-4}]],
    ids=["none", "clip", "noise"],
)
def test_refined_features_are_exact_where_the_decomposition_is_not(
    defense: list[dict[str, Any]],
) -> None:
    """With norms, which the decomposition has not."""
    head = {"width": 640, "planted": 512, "planted_std": 0.3, "planted_gain": 0.1}
    observation, truth = make_observation(
        *example_batch(3),
        model="mlp",
        model_parameters={"hidden": [12], "head": head},
        defense=defense,
    )
    assert truth.features is not None
    errors = {}
    for refine in (False, True):
        attack = create("tensor_features", {"rows": "all", "whiten": True, "refine": refine})
        found = solve(attack, observation, Knowledge(), 1).reconstruction.features
        assert found is not None
        ordered = order_greedily(found.double(), truth.features.double())
        away = (ordered - truth.features).norm(dim=1) / truth.features.norm(dim=1)
        errors[refine] = float(away.max())
    assert errors[True] < 0.02 < 0.2 < errors[False]
