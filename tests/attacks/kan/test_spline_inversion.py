"""Images of a KAN's update: exact up to its hidden units, whatever a client does to gradients."""

from dataclasses import replace

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import truncnorm

from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.models.kan import spline_basis
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import LocalTraining
from fedsim_attacks.kan.spline_inversion import (
    SplineInversion,
    _abscissae,
    _quadrics,
    _SplineGradient,
)

SPLINES = [(1, 3), (2, 1), (3, 4), (4, 5), (5, 2)]


def observe(count, *, model=None, **case):
    """`count` images of 8x8 uniform pixels of different brightness, labels 3, 6, 9, 2, ..."""
    images, labels = example_batch(count, (1, 8, 8))
    images = images * torch.linspace(0.6, 1, count).view(-1, 1, 1, 1)
    parameters = {"hidden": 16, "intervals": 4, "init_scale": 0.5, **(model or {})}
    return make_observation(images, labels, model="kan", model_parameters=parameters, **case)


def attack(observation, iterations=3):
    found = SplineInversion(iterations=iterations)
    return solve(found, observation, Knowledge(), seed=0).reconstruction


def matched(found, truth):
    """Images and labels in the order of the truth."""
    errors = (found.images[None] - truth.images[:, None]).square().sum((2, 3, 4))
    order = torch.from_numpy(linear_sum_assignment(errors)[1])
    return found.images[order], found.labels[order]


@pytest.mark.parametrize("train", ["all", "first"])
@pytest.mark.parametrize(
    ("count", "degree", "intervals", "off"),
    [*((1, *spline, 1e-5) for spline in SPLINES), *((8, degree, 4, 1e-3) for degree in (2, 3, 5))],
)
def test_images_are_exact_and_so_are_their_labels(train, count, degree, intervals, off):
    model = {"degree": degree, "intervals": intervals, "train": train}
    observation, truth = observe(count, model=model)
    found = attack(observation)
    images, labels = matched(found, truth)
    torch.testing.assert_close(images, truth.images, atol=off, rtol=0)
    assert torch.equal(labels, truth.labels)
    assert found.loss < 1e-9


def test_as_many_images_as_hidden_units_come_out():
    observation, truth = observe(16)
    images, _ = matched(attack(observation), truth)
    torch.testing.assert_close(images, truth.images, atol=0.02, rtol=0)


FEDAVG = LocalTraining(algorithm="fedavg", steps=3, batch_size=2, lr=2.0, momentum=0.5)
THREE = replace(FEDAVG, steps=2, batch_size=1)


@pytest.mark.parametrize(
    "case",
    [
        {"defense": [{"name": "clip", "norm": 1e-3}]},
        {"defense": [{"name": "dp_sgd", "norm": 1e-3, "noise_multiplier": 0.0}]},
        {"training": FEDAVG},
        {"training": replace(FEDAVG, batch_size=6, batches="same")},
        {"defense": [{"name": "aggregate"}], "num_clients": 3, "training": THREE},
    ],
    ids=["clip", "clip by example", "local steps", "steps on one batch", "three clients"],
)
def test_no_clipping_step_or_sum_hides_anything(case):
    """What the splines meet depends on no weight: only the error signals change."""
    observation, truth = observe(6, **case)
    plain, _ = observe(6)
    name = "body.3.weight"
    assert not torch.allclose(observation.update[name], plain.update[name], rtol=0.1)
    images, _ = matched(attack(observation), truth)
    torch.testing.assert_close(images, truth.images, atol=1e-3, rtol=0)


def test_the_loss_is_zero_at_the_true_images_alone():
    observation, truth = observe(4)
    seen = _SplineGradient.read(observation)

    def loss(images):
        u = normalize(images, observation.model).double().flatten(1).tanh()
        return float(seen.share_unexplained(spline_basis(u, seen.degree, seen.intervals)))

    assert loss(truth.images) < 1e-12
    assert loss(truth.images.flip(0)) < 1e-12
    assert loss(truth.images * 0.99) > 1e-6
    assert 0.1 < loss(1 - truth.images) <= 1


def test_under_noise_images_fade_into_the_mean_of_the_normalization():
    errors = []
    for std in (1e-4, 1e-3, 1e-2, 10.0):
        observation, truth = observe(1, defense=[{"name": "gaussian_noise", "std": std}])
        found = attack(observation, iterations=30)
        errors.append(float((found.images - truth.images).square().mean()))
    assert errors[0] < 1e-4
    assert errors == sorted(errors)
    prior = truncnorm(-1.6, 2.4, loc=0.4, scale=0.25).mean()
    assert float((found.images - prior).abs().max()) < 0.03


@pytest.mark.parametrize("std", [1e-4, 1e-2])
def test_noise_is_measured_in_the_update_itself(std):
    """In the units of the gradient times √64."""
    observation, _ = observe(8, defense=[{"name": "gaussian_noise", "std": std}])
    assert _SplineGradient.read(observation).noise == pytest.approx(8 * std, rel=0.1)
    assert _SplineGradient.read(observe(8)[0]).noise < 1e-6


def test_what_cannot_be_read_is_a_stated_failure():
    observation, _ = observe(2)
    removed = {n: t * (n != "body.3.weight") for n, t in observation.update.items()}
    for seen, reason in (
        (make_observation(*example_batch(2), model="mlp")[0], "the model is mlp: use `model: kan`"),
        (observe(1, model={"imprint": {"bins": 8}})[0], "use attack imprint"),
        (replace(observation, update=removed), "nothing is left"),
        (observe(2, model={"degree": 1, "intervals": 1})[0], r"raise model\.degree"),
        (observe(17)[0], r"17 images.*16 hidden units.*at most model\.hidden"),
    ):
        with pytest.raises(AttackFailed, match=reason):
            attack(seen)


@pytest.mark.parametrize(("degree", "intervals"), SPLINES)
def test_identities_of_the_splines(degree, intervals):
    """Marsden's, and the quadrics' dimension: products span the splines of twice the degree."""
    u = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    basis = spline_basis(u, degree, intervals)
    torch.testing.assert_close(basis @ _abscissae(degree, intervals), u)
    forms = _quadrics(degree, intervals)
    values = torch.einsum("uk,qkl,ul->uq", basis, forms, basis)
    assert values.numel() == 0 or float(values.abs().max()) < 1e-12
    functions = intervals + degree
    splines = 2 * degree + 1 + (intervals - 1) * (degree + 1)
    assert len(forms) == functions * (functions + 1) // 2 - splines
