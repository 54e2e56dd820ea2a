"""The tensor attack's formulas against their definitions, its rate, and Table 2 of its paper."""

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from example_heads import draw, observe, span_error

from fedsim import rng
from fedsim.contracts.attack import create, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import HeadConfig
from fedsim.models.head import TwoLayerHead
from fedsim.scoring import score
from fedsim.testing.cases import example_batch
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features.tensor_features import (
    _combine_rows,
    _derivative_moments,
    _find_components,
    _fourth_along,
    _inverse_root,
    _order_greedily,
    _third_along,
    _third_moment,
    power_method,
    second_moment,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=rng.generator(seed, "components"), dtype=torch.float64)


def tensors_of(w):
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


def test_contracted_moments_are_those_of_the_full_tensors():
    w, g = normal(40, 4), normal(40, seed=1)
    a = F.normalize(normal(4, seed=2), dim=0)
    two, three, four = tensors_of(w)
    mean = g / len(g)
    torch.testing.assert_close(second_moment(g, w), torch.einsum("m,mab->ab", mean, two))
    torch.testing.assert_close(_third_moment(g, w), torch.einsum("m,mabc->abc", mean, three))
    torch.testing.assert_close(_third_along(g, w, a), torch.einsum("m,mabc,c->ab", mean, three, a))
    torch.testing.assert_close(
        _fourth_along(g, w, a), torch.einsum("m,mabcd,d->abc", mean, four, a)
    )


def test_moments_of_the_activations_derivatives():
    relu, tanh = _derivative_moments("relu"), _derivative_moments("tanh")
    peak = 1 / math.sqrt(2 * math.pi)
    assert [relu[2], relu[4]] == pytest.approx([peak, -peak], abs=1e-6)
    assert [relu[3], tanh[2]] == pytest.approx([0, 0], abs=1e-9)  # so k_3 = 4, and k_2 = 3
    assert tanh[3] < -0.1


@pytest.mark.parametrize("activation", ["relu", pytest.param("tanh", marks=pytest.mark.slow)])
def test_the_error_falls_with_the_root_of_the_width(activation):
    widths, errors = [2**k for k in (11, 13, 15)], []
    head = {"planted_std": 0.2, "planted_rows": "two_groups", "planted_gain": 0.01}
    for width in widths:
        found = []
        for trial in range(6):
            planted = {**head, "width": width, "planted": width, "activation": activation}
            case = observe(draw(1, "rate", 4, trial), planted, labels=[0], seed=trial)
            result = solve(create("tensor_features"), case[0], Knowledge(), seed=trial)
            found.append(score(result.reconstruction, case[1])["subspace_error"])
        errors.append(sum(found) / len(found))
    slope = math.log(errors[-1] / errors[0]) / math.log(widths[-1] / widths[0])
    # By -1/2 in theory; less where the narrowest head tells next to nothing, as of tanh.
    assert -0.75 < slope < -0.2, errors


def errors_of(*options, labels):
    """Mean span error of each over five heads: random images of 64 features, 2,048 neurons."""
    head = {"width": 2048, "planted": 2048}
    cases = [
        observe(draw(len(labels), "options", 8, seed), head, labels=labels, seed=seed)
        for seed in range(5)
    ]
    return [
        sum(span_error("tensor_features", case, **option) for case in cases) / 5
        for option in options
    ]


def test_whitening_and_all_rows_help():
    """All rows tell images of different labels apart."""
    reduced = {"variance_reduction": True}
    before, after = errors_of(reduced, {**reduced, "whiten": True}, labels=[3])
    assert after < 0.68 * before, (before, after)
    white = {**reduced, "whiten": True}
    one, several = errors_of(white, {**white, "rows": "all"}, labels=[0, 7, 4, 2])
    assert several < 0.6 * one, (one, several)


def test_the_oracle_needs_the_truth_and_gives_its_order():
    head = {"width": 8192, "planted": 8192, "planted_std": 0.25, "planted_rows": "two_groups"}
    observation, truth = observe(draw(2, "oracle", 4), head, labels=[0, 7])
    oracle = create("tensor_features", {"oracle": True, "variance_reduction": True})
    assert Grant(labels="known", bn="exact").lacks(oracle.required()) is not None
    assert Grant.least(features="known").lacks(oracle.required()) is None
    assert Grant.least().lacks(create("tensor_features").required()) is None
    for order in ([0, 1], [1, 0]):
        granted = Grant.least(features="known")
        knowledge = Knowledge(grant=granted, true_features=truth.features[order])
        found = solve(oracle, observation, knowledge, seed=1).reconstruction.features
        assert bool((F.cosine_similarity(found, truth.features[order]) > 0.9).all())


@pytest.mark.parametrize("classes", [4, 5, 7])
def test_a_class_of_each_group_is_combined(classes):
    """Also where one group has a class more: their planted weights cancel."""
    config = HeadConfig(width=8, planted=6, planted_rows="two_groups")
    outer = TwoLayerHead(config, 3, classes).output.weight.detach()
    seen = SimpleNamespace(grad_output=outer, planted=slice(2, None), config=config)
    assert not _combine_rows(cast(HeadGradient, seen)).any()


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
def test_all_rows_give_a_direction_for_each_image(defense, count, head):
    sizes = {"width": 512, "planted": 512, **head}
    observation, _ = observe(draw(count, "directions"), sizes, defense=defense)
    attack = create("tensor_features", {"variance_reduction": True, "whiten": True, "rows": "all"})
    found = solve(attack, observation, Knowledge(), seed=1).reconstruction.features
    assert found.shape == (count, 36)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(count))


