"""What images are drawn from and held to: steps of Adam, resolutions, and how much images vary."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import MultiStepLR

from fedsim import rng
from fedsim_attacks.gradient_matching._drawing import _DECAY_AT, Adam, Pyramid, decayed_step
from fedsim_attacks.gradient_matching._image_priors import VARIATIONS


def draw(*shape):
    return torch.randn(*shape, generator=rng.generator(0, "pyramid"))


def test_the_first_step_is_of_full_size_on_every_level():
    """Adam's first step is the sign of each variable's gradient, whatever its scale."""
    images = torch.zeros(2, 3, 16, 16)
    slope = draw(2, 3, 16, 16)
    expected = -0.1 * slope.sign()
    for size in (8, 4, 1):
        level = torch.zeros(2, 3, size, size, requires_grad=True)
        up = F.interpolate(level, (16, 16), mode="bilinear", align_corners=False)
        (pull,) = torch.autograd.grad(up, level, slope)
        up = F.interpolate(pull.sign(), (16, 16), mode="bilinear", align_corners=False)
        expected = expected - 0.1 * up
    Pyramid(images).step(slope.clone(), 0.1)
    torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 3, 5, 5), (2, 1, 7, 32), (1, 3, 28, 28)])
def test_it_reaches_any_image_of_any_size(shape):
    goal, images = draw(*shape), torch.zeros(shape)
    pyramid = Pyramid(images)
    for iteration in range(400):
        pyramid.step(images - goal, 0.1 * (1 - iteration / 400))
    torch.testing.assert_close(images, goal, rtol=0, atol=0.01)


RAMP = torch.linspace(0, 1, 8).expand(1, 1, 8, 8)
SQUARE = torch.tensor([[[[0.0, 1.0], [3.0, 2.0]]]])
PIXEL = torch.tensor([0.5, -0.25, 1.0]).view(1, 3, 1, 1)


@pytest.mark.parametrize(
    ("name", "images", "value"),
    [
        ("absolute", SQUARE, (3 + 1) / 2 + (1 + 1) / 2),
        ("absolute", torch.ones(2, 1, 1, 1), 0.0),
        ("chromatic", SQUARE, (3 + 1) / 2 + (1 + 1) / 2),  # of other channels than three
        # Means over three channels, of which one is not zero and has the direction's length.
        ("chromatic", RAMP.expand(1, 3, 8, 8), 3**0.5 / 3 / 7),
        ("chromatic", torch.cat([RAMP, 0 * RAMP, -RAMP], 1), 3 * 2**0.5 / 3 / 7),
        ("opponents", PIXEL, math.sqrt(2) * (0.5 + 0.25 + 1.0 + 0.75 + 0.5 + 1.25) / 6),
    ],
)
def test_known_values(name, images, value):
    assert float(VARIATIONS[name](images.contiguous())[0]) == pytest.approx(value)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", VARIATIONS)
def test_the_slope_is_the_derivative(name, channels):
    stream, shape = rng.generator(0, "variation"), (2, channels, 5, 4)
    images, along = torch.randn(2, *shape, generator=stream, dtype=torch.float64).unbind()
    above, below = (VARIATIONS[name](images + step * along)[0] for step in (1e-6, -1e-6))
    slope = VARIATIONS[name](images)[1]
    assert float((slope * along).sum()) == pytest.approx(float(above - below) / 2e-6, rel=1e-5)
    assert not VARIATIONS[name](torch.zeros(shape))[1].any()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99)])
def test_steps_are_those_of_torchs_adam_to_the_last_bit(betas):
    rng = torch.Generator().manual_seed(0)
    starts = [torch.randn(2, 3, 5, 4, generator=rng), torch.randn(7, generator=rng)]
    theirs = [each.clone().requires_grad_() for each in starts]
    ours = [each.clone().requires_grad_() for each in starts]
    optimizer, adam = torch.optim.Adam(theirs, betas=betas, fused=True), Adam(ours, betas)
    for rate in (0.1, 0.03, 0.3):
        slopes = [torch.randn(each.shape, generator=rng) for each in starts]
        for each, slope in zip(theirs, slopes, strict=True):
            each.grad = slope.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        # Slopes may lie in memory in another order than the variables.
        adam.step([slopes[0].to(memory_format=torch.channels_last), slopes[1]], rate)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("iterations", [7, 100, 120])
def test_rates_are_those_of_torchs_schedule(iterations):
    variable = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([variable], lr=0.1)
    schedule = MultiStepLR(optimizer, [int(iterations * share) for share in _DECAY_AT], gamma=0.1)
    for done in range(iterations):
        assert decayed_step(0.1, done, iterations) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
