"""The two-layer head and the imprint module: formulas, and what is planted."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedsim.models.base import HeadConfig, HeadDropout, build
from fedsim.models.head import TwoLayerHead, assemble, make_head
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


WIDTH, PLANTED, IN, CLASSES = 600, 500, 64, 4


@pytest.fixture
def head():
    torch.manual_seed(0)
    return TwoLayerHead(HeadConfig(width=WIDTH, planted=PLANTED), IN, CLASSES)


def test_the_heads_formula(head):
    features = torch.randn(3, IN, generator=torch.Generator().manual_seed(1))
    w, b, a = head.hidden.weight, head.hidden.bias, head.output.weight
    torch.testing.assert_close(head(features), torch.relu(features @ w.T + b) @ a.T)
    assert head.output.bias is None


def test_the_papers_scale_divides_logits_by_the_width(head):
    divided = TwoLayerHead(HeadConfig(width=WIDTH, planted=PLANTED, divided=True), IN, CLASSES)
    divided.load_state_dict(head.state_dict())
    features = torch.randn(3, IN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(divided(features), head(features) / WIDTH)


def test_unit_features_are_what_head_and_attacker_get():
    body, images = torch.nn.Flatten(), torch.rand(3, 1, 8, 8)
    config = HeadConfig(width=WIDTH, unit_features=True)
    model = assemble(body, config, (1, 8, 8), CLASSES)
    unit = F.normalize(images.flatten(1), dim=1)
    torch.testing.assert_close(model.features(images), unit)
    torch.testing.assert_close(model(images), model.head(unit))


def test_planted_neurons_are_standard_normal_and_constant(head):
    w, b = head.hidden.weight[-PLANTED:], head.hidden.bias[-PLANTED:]
    n = w.numel()
    assert float(w.mean().detach()) == pytest.approx(0, abs=4 / n**0.5)
    assert float(w.var().detach()) == pytest.approx(1, abs=4 * (2 / n) ** 0.5)
    assert float((w**4).mean().detach()) == pytest.approx(3, abs=4 * (96 / n) ** 0.5)
    assert bool((b == 0).all())
    expected = torch.arange(1, CLASSES + 1)[:, None] / PLANTED
    torch.testing.assert_close(
        head.output.weight[:, -PLANTED:], expected.expand(CLASSES, PLANTED), rtol=0, atol=0
    )


@pytest.mark.parametrize("config", [None, HeadConfig(width=40, activation="sigmoid")])
def test_dropout_acts_on_the_input_of_the_output_layer_in_train_mode(config):
    head = make_head(config, IN, CLASSES)
    inputs_of_output = []
    head.output.register_forward_pre_hook(lambda _, inputs: inputs_of_output.append(inputs[0]))
    (dropout,) = (module for module in head.modules() if isinstance(module, HeadDropout))
    features = torch.rand(50, IN, generator=torch.Generator().manual_seed(2)) + 0.5
    head.eval()
    head(features)
    dropout.rate = 0.25
    head(features)
    head.train()
    torch.manual_seed(3)
    head(features)
    without, evaluated, trained = inputs_of_output
    assert torch.equal(without, evaluated)
    kept = trained != 0
    share = float(kept.float().mean())
    assert share == pytest.approx(0.75, abs=4 * (0.75 * 0.25 / kept.numel()) ** 0.5)
    torch.testing.assert_close(trained[kept], without[kept] / 0.75)
