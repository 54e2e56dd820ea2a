"""Descent over several resolutions, and the variation of brightness and color."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim_attacks.gradient_matching._drawing import Pyramid


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng.generator(0, "pyramid"))


def test_the_first_step_is_of_full_size_on_every_level() -> None:
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
    Pyramid(images, betas=(0.9, 0.99)).step(slope.clone(), 0.1)
    torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 3, 5, 5), (2, 1, 7, 32), (1, 3, 28, 28)])
def test_it_reaches_any_image_of_any_size(shape: tuple[int, ...]) -> None:
    goal, images = draw(*shape), torch.zeros(shape)
    pyramid = Pyramid(images, betas=(0.9, 0.99))
    for iteration in range(400):
        pyramid.step(images - goal, 0.1 * (1 - iteration / 400))
    torch.testing.assert_close(images, goal, rtol=0, atol=0.01)


def test_a_region_is_moved_sooner_than_by_its_pixels() -> None:
    """Behind noise in each pixel's gradient that hides what they have in common."""
    stream = rng.generator(0, "region")
    errors = []
    for coarse in (True, False):
        images = torch.zeros(1, 1, 32, 32)
        pyramid = Pyramid(images, betas=(0.9, 0.99))
        alone = torch.optim.Adam([images], betas=(0.9, 0.99), lr=0.01)
        for _ in range(30):
            images.grad = images - 1 + 10 * torch.randn(1, 1, 32, 32, generator=stream)
            if coarse:
                pyramid.step(images.grad, 0.01)
            else:
                alone.step()
        errors.append(abs(float(images.mean()) - 1))
    assert errors[0] < 0.8 * errors[1]
