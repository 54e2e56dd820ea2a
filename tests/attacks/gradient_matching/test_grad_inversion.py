"""GradInversion: zero at the truth, a group that pulls together, better than the mean image."""

import pytest
import torch
import torch.nn.functional as F

from fedsim import rng
from fedsim.attacking.knowledge import hand_over
from fedsim.contracts.grant import Grant
from fedsim.models.base import normalize
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim_attacks.gradient_matching.grad_inversion import (
    GradInversion,
    _consensus,
    _consensus_slope,
    _register,
)

BATCH_NORM = {"model": "convnet", "model_parameters": {"width": 4, "norm": "batch"}}
ZERO_AT_TRUTH = {"total_variation": 0.0, "norm": 0.0}


def stream():
    return rng.generator(0, "test")


def known(count, bn="none", **model):
    observation, truth = make_observation(*example_batch(count), **model)
    return hand_over(observation, truth, Grant(labels="known", bn=bn)), truth.images


@pytest.mark.parametrize(("bn", "model"), [("none", {}), ("exact", BATCH_NORM)])
def test_the_objective_is_zero_at_the_truth_alone(bn, model):
    """Without the weights of those priors that are not."""
    seen, images = known(3, bn, **model)
    attack = GradInversion(iterations=1, seeds=2, **ZERO_AT_TRUTH)
    state = attack.init(*seen, stream())
    for pixels, low, high in ((images, -1, 1e-6), (1 - images, 1e-2, 100)):
        state.images = normalize(pixels, seen[0].model).expand_as(state.images).clone()
        assert low < attack.postprocess(state).loss < high


def test_every_term_has_its_slope():
    """What a step descends is the derivative of what it reports, in double precision."""
    images = torch.randn(2, 3, 1, 8, 8, generator=stream(), dtype=torch.float64)
    mean = _consensus(images, 1)
    variable = images.clone().requires_grad_()
    away = (variable - mean).flatten(1)
    (wanted,) = torch.autograd.grad(away.square().mean(1).sqrt().sum(), variable)
    assert torch.allclose(_consensus_slope(images, mean), wanted)

    seen, _ = known(3)
    attack = GradInversion(iterations=1, seeds=1, total_variation=0.3, norm=0.7)
    state = attack.init(*seen, stream())
    (at,) = state.images
    toward = torch.randn(at.shape, generator=stream())
    _, slope, _ = attack._fidelity(state, at)
    ahead, behind = (attack._fidelity(state, at + s * 1e-3 * toward)[0] for s in (1, -1))
    expected = float((slope * toward).sum())
    assert float(ahead - behind) / 2e-3 == pytest.approx(expected, rel=0.02)


def test_the_group_is_pulled_together():
    seen, _ = known(2)
    spread = {}
    for weight in (0.0, 10.0):
        attack = GradInversion(iterations=30, seeds=3, group=weight, noise=0.0, warmup=0)
        state = attack.init(*seen, stream())
        while not attack.terminate(state):
            state = attack.step(state)
        spread[weight] = float(state.images.std(0).mean())
    assert spread[10.0] < 0.2 * spread[0.0]


@pytest.mark.parametrize("shift", [(0, 0), (2, -1), (-2, 2)])
def test_a_shift_is_undone(shift):
    smooth = F.avg_pool2d(torch.randn(2, 3, 20, 20, generator=stream()), 3, stride=1)
    target, moved = smooth[..., 4:12, 4:12], smooth[..., 4 + shift[0] :, 4 + shift[1] :]
    moved = moved[..., :8, :8]
    found = _register(moved, target, 2)
    assert torch.equal(found[..., 2:-2, 2:-2], target[..., 2:-2, 2:-2])
    assert torch.equal(_register(moved, target, 0), moved)


def test_the_mean_of_the_seeds_wins_where_its_loss_is_less():
    seen, images = known(1)
    attack = GradInversion(iterations=1, seeds=2, reach=0, **ZERO_AT_TRUTH)
    state = attack.init(*seen, stream())
    right = normalize(images, seen[0].model)
    away = torch.randn(right.shape, generator=stream())
    for other in (right - away, right):
        state.images = torch.stack([right + away, other])
        assert torch.allclose(attack.postprocess(state).images, images, atol=1e-5)
