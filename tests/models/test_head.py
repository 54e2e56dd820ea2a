"""The two-layer head: its formula, what is planted, and its dropout."""

import pytest
import torch
import torch.nn.functional as F

from fedsim.models.base import HeadConfig, HeadDropout
from fedsim.models.head import TwoLayerHead, assemble, make_head

WIDTH, PLANTED, IN, CLASSES = 600, 500, 64, 4


@pytest.fixture
def head():
    torch.manual_seed(0)
    return TwoLayerHead(HeadConfig(width=WIDTH, planted=PLANTED), IN, CLASSES)


def test_formula(head):
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
