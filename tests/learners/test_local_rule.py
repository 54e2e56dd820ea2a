"""Local training by other rules than SGD, at rates that fall, and what attacks are told of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_scenario

from fedsim.attacking.replay import simulation_error
from fedsim.contracts.attack import create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.scenario import Scenario, cautions
from fedsim.scenario.build import rate_factor
from fedsim.scenario.resolve import resolve
from fedsim.testing import make_observation
from fedsim.training import accounting
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, LocalTraining, StepRule

_STEP = {"name": "step", "every": 2, "factor": 0.1}


def scenario(
    local: dict[str, Any],
    stack: list[dict[str, Any]] | None = None,
    attacks: tuple[str, ...] = (),
    **training: Any,
) -> Scenario:
    training = {"rounds": 5, "local": {"batch_size": 6, "lr": 0.01, **local}, **training}
    return resolve(
        tiny_scenario(
            seed=3,
            data__source="digits",
            model={"name": "mlp", "hidden": [8]},
            training=training,
            defenses={"none": stack or []},
            attacks=list(attacks),
        )
    )


OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "adam": ({"optimizer": "adam"}, lambda p, lr: torch.optim.Adam(p, lr)),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.3},
        lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.3),
    ),
    "sgd": (
        {"momentum": 0.9, "weight_decay": 0.3},
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.3),
    ),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_round_is_that_of_torch_optim_at_the_rounds_rate(name: str, steps: int) -> None:
    local, make = OPTIMIZERS[name]
    workload = Workload(scenario({**local, "steps": steps, "schedule": _STEP}), "none")
    parameters, buffers = workload.initial()
    trained = workload.client_update(0, 5, parameters, buffers, {})
    assert workload.model is not None and trained.truth is not None
    workload.model.load_state_dict(parameters)
    truth: Any = trained.truth
    images = normalize(truth.images, workload.spec).chunk(steps)
    # Two falls of the rate come before round 5.
    optimizer = make(workload.model.parameters(), 0.01 * 0.1**2)
    for batch, labels in zip(images, truth.labels.chunk(steps), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(workload.model(batch), labels).backward()
        optimizer.step()
    for key, after in workload.model.named_parameters():
        moved = after.detach() - parameters[key]
        torch.testing.assert_close(trained.update.tensors[key], moved, atol=1e-7, rtol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_attacks_simulate_is_the_training_to_rounding(name: str) -> None:
    local, _ = OPTIMIZERS[name]
    workload = Workload(scenario({**local, "steps": 3, "schedule": _STEP}), "none")
    parameters, buffers = workload.initial()
    trained = workload.client_update(0, 5, parameters, buffers, {})
    seen = workload.observation(5, 0, trained.update, parameters, buffers)
    error = simulation_error(seen, trained.truth)
    assert error is not None and error < 1e-6
    # Taken for plain SGD at the first round's rate, it is another training.
    untold = workload.observation(1, 0, trained.update, parameters, buffers)
    error = simulation_error(untold, trained.truth)
    assert error is not None and error > 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_step_does_with_a_private_gradient_costs_no_privacy(name: str) -> None:
    """DP-SGD defends the gradient of each step; optimizer, decay and rate only process it."""
    local, _ = OPTIMIZERS[name]
    stack = [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 2.0}]
    plain, ruled = (
        accounting.spent(Workload(scenario({**own, "steps": 2}, stack), "none"), 5).epsilon
        for own in ({}, {**local, "schedule": _STEP})
    )
    assert ruled == plain < math.inf


def test_rates_fall_as_the_schedule_says() -> None:
    step = scenario({"schedule": _STEP}).training
    assert [rate_factor(step, r) for r in range(1, 6)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    cosine = scenario({"schedule": {"name": "cosine", "factor": 0.2}}).training
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * r / 4)) / 2 for r in range(5)]
    assert [rate_factor(cosine, r) for r in range(1, 6)] == pytest.approx(expected)
    assert expected[0] == 1 and expected[-1] == pytest.approx(0.2)


def test_the_server_steps_by_the_rounds_rate() -> None:
    workload = Workload(scenario({"schedule": _STEP}), "none")
    assert workload.training.algorithm == "fedsgd"
    zero, one = torch.zeros(1), torch.ones(1)
    moved = [float(workload.apply_update(zero, one, round)) for round in (1, 3, 5)]
    assert moved == pytest.approx([-0.01, -0.001, -0.0001])


def test_a_step_that_is_not_plain_sends_a_change_of_weights() -> None:
    for local in ({"optimizer": "adam"}, {"weight_decay": 0.1}):
        assert Workload(scenario(local), "none").training.algorithm == "fedavg"
        attacked = scenario(local, attacks=("inverting_gradients",))
        assert any("training.local" in line for line in cautions(attacked))
    assert not cautions(scenario({}, attacks=("inverting_gradients",)))


@pytest.mark.parametrize(
    ("local", "training", "message"),
    [
        ({"optimizer": "adam", "momentum": 0.9}, {}, "training.local.momentum: adam"),
        ({"optimizer": "adam"}, {"algorithm": "fedsgd"}, "training.algorithm: fedsgd takes no"),
        ({"weight_decay": 0.1}, {"algorithm": "fedsgd"}, "training.algorithm: fedsgd takes no"),
        ({"schedule": {"name": "step"}}, {}, "training.local.schedule.every: missing"),
        ({"schedule": {"name": "cosine", "every": 2}}, {}, "training.local.schedule.every: cos"),
        (
            {"schedule": {"name": "step", "every": 1, "factor": 1e-12}},
            {},
            "training.local.schedule.factor: the rate falls below",
        ),
        ({"schedule": {"name": "step", "every": 2, "factor": 0}}, {}, "schedule.factor"),
        ({"optimizer": "lion"}, {}, "training.local.optimizer"),
        ({"weight_decay": -1.0}, {}, "training.local.weight_decay"),
    ],
)
def test_what_cannot_work_is_refused(
    local: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedsimError, match=message):
        scenario(local, **training)


@pytest.mark.parametrize("rule", [StepRule(optimizer="adam"), StepRule(weight_decay=0.5)])
def test_nothing_is_certain_of_an_update_that_is_no_sum_of_gradients(rule: StepRule) -> None:
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    told = []
    for own in (None, rule):
        how = LocalTraining(algorithm="fedavg", steps=1, batch_size=2, lr=0.01, rule=own)
        seen, _ = make_observation(
            images, torch.tensor([1, 3]), model="mlp", training=how, num_classes=10
        )
        answer = solve(create("classifier_fit"), seen, Knowledge(), seed=0).reconstruction
        told.append(answer.determined is not None and bool(answer.determined.any()))
    assert told == [True, False]
