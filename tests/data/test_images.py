"""Pixel helpers against known answers."""

import pytest
import torch
from PIL import Image

from fedsim.data.images import from_pil, resize, statistics, stratified_split


def test_statistics_are_those_of_the_pixels():
    images = torch.randint(
        256, (7, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    pixels = images.double() / 255
    mean, std = statistics(images)
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())


def test_a_constant_channel_can_still_be_normalized():
    assert statistics(torch.full((2, 1, 3, 3), 51, dtype=torch.uint8)) == (
        pytest.approx((0.2,)),
        (1 / 255,),
    )


def test_resize_averages_where_it_reduces():
    checker = torch.zeros(64, 64, dtype=torch.uint8)
    checker[::2, ::2] = checker[1::2, 1::2] = 200
    small = from_pil(resize(Image.fromarray(checker.numpy()), 8, 8))
    assert 95 <= int(small.min()) <= int(small.max()) <= 105


def test_split_is_stratified_disjoint_and_a_function_of_the_labels():
    labels = torch.tensor([0] * 50 + [1] * 20 + [2] * 5)
    train, test = stratified_split(labels, 0.2, "x")
    assert torch.cat([train, test]).sort().values.tolist() == list(range(75))
    assert labels[test].bincount().tolist() == [10, 4, 1]
    torch.manual_seed(99)
    again = stratified_split(labels, 0.2, "x")
    assert torch.equal(again[1], test)
    assert not torch.equal(stratified_split(labels, 0.2, "y")[1], test)
    assert test[:10].tolist() != list(range(10))
