"""Images behind an imprint module: exact when alone in a bin; the segmentation of its rows."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.data.bundled import Photos
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import LocalTraining
from fedsim_attacks.imprint.imprint import ImprintAttack, _segment

MODELS = {"convnet": {"width": 8}, "lenet": {}, "mlp": {"hidden": [32]}, "resnet18": {"width": 4}}


def observe(count, model="convnet", *, imprint=None, **case):
    """`count` photographs of different classes."""
    photos = Photos().load()
    order = photos.train_labels.argsort(stable=True).view(8, -1).T.flatten()[:count]
    return make_observation(
        photos.train_images[order].float() / 255,
        photos.train_labels[order],
        model=model,
        model_parameters={**MODELS[model], "imprint": {"bins": 128, **(imprint or {})}},
        **case,
    )


def attack(observation):
    return solve(ImprintAttack(), observation, Knowledge(), seed=0).reconstruction.images


def psnrs(found, truth):
    """(N,) in dB, of what comes closest to each true image, ascending."""
    errors = (found[:, None] - truth.images[None]).square().mean((2, 3, 4)).amin(0)
    return (-10 * errors.clamp_min(1e-20).log10()).sort().values


@pytest.mark.parametrize("model", MODELS)
def test_most_images_of_a_batch_are_exact(model):
    observation, truth = observe(8, model)
    assert int((psnrs(attack(observation), truth) > 40).sum()) >= 6


@pytest.mark.parametrize(
    "case",
    [
        {"defense": [{"name": "clip", "norm": 1e-2}]},
        {"defense": [{"name": "dp_sgd", "norm": 1e-2, "noise_multiplier": 0.0}]},
        {"defense": [{"name": "aggregate"}], "num_clients": 2},
    ],
    ids=["clip", "clip by example", "two clients"],
)
def test_clipping_and_adding_hide_nothing(case):
    observation, truth = observe(8, **case)
    assert float(psnrs(attack(observation), truth)[2]) > 40


def test_rows_between_images_average_noise_out():
    noise = [{"name": "gaussian_noise", "std": 0.001}]
    observation, truth = observe(8, imprint={"scale": 0.01}, defense=noise)
    assert float(psnrs(attack(observation), truth).median()) > 30


@pytest.mark.parametrize(("batches", "size"), [("same", 8), ("different", 2)])
def test_small_local_steps_hide_little(batches, size):
    """More than if rows were averaged over pieces in which they drift."""
    training = LocalTraining(
        algorithm="fedavg", steps=4, batch_size=size, lr=0.001, batches=batches
    )
    as_one_step = replace(training, steps=1, batch_size=8)
    gained = 0.0
    for seed in range(3):
        observation, truth = observe(8, training=training, seed=seed)
        found = psnrs(attack(observation), truth)
        assert float(found.median()) > 30
        averaged = psnrs(attack(replace(observation, training=as_one_step)), truth)
        gained += float(found.mean() - averaged.mean())
    assert gained > 0


def test_images_that_share_a_bin_come_out_as_their_mean():
    """Of two images of the same brightness and a darker one: three images, one of them twice.

    Weighted by what they contribute to the bin's bias: with one sign, at this seed's weights.
    """
    images, labels = example_batch(3)
    images = 0.3 + 0.4 * images
    images[1] += images[0].mean() - images[1].mean()
    images[2] *= 0.5
    observation, truth = make_observation(
        images, labels, model_parameters={"imprint": {"bins": 64}}, seed=5
    )
    found = attack(observation)
    assert found.shape == images.shape
    dark, *shared = sorted(found, key=lambda image: float((image - truth.images[2]).abs().sum()))
    assert torch.allclose(dark, truth.images[2], atol=1e-3)
    first, second = truth.images[:2]
    away, mean = first - second, shared[-1]
    share = ((mean - second) * away).sum() / away.square().sum()
    assert 0.05 < float(share) < 0.95
    assert torch.allclose(mean, second + share * away, atol=1e-3)
    assert torch.equal(shared[0], mean) or torch.equal(shared[0], dark)


def test_what_cannot_be_read_is_a_stated_failure():
    observation, _ = observe(2)
    pruned = {n: t * (not n.startswith("imprint")) for n, t in observation.update.items()}
    noisy, _ = observe(2, defense=[{"name": "gaussian_noise", "std": 1.0}])
    for seen, reason in (
        (make_observation(*example_batch(2))[0], r"no imprint module.*set model\.imprint"),
        (replace(observation, update=pruned), r"nothing is left.*model\.imprint\.scale"),
        (noisy, r"out of the noise.*model\.imprint\.scale"),
    ):
        with pytest.raises(AttackFailed, match=reason):
            attack(seen)


def test_the_segmentation_is_the_best_of_all():
    """Of pieces with their means, and a last one that is zero."""
    rows = torch.randn(7, 3, generator=rng.generator(0, "test"), dtype=torch.float64)
    for pieces in (1, 2, 3, 7):
        costs = {}
        for ends in combinations(range(1, 8), pieces):
            starts = (0, *ends)
            parts = [rows[a:b] - rows[a:b].mean(0) for a, b in zip(starts, ends, strict=False)]
            costs[ends] = float(sum(part.square().sum() for part in [*parts, rows[ends[-1] :]]))
        found = _segment(rows, pieces)
        assert tuple(found.ends) == min(costs, key=lambda ends: costs[ends])
        assert float(found.residual) == pytest.approx(min(costs.values()), abs=1e-12)
    assert torch.allclose(_segment(rows, 7).means(rows), torch.cat([rows, torch.zeros(1, 3)]))
