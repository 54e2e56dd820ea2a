"""The imprint module: its formula, its bins, and that it changes nothing else."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch

from fedsim.models.base import build
from fedsim.models.imprint import Imprint, ImprintConfig
from fedsim.types import ModelSpec

SHAPE, BINS = (3, 10, 9), 16
SIZE = 3 * 10 * 9
SMALL: dict[str, dict[str, Any]] = {
    "convnet": {"width": 4},
    "lenet": {},
    "mlp": {"hidden": [16, 8]},
    "resnet18": {"width": 4},
}


def imprint(**config: float) -> Imprint:
    torch.manual_seed(0)
    return Imprint(ImprintConfig(bins=BINS, **config), SHAPE)  # type: ignore[arg-type]


def images(count: int = 5) -> torch.Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(1))


def spec(name: str, parameters: dict[str, Any]) -> ModelSpec:
    half = (0.5,) * 3
    return ModelSpec(
        name=name, parameters=parameters, input_shape=SHAPE, num_classes=5, mean=half, std=half
    )


def test_formula() -> None:
    module, x = imprint(), images()
    w, b, v = module.hidden.weight, module.hidden.bias, module.output.weight
    expected = x.flatten(1) + torch.relu(x.flatten(1) @ w.T + b) @ v.T
    torch.testing.assert_close(module(x), expected.view_as(x))


def test_bins_are_equally_likely_and_the_first_one_is_open_below() -> None:
    """Neuron i passes the images of brightness above quantile i / k of N(0, std²)."""
    module = imprint(std=0.7, scale=0.1)
    chances = [NormalDist(sigma=0.7).cdf(-float(b) / 0.1) for b in module.hidden.bias.detach()]
    assert chances == pytest.approx([i / BINS for i in range(BINS)], abs=1e-5)
    assert (module.hidden.weight == 0.1 / SIZE).all()
    dark, bright = (torch.full((1, SIZE), value) for value in (-3.0, 3.0))
    assert int((module.hidden(dark) > 0).sum()) == 1
    assert int((module.hidden(bright) > 0).sum()) == BINS


def test_the_scale_is_divided_out_but_for_the_gradient() -> None:
    x, pull = images(), images()
    results = []
    for scale in (1.0, 0.01):
        module = imprint(scale=scale)
        y = module(x)
        (gradient,) = torch.autograd.grad((y * pull).sum(), module.hidden.weight)
        results.append((y.detach(), gradient))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(100 * results[0][1], results[1][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_it_changes_no_other_weight_and_no_stream(name: str) -> None:
    plain = build(spec(name, SMALL[name]), seed=7)
    assert plain.imprint is None
    assert not any("imprint" in key for key in plain.state_dict())
    state = torch.get_rng_state()
    marked = build(spec(name, {**SMALL[name], "imprint": {"bins": BINS}}), seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    weights = marked.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in plain.state_dict().items())
    again = build(spec(name, {**SMALL[name], "imprint": {"bins": BINS}}), seed=7).state_dict()
    assert all(torch.equal(weights[key], value) for key, value in again.items())
    plain.eval()
    marked.eval()
    assert marked.imprint is not None
    torch.testing.assert_close(marked(images()), plain(marked.imprint(images())))
    assert marked.features(images()).shape == plain.features(images()).shape
