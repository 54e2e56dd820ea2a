"""What the SGD learner hands to defenses of steps, and how it trains a model that they alter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim import rng
from fedsim.contracts.defense import GradientFn, LocalStep, LossTerm, ModelDefense, TrainingDefense
from fedsim.contracts.guarantee import Guarantee, Release
from fedsim.contracts.plugins import PluginError
from fedsim.contracts.stack import Stack, chain
from fedsim.learners.sgd import Trained, train
from fedsim.models.base import Classifier, build
from fedsim.testing.cases import example_training, same, stream
from fedsim.types import Effect, FedsimError, LocalTraining, ModelSpec, Tensors
from fedsim_defenses.dp_sgd import DPSGD

SPEC = ModelSpec(
    name="convnet",
    parameters={"norm": "batch", "width": 4},
    input_shape=(1, 9, 9),
    num_classes=3,
    mean=(0.0,),
    std=(1.0,),
)
IMAGES, LABELS = torch.randn(3, 1, 9, 9, generator=stream(0)), torch.tensor([0, 1, 1])


class Looking(TrainingDefense):
    """Takes the step as it is, and remembers what it was handed."""

    def gradient(self, step: LocalStep) -> GradientFn:
        def direction(
            parameters: Tensors, images: Tensor, labels: Tensor, _: torch.Generator
        ) -> Tensors:
            SEEN["features"] = step.features(parameters, images)
            SEEN["names"] = dict(step.model.named_parameters()).keys() == parameters.keys()
            return step.gradient(parameters, images, labels, stream(0))

        return direction

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        return before


SEEN: dict[str, Any] = {}


class Charged(ModelDefense):
    """Charges for the size of features that a random mask lets through."""

    def wrap(self, body: nn.Module, head: nn.Module, features: int) -> tuple[nn.Module, nn.Module]:
        return nn.Sequential(body, Charge()), head

    def effect(self, training: LocalTraining) -> Effect:
        return Effect(drawn=True)


class Charge(LossTerm):
    def forward(self, features: Tensor) -> Tensor:
        self.size = features.square().mean()
        return features.flatten(1) * torch.rand_like(features.flatten(1))

    def loss_term(self) -> Tensor:
        return 10 * self.size


def trained(stack: Stack, spec: ModelSpec = SPEC, **training: Any) -> tuple[Trained, Classifier]:
    model = build(spec, 0, stack.model_defenses)
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    declared = example_training(**training)
    batches = [(IMAGES, LABELS)]
    buffers = dict(model.named_buffers())
    return train(model, spec, parameters, buffers, batches, declared, stack, stream(1)), model


def test_a_step_is_handed_model_and_features_and_leaves_no_trace() -> None:
    plain, model = trained(chain())
    looked, _ = trained(chain(Looking()))
    assert same(plain.update, looked.update)
    assert same(plain.buffers, looked.buffers)
    assert SEEN["names"]
    # The classifier's gradient is that of its logits times the features.
    logits = (SEEN["features"] @ model.head.output.weight.T + model.head.output.bias).softmax(1)
    errors = (logits - nn.functional.one_hot(LABELS, 3)) / 3
    expected = errors.T @ SEEN["features"]
    torch.testing.assert_close(plain.update["head.output.weight"], expected)


@pytest.mark.parametrize("behind", [(), (DPSGD(norm=1e6, noise_multiplier=0.0),)])
def test_a_loss_term_is_part_of_every_gradient(behind: tuple[DPSGD, ...]) -> None:
    spec = ModelSpec(**{**vars(SPEC), "parameters": {"width": 4}})
    result, model = trained(chain(Charged(), *behind), spec)
    if not behind:
        with rng.global_stream(result.seed):
            logits = model(IMAGES)
            loss = nn.functional.cross_entropy(logits, LABELS) + 10 * model.body[1].size
        assert result.loss == pytest.approx(float(loss.detach()))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for name, grad in zip(dict(model.named_parameters()), grads, strict=True):
            torch.testing.assert_close(result.update[name], grad)
    plain, _ = trained(chain(*behind), spec)
    first, altered = next(iter(plain.update.values())), next(iter(result.update.values()))
    assert not torch.allclose(first, altered)


def test_an_altered_model_is_declared_or_refused() -> None:
    with pytest.raises(PluginError, match="Charged is registered under no name in defenses"):
        chain(Charged()).effect(example_training())
    release = Release(kind="sketch", row_norm=1.0, columns=2, features=3)
    with pytest.raises(FedsimError, match=r"Charged changes the model .* choose learner sgd"):
        chain(Charged()).guarantees(example_training(), release)
