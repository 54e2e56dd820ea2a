"""Inverting gradients: better than the mean image, and its total variation."""

from __future__ import annotations

import math
from statistics import median

import pytest
import torch

from fedsim.adversary import solve
from fedsim.data.bundled import Faces
from fedsim.knowledge import grant
from fedsim.models.base import denormalize
from fedsim.testing import make_observation
from fedsim.types import Knowledge, Labels
from fedsim_attacks.inverting_gradients import InvertingGradients, total_variation


@pytest.mark.parametrize("labels", ["none", "inferred", "known"])
def test_on_an_mlp_it_beats_the_mean_image_clearly(labels: Labels) -> None:
    faces = Faces(size=16).load()
    pixels = faces.train_images.float() / 255
    gains = []
    for index in (5, 40, 120):
        images, truth = pixels[index : index + 1], faces.train_labels[index : index + 1]
        seen = grant(*make_observation(images, truth, model="mlp"), labels, "none")
        found = solve(InvertingGradients(iterations=200), *seen, seed=0).reconstruction
        assert found.images is not None
        assert found.labels is not None
        assert torch.equal(found.labels, truth)
        guess = (pixels.mean(0) - images).square().mean()
        gains.append(10 * math.log10(guess / (found.images - images).square().mean()))
    assert median(gains) > 5
    assert min(gains) > 2


def test_iterates_stay_valid_pixels() -> None:
    observation, _ = make_observation(torch.zeros(1, 1, 8, 8), torch.tensor([3]), model="mlp")
    attack = InvertingGradients(iterations=10, step_size=1.0)
    state = attack.init(observation, Knowledge(), torch.Generator())
    for _ in range(5):
        state = attack.step(state)
    pixels = denormalize(state.candidate.images.detach(), observation.model)
    assert -1e-6 < float(pixels.min()) < float(pixels.max()) < 1 + 1e-6


def test_total_variation_and_its_gradient() -> None:
    images = torch.tensor([[[[0.0, 1.0], [3.0, 2.0]]]], dtype=torch.float64)
    value, _ = total_variation(images)
    assert float(value) == pytest.approx((3 + 1) / 2 + (1 + 1) / 2)
    stream = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 5, 4, generator=stream, dtype=torch.float64).requires_grad_()
    down = (images[:, :, 1:] - images[:, :, :-1]).abs().mean()
    right = (images[..., 1:] - images[..., :-1]).abs().mean()
    (expected,) = torch.autograd.grad(down + right, images)
    value, slope = total_variation(images.detach())
    torch.testing.assert_close(value, (down + right).detach())
    torch.testing.assert_close(slope, expected)


def test_a_single_pixel_has_no_variation() -> None:
    value, slope = total_variation(torch.ones(2, 1, 1, 1))
    assert float(value) == 0
    assert not slope.any()


def test_stretched_images_are_multiples_of_the_others_that_fill_the_valid_pixels() -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    seen = grant(*make_observation(images, torch.tensor([1, 2]), model="mlp"), "known", "none")
    plain, stretched = (
        solve(InvertingGradients(iterations=3, step_size=1e-3, stretched=on), *seen, seed=0)
        for on in (False, True)
    )
    assert plain.reconstruction.loss == stretched.reconstruction.loss
    a, b = plain.reconstruction.images, stretched.reconstruction.images
    assert a is not None
    assert b is not None
    center = denormalize(torch.zeros(1, 3, 1, 1), seen[0].model)
    for before, after in zip(a - center, b - center, strict=True):
        inside = (after.abs() < 0.45) & (before.abs() > 0.01)  # not at an end of the valid pixels
        ratio = (after / before)[inside]
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=0)
    assert b.amax() > 0.98 or b.amin() < 0.02
    assert not torch.equal(a, b)
