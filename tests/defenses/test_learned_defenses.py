"""PRECODE and CENSOR do what their papers say, on numbers that are known beforehand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fedsim.contracts.defense import ModelDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.stack import chain
from fedsim.models.base import build
from fedsim.models.local import loss_function
from fedsim.rng import global_stream
from fedsim.testing.cases import example_spec, example_training, local_step, stream
from fedsim.types import Effect, Tensors
from fedsim_defenses.censor import Censor, draw_orthogonal
from fedsim_defenses.precode import Precode, divergence


def test_the_divergence_of_a_unit_gaussian_is_0_and_of_others_torchs() -> None:
    zeros, ones = torch.zeros(3, 5), torch.ones(3, 5)
    assert divergence(zeros, ones).tolist() == [0.0] * 3
    mean, deviation = torch.randn(3, 5, generator=stream()), torch.rand(3, 5, generator=stream(2))
    expected = kl_divergence(Normal(mean, deviation), Normal(zeros, ones)).sum(1)
    torch.testing.assert_close(divergence(mean, deviation), expected)


def test_precode_adds_its_weighted_divergence_to_the_loss() -> None:
    images, labels = torch.randn(3, 1, 4, 4, generator=stream()), torch.tensor([0, 1, 1])

    def loss(weight: float) -> Tensor:
        defenses: list[ModelDefense] = [Precode(size=4, weight=weight)]
        model = build(example_spec((1, 4, 4), 2, hidden=[6]), 0, defenses)
        of = loss_function(model, {}, example_training())
        with global_stream(1):
            return of(dict(model.named_parameters()), images, labels)

    without, once, twice = loss(0), loss(1), loss(2)
    assert once > without + 0.01
    torch.testing.assert_close(twice - without, 2 * (once - without))


GRADIENT = {
    "weight": torch.tensor([[3.0, -4.0, 1.0], [0.0, 2.0, 7.0]]),
    "bias": torch.tensor([1e-4, 2e-4]),
    "single": torch.tensor([5.0]),
    "still": torch.zeros(4),
}


def flat(*_: object) -> Tensor:
    return torch.zeros(())


def test_censor_releases_tensors_that_are_orthogonal_and_as_long() -> None:
    found = draw_orthogonal(GRADIENT, stream())
    for name in ("weight", "bias"):
        true, drawn = GRADIENT[name].double(), found[name].double()
        assert float(drawn.norm()) == pytest.approx(float(true.norm()), rel=1e-6)
        cosine = float((drawn * true).sum() / true.norm() / drawn.norm())
        assert abs(cosine) < 1e-6
    # In two dimensions one direction is left, up to its sign.
    assert found["bias"].abs().tolist() == pytest.approx([2e-4, 1e-4])
    assert not found["single"].any() and not found["still"].any()
    assert not torch.equal(found["weight"], draw_orthogonal(GRADIENT, stream(2))["weight"])


def test_releases_of_one_gradient_give_its_direction_away() -> None:
    """A tensor of d entries is all that is orthogonal to d - 1 releases of it, up to its sign."""
    gradient = {"weight": torch.randn(4, 5, generator=stream(3))}
    seen = [draw_orthogonal(gradient, stream(seed))["weight"] for seed in range(19)]
    found = torch.linalg.svd(torch.stack([each.flatten().double() for each in seen]))[2][-1]
    true = gradient["weight"].flatten().double()
    assert abs(float(found @ true)) == pytest.approx(float(true.norm()), rel=1e-5)
    # One release less leaves a plane.
    left = torch.linalg.svd(torch.stack([each.flatten().double() for each in seen[:-1]]))[2][-1]
    assert abs(float(left @ true)) < 0.999 * float(true.norm())


def softmax_step(defense: Censor, seed: int) -> tuple[Tensors, float]:
    """Returns what a step of softmax regression releases, and the loss after a long step."""
    images, labels = torch.randn(4, 1, 2, 2, generator=stream()), torch.tensor([0, 3, 3, 1])
    at = {
        "head.output.weight": torch.zeros(5, 4, requires_grad=True),
        "head.output.bias": torch.zeros(5, requires_grad=True),
    }

    def loss(parameters: Tensors) -> Tensor:
        weight, bias = parameters["head.output.weight"], parameters["head.output.bias"]
        return torch.nn.functional.cross_entropy(images.flatten(1) @ weight.T + bias, labels)

    def plain(parameters: Tensors, *_: object) -> Tensors:
        return dict(zip(at, torch.autograd.grad(loss(parameters), list(at.values())), strict=True))

    drawn = defense.gradient(local_step(flat, plain, 4))(at, images, labels, stream(seed))
    return drawn, float(loss({n: at[n].detach() - defense.step_size * drawn[n] for n in at}))


def test_censor_takes_the_direction_of_least_loss() -> None:
    drawn, loss = softmax_step(Censor(trials=30, step_size=3.0), seed=1)
    single = [softmax_step(Censor(trials=1, step_size=3.0), seed)[1] for seed in range(1, 20)]
    assert loss < min(single[1:]) + 0.2 and loss < sum(single) / len(single) - 0.2
    assert drawn


def test_censor_that_falls_back_releases_the_gradient_where_no_direction_helps() -> None:
    # At equal logits the loss is convex: no orthogonal step makes it less.
    fallen, after = softmax_step(Censor(falls_back=True, step_size=3.0), seed=1)
    never, other = softmax_step(Censor(step_size=3.0), seed=1)
    cosine = (fallen["head.output.weight"] * never["head.output.weight"]).sum()
    assert abs(float(cosine)) < 1e-6
    assert after < other


@pytest.mark.parametrize("falls_back", [False, True])
def test_censor_never_releases_the_gradient_where_losses_are_nan(
    falls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, _ = softmax_step(Censor(falls_back=True, step_size=3.0), seed=1)
    monkeypatch.setattr("fedsim_defenses.censor._loss", lambda *_: math.nan)
    drawn, _ = softmax_step(Censor(falls_back=falls_back), seed=1)
    name = "head.output.weight"
    assert abs(float((drawn[name] * true[name]).sum())) < 1e-6


def test_censor_proves_nothing_and_alone_is_orthogonal() -> None:
    training = example_training()
    assert math.isinf(Censor().guarantee(Guarantee(), training).sensitivity)
    assert chain(Censor()).effect(training).orthogonal
    assert not chain(Censor(falls_back=True)).effect(training).orthogonal
    steps = example_training(algorithm="fedavg", steps=3)
    assert not chain(Censor()).effect(steps).orthogonal
    for other in (Effect(scaled=True), Effect(drawn=True)):
        own = Effect(mixed=True, orthogonal=True)
        assert not own.then(other).orthogonal and not other.then(own).orthogonal
