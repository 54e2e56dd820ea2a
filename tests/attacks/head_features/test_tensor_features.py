"""The tensor attack's formulas against their definitions, and its rate."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
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
    find_components,
    fourth_along,
    order_greedily,
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


@pytest.mark.parametrize(
    ("activation", "count"),
    [
        ("relu", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("relu", 2), ("tanh", 1), ("softplus", 1))
        ),
    ],
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


def normal_components(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=rng.generator(seed, "components"), dtype=torch.float64)


def cubes(u: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("c,ci,cj,ck->ijk", weights, u, u, u)


def symmetric_noise(rank: int, seed: int) -> Tensor:
    noise = normal_components(rank, rank, rank, seed=seed)
    orders = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    noise = torch.stack([noise.permute(order) for order in orders]).sum(0)
    return noise / torch.linalg.vector_norm(noise)


def unlike(found: Tensor, truth: Tensor) -> float:
    """Largest distance of a true direction from the found one that is nearest, up to sign."""
    cosines = (found @ truth.T).abs()
    assert sorted(cosines.argmax(0).tolist()) == list(range(len(truth))), "one is found twice"
    return float((1 - cosines.max(0).values.square().clamp(max=1)).sqrt().max())


def alternating(rank: int) -> Tensor:
    return torch.tensor([(-1.0) ** i * (1 + i / 2) for i in range(rank)]).double()


@pytest.mark.parametrize("rank", [2, 4, 8])
def test_orthogonal_components_of_both_signs_are_exact(rank: int) -> None:
    axes = torch.linalg.qr(normal_components(rank, rank))[0]
    found, left = find_components(cubes(axes, alternating(rank)), rng.generator(0, "starts"))
    assert unlike(found, axes) < 1e-6
    assert float(left) < 1e-6
    torch.testing.assert_close(found.norm(dim=1), torch.ones(rank).double())


def test_components_shared_by_slices_that_are_no_cube() -> None:
    u, weights = (
        F.normalize(normal_components(4, 4, seed=2), dim=1),
        normal_components(4, 7, seed=3),
    )
    found, _ = find_components(
        torch.einsum("ci,cj,cs->ijs", u, u, weights), rng.generator(0, "starts")
    )
    assert unlike(found, u) < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_the_error_is_that_of_the_noise(seed: int) -> None:
    """Of orthogonal components: noise of 1% of the norm moves no direction by much more."""
    axes = torch.linalg.qr(normal_components(8, 8, seed=seed))[0]
    tensor = cubes(axes, torch.ones(8).double())
    noise = 0.01 * torch.linalg.vector_norm(tensor) * symmetric_noise(8, seed)
    found, left = find_components(tensor + noise, rng.generator(seed, "starts"))
    assert unlike(found, axes) < 0.03
    assert float(left) < 0.01


@pytest.mark.parametrize("seed", range(4))
def test_the_fit_is_no_worse_than_the_truth(seed: int) -> None:
    """Alike components behind noise: the least error is at most that of the true ones."""
    u = F.normalize(normal_components(8, 8, seed=seed) + 0.5, dim=1)
    tensor = cubes(u, torch.ones(8).double())
    noise = 0.01 * torch.linalg.vector_norm(tensor) * symmetric_noise(8, seed)
    _, left = find_components(tensor + noise, rng.generator(seed, "starts"))
    assert float(left) < 0.0105


def test_draws_come_from_the_stream_alone() -> None:
    tensor = symmetric_noise(5, 1)
    results = []
    for seed in (0, 1):
        np.random.seed(seed)  # noqa: NPY002  what TensorLy would draw from by itself
        torch.manual_seed(seed)
        results.append(find_components(tensor, rng.generator(3, "starts")))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