@pytest.mark.parametrize(
    "defense",
    [[], [{"name": "clip", "norm": 1e-3}], [{"name": "gaussian_noise", "std": 1e-4}]],
    ids=["none", "clip", "noise"],
)
def test_refined_features_are_exact_where_the_decomposition_is_not(defense):
    """With norms, which the decomposition has not."""
    head = {"width": 640, "planted": 512, "planted_std": 0.3, "planted_gain": 0.1}
    images, labels = example_batch(3)
    observation, truth = observe(images, head, labels=labels.tolist(), hidden=[12], defense=defense)
    errors = {}
    for refine in (False, True):
        attack = create("tensor_features", {"rows": "all", "whiten": True, "refine": refine})
        found = solve(attack, observation, Knowledge(), 1).reconstruction.features
        ordered = _order_greedily(found.double(), truth.features.double())
        away = (ordered - truth.features).norm(dim=1) / truth.features.norm(dim=1)
        errors[refine] = float(away.max())
    assert errors[True] < 0.02 < 0.2 < errors[False]


def cubes(u, weights):
    return torch.einsum("c,ci,cj,ck->ijk", weights, u, u, u)


def symmetric_noise(rank, seed):
    noise = normal(rank, rank, rank, seed=seed)
    orders = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    noise = torch.stack([noise.permute(order) for order in orders]).sum(0)
    return noise / torch.linalg.vector_norm(noise)


def unlike(found, truth):
    """Largest distance of a true direction from the found one that is nearest, up to sign."""
    cosines = (found @ truth.T).abs()
    assert sorted(cosines.argmax(0).tolist()) == list(range(len(truth))), "one is found twice"
    return float((1 - cosines.max(0).values.square().clamp(max=1)).sqrt().max())


@pytest.mark.parametrize("rank", [2, 8])
def test_orthogonal_components_of_both_signs_are_exact(rank):
    axes = torch.linalg.qr(normal(rank, rank))[0]
    weights = torch.tensor([(-1.0) ** i * (1 + i / 2) for i in range(rank)]).double()
    found, left = _find_components(cubes(axes, weights), rng.generator(0, "starts"))
    assert unlike(found, axes) < 1e-6
    assert float(left) < 1e-6
    torch.testing.assert_close(found.norm(dim=1), torch.ones(rank).double())


def test_components_shared_by_slices_that_are_no_cube():
    u, weights = F.normalize(normal(4, 4, seed=2), dim=1), normal(4, 7, seed=3)
    found, _ = _find_components(
        torch.einsum("ci,cj,cs->ijs", u, u, weights), rng.generator(0, "starts")
    )
    assert unlike(found, u) < 1e-6


@pytest.mark.parametrize("seed", range(2))
def test_the_fit_is_no_worse_than_the_truth(seed):
    """Alike components behind noise: the least error is at most that of the true ones."""
    u = F.normalize(normal(8, 8, seed=seed) + 0.5, dim=1)
    tensor = cubes(u, torch.ones(8).double())
    noise = 0.01 * torch.linalg.vector_norm(tensor) * symmetric_noise(8, seed)
    _, left = _find_components(tensor + noise, rng.generator(seed, "starts"))
    assert float(left) < 0.0105


DIMENSION, CLASSES, WIDTH = 512, 10, 16384
REPORTED = 0.171
"""Span error of one image without a defense, under ReLU with at most `WIDTH` planted neurons."""


@pytest.fixture(scope="module")
def planted():
    """Weights (m, d), and values (m,) of the feature e_1."""
    stream = rng.generator(0, "paper", WIDTH)
    w = torch.randn(WIDTH, DIMENSION, generator=stream)
    return w, w[:, 0].relu()


def plain_error(g, w, back=None):
    """Of the feature e_1, from values g (m,) at the weights w (m, d)."""
    basis = power_method([second_moment(g, w).double()], 1, 50, rng.generator(0, "power"))[:, 0]
    found = basis if back is None else back @ basis
    return math.sqrt(1 - float(found[0] / found.norm()) ** 2)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_its_bound_does_not_cover_its_experiment(count: int) -> None:
    """Theorem B.1 without constants and logarithms, of unit features that are orthogonal."""
    curvature = _derivative_moments("relu")[2]
    assert CLASSES**2 * count**2 * DIMENSION / curvature**2 / 19 > WIDTH  # m >= Ω(K² B² d / ν²)
    assert CLASSES / curvature * count * math.sqrt(DIMENSION / WIDTH) > 4  # of an error <= 1
    assert (CLASSES**2 * count**4 <= DIMENSION) == (count == 1)  # K² B⁴ <= O(d)


def test_the_plain_estimator_stays_far_above_its_table(planted):
    """For one image it depends on nothing but d, m and the activation: no unit changes it."""
    w, g = planted
    error = plain_error(g, w)
    assert error > 0.45
    assert plain_error(38 * g, w) == pytest.approx(error, rel=1e-3)


def test_regression_and_whitening_reach_its_table(planted):
    w, g = planted
    design = torch.cat([torch.ones(WIDTH, 1), w], 1)
    g = g - design @ torch.linalg.solve(design.T @ design, design.T @ g)
    assert 0.2 < plain_error(g, w) < 0.28
    back = _inverse_root((w.T @ w / WIDTH).double())
    assert plain_error(g, w @ back.float(), back) < REPORTED + 0.005
