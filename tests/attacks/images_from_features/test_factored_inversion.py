"""Inversion with known features: zero at the truth behind each defense; slopes that see jumps."""

import math

import pytest
import torch
import torch.nn.functional as F
from deep_victims import HEAD, descend
from torch import nn

from fedsim import rng
from fedsim.contracts.attack import remove_truncated, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import LocalTraining
from fedsim_attacks.fast_autograd._second_order import _smooth_max_pool, _smooth_relu
from fedsim_attacks.gradient_matching._image_priors import KnownFeatures, chromatic_variation
from fedsim_attacks.gradient_matching._matching import MatchedUpdate
from fedsim_attacks.images_from_features._body_gradient import (
    PartGradient,
    WholeGradient,
    _distance_by_part,
)
from fedsim_attacks.images_from_features._heads import signals
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion, _Phases

MODEL = {"model": "convnet", "model_parameters": {"width": 8, "head": HEAD}}


def observe(defense, lr=0.001, algorithm="fedsgd"):
    training = LocalTraining(algorithm=algorithm, steps=1, batch_size=3, lr=lr)
    return make_observation(*example_batch(3), **MODEL, defense=defense, training=training)


def misfit(observation, truth, images, width=0.0):
    """At pixels `images`, given the true features."""
    # Error signals are read off a head without cut entries, which the body is compared with.
    known, options = (
        signals(remove_truncated(observation), truth.features),
        {"weight": 1.0, "width": width, "calls": 1},
    )
    if observation.training.steps == 1:
        objective = PartGradient.of_body(observation, known, **options)
    else:
        objective = WholeGradient(
            observation,
            known.labels,
            features=KnownFeatures(truth.features, "relative"),
            by_part=True,
            **options,
        )
    return objective(normalize(images, observation.model))


CUT = {"name": "percentile_privacy", "percentile": 50, "gamma": 0.05}
LOCAL = {"name": "local_aggregation", "steps": 3, "batches": "same"}


@pytest.mark.parametrize(
    "defense",
    [
        [],
        [{"name": "clip", "norm": 1e-3}],
        [{"name": "gradient_pruning", "ratio": 0.9}],
        [{"name": "gradient_pruning", "ratio": 0.9, "scope": "tensor"}],
        [CUT],
        [CUT, {"name": "clip", "norm": 1e-3}],
        [LOCAL],
        [LOCAL, {"name": "clip", "norm": 1e-4}],
        [{"name": "dropout", "rate": 0.5}],
        [{"name": "dropout", "rate": 0.3}, {"name": "clip", "norm": 1e-3}],
    ],
    ids=str,
)
def test_the_objective_is_zero_at_the_truth(defense):
    observation, truth = observe(defense)
    right = misfit(observation, truth, truth.images, width=1.0)
    assert float(right.update) < 1e-6
    assert float(right.features) < 1e-6
    wrong = misfit(observation, truth, 1 - truth.images, width=1.0)
    assert float(wrong.update) > 1e-2
    assert float(wrong.features) > 1e-2


def test_a_cut_entry_was_no_smaller():
    observation, truth = observe([CUT])
    known = signals(remove_truncated(observation), truth.features)
    update = PartGradient.of_body(observation, known, weight=1.0, width=0.0, calls=1)._update
    cut = [t.abs() > (1 - 1e-5) * CUT["gamma"] for t in update._target]
    halves, _ = update.compare([t / 2 for t in update._target])
    twice, _ = update.compare([2 * t for t in update._target])
    torch.testing.assert_close(halves, [-t / 2 for t in update._target])
    # As of a removed one, which was no larger, only a bound is known.
    left = torch.cat([each[c] for each, c in zip(twice, cut, strict=True)])
    assert len(left) > 100
    torch.testing.assert_close(left, torch.zeros_like(left))


def test_one_local_step_sends_a_multiple_of_the_gradient_that_is_compared():
    observation, truth = observe([], algorithm="fedavg")
    phase = _Phases(observation, observation, truth.features, 0, FactoredInversion()).present
    assert isinstance(phase.misfit, PartGradient)
    assert float(phase.misfit(normalize(truth.images, observation.model)).update) < 1e-6


def test_a_body_of_whose_update_nothing_is_left_leaves_its_features():
    """As global pruning may leave it: not every loss is then undefined."""
    observation, _ = observe([{"name": "gradient_pruning", "ratio": 0.5}])
    for name, tensor in observation.update.items():
        if name.startswith("body."):
            tensor.zero_()
    found = solve(FactoredInversion(iterations=6), observation, Knowledge(), 0)
    assert math.isfinite(found.reconstruction.loss)


def test_a_clipped_update_of_several_steps_has_no_scale():
    """And the slope is that of the loss: compared with differences of it."""
    names = ["body.0.weight", "head.output.weight"]
    stream = rng.generator(0, "scale")
    target, at, along = ([torch.randn(n, generator=stream) for n in (5, 7)] for _ in range(3))
    zero = torch.zeros(())

    def loss(step, factor=1.0):
        goal = MatchedUpdate([factor * t for t in target], square=zero, outside=zero)
        moved = [u + step * v for u, v in zip(at, along, strict=True)]
        return _distance_by_part(names, clipped=True)(moved, goal)[0].double()

    assert float(loss(0.0, 1e-3)) == pytest.approx(float(loss(0.0)), rel=1e-4)
    _, direction, scale = _distance_by_part(names, clipped=True)(
        at, MatchedUpdate(target, square=zero, outside=zero)
    )
    slope = scale * sum((d * v).sum() for d, v in zip(direction, along, strict=True))
    assert float(slope) == pytest.approx(float(loss(0.01) - loss(-0.01)) / 0.02, rel=1e-2)


@pytest.mark.parametrize("defense", [[], [LOCAL]], ids=["one step", "local steps"])
def test_several_steps_are_unrolled_in_the_end(defense):
    observation, _ = observe(defense)
    state, kinds = descend(FactoredInversion(iterations=10), observation)
    several = bool(defense)
    assert kinds == [PartGradient] * (7 if several else 10) + [WholeGradient] * 3 * several
    phase = state.phase
    at = phase.misfit(state.best)
    variation, _ = chromatic_variation(state.best)
    final = 0.4 * phase.total_variation  # whatever the weight is by now
    torch.testing.assert_close(state.best_loss, at.loss + final * variation)


def second(function, x, pull, toward):
    """The derivative in x of <toward, the gradient of <pull, function(x)>>."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((function(x) * pull).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad((slope * toward).sum(), x)
    return found


def test_second_derivatives_are_those_of_smooth_layers():
    """Of softplus (width times) for ReLU, of log-sum-exp for max pooling, in closed form."""
    width = 0.7
    x, pull, toward = torch.randn(3, 2, 1, 9, 9, dtype=torch.float64).unbind()

    def softplus(z):
        return width * F.softplus(z / width)

    assert torch.allclose(
        second(lambda z: _smooth_relu(z, width=width), x, pull, toward),
        second(softplus, x, pull, toward),
    )

    def smooth_pool(z):
        windows = z.view(2, 1, 3, 3, 3, 3).permute(0, 1, 2, 4, 3, 5).reshape(2, 1, 3, 3, 9)
        return width * torch.logsumexp(windows / width, -1)

    # Their first derivatives differ, so that only the term of the second is compared.
    pull = pull[..., :3, :3]
    pool = nn.MaxPool2d(3)
    assert torch.allclose(
        second(lambda z: _smooth_max_pool(pool, z, width=width), x, pull, toward),
        second(smooth_pool, x, pull, toward),
    )
