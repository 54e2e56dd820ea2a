"""Attacks on the two-layer head: known features come out, and defenses change what they should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import Attack, AttackFailed, create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.scoring import Scores, score
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, LocalTraining, Observation
from fedsim_attacks.head_features import head_fit
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features.best_features import BestFeatures
from fedsim_attacks.head_features.head_fit import CoarseToFine

HEAD = {"width": 4160, "planted": 4096, "planted_std": 0.1}


def observe(
    count: int, head: dict[str, Any] | None = None, **case: Any
) -> tuple[Observation, GroundTruth]:
    """The features are the normalized images themselves: d = 36, their norm is about 7."""
    images = torch.rand(count, 1, 6, 6, generator=rng.generator(0, "feature example"))
    labels = (3 * torch.arange(count)) % 10
    parameters = {"hidden": [], "head": {**HEAD, **(head or {})}}
    return make_observation(images, labels, model="mlp", model_parameters=parameters, **case)


def attack(name: str, observation: Observation, truth: GroundTruth, **parameters: Any) -> Scores:
    made: Attack[Any] = create(name, parameters)
    found = solve(made, observation, Knowledge(), seed=1).reconstruction
    return score(found, truth)


@pytest.mark.parametrize("count", [1, 2, 8, 16])
@pytest.mark.parametrize("name", ["activation_features", "best_features"])
def test_features_come_out_with_sign_and_norm(name: str, count: int) -> None:
    scores = attack(name, *observe(count))
    assert scores["feature_error"] is not None
    assert max(scores.per_image["feature_error"]) < 1e-6
    assert min(scores.per_image["feature_cosine"]) > 1 - 1e-6


def test_rows_of_several_images_are_peeled() -> None:
    """Among 30 images not all have neurons of their own from the start."""
    images = 0.2 + 0.8 * torch.rand(30, 1, 6, 6, generator=rng.generator(0, "peeled"))
    observation, truth = make_observation(
        images,
        (3 * torch.arange(30)) % 10,
        model="mlp",
        model_parameters={"hidden": [], "head": HEAD},
    )
    made = create("activation_features")
    solution = solve(made, observation, Knowledge(), seed=1).reconstruction
    assert solution.iterations > 1
    cosines = torch.tensor(score(solution, truth).per_image["feature_cosine"])
    assert float((cosines > 0.999).double().mean()) >= 0.95


def test_an_image_whose_loss_nearly_vanishes_is_found() -> None:
    """The model is certain of class 9: in all but the rows of its own its image is rounded away."""
    images = torch.rand(4, 1, 6, 6, generator=rng.generator(0, "feature example"))
    observation, truth = make_observation(
        images,
        torch.tensor([9, 1, 2, 3]),
        model="mlp",
        model_parameters={"hidden": [], "head": {**HEAD, "planted_gain": 50.0}},
    )
    shares = observation.update["head.hidden.bias"].abs()
    assert float(shares[shares > 0].min() / shares.max()) < 1e-4
    for name in ("activation_features", "spectral_features", "best_features"):
        assert max(attack(name, observation, truth).per_image["subspace_error"]) < 1e-3


@pytest.mark.parametrize("count", [1, 4, 12])
def test_the_span_is_the_row_space(count: int) -> None:
    scores = attack("spectral_features", *observe(count))
    assert scores["subspace_error"] is not None
    assert max(scores.per_image["subspace_error"]) < 1e-6
    assert scores["feature_error"] is not None
    if count > 1:
        assert scores["feature_error"] > 0.1  # the span, not single features


def test_clipping_changes_nothing() -> None:
    for name in ("activation_features", "spectral_features", "best_features"):
        scores = attack(name, *observe(4, defense=[{"name": "clip", "norm": 0.001}]))
        assert max(scores.per_image["subspace_error"]) < 1e-6


PAPER = {"divided": True, "unit_features": True, "planted_std": 1.0}
"""The paper's scale: 1/m before the head, and features of unit length."""


@pytest.mark.parametrize("name", ["activation_features", "spectral_features", "best_features"])
def test_a_head_of_the_papers_scale_is_solved_as_well(name: str) -> None:
    scores = attack(name, *observe(6, PAPER))
    assert max(scores.per_image["subspace_error"]) < 1e-5
    if name != "spectral_features":
        assert min(scores.per_image["feature_cosine"]) > 1 - 1e-5
        assert max(scores.per_image["feature_error"]) < 1e-4


@pytest.mark.parametrize("name", ["activation_features", "best_features"])
def test_a_neuron_at_the_kink_hides_no_feature(name: str) -> None:
    """Whether the client had it active is a matter of its rounding, and not of ours."""
    observation, truth = observe(6, PAPER)
    assert truth.features is not None
    planted = HeadGradient.read(observation).planted
    weights = observation.parameters["head.hidden.weight"][planted].double()
    changed = observation.parameters["head.hidden.bias"].double()
    inputs = weights @ truth.features.double().T + changed[planted, None]
    for image in range(6):
        own = (inputs > 0).sum(1).eq(1) & (inputs[:, image] > 0)
        nearest = torch.where(own, inputs[:, image], torch.inf)
        neuron = int(nearest.argmin())
        if own[neuron]:
            changed[planted][neuron] -= nearest[neuron] + 1e-6
    parameters = {**observation.parameters, "head.hidden.bias": changed.float()}
    scores = attack(name, replace(observation, parameters=parameters), truth)
    assert min(scores.per_image["feature_cosine"]) > 1 - 1e-5


def test_noise_is_known_at_the_papers_scale() -> None:
    """∂L/∂A is 1/m of what the formulas take it for, and so is its noise."""
    std = 1e-6
    for paper in ({}, PAPER):
        seen, _ = observe(3, paper, defense=[{"name": "gaussian_noise", "std": std}])
        divisor = HEAD["width"] if paper else 1
        assert HeadGradient.read(seen).noise == pytest.approx((divisor * std) ** 2, rel=0.05)


@pytest.mark.parametrize("std", [0.001, 0.01])
def test_a_fit_sees_through_noise(std: float) -> None:
    noisy = observe(4, defense=[{"name": "gaussian_noise", "std": std}])
    fitted = attack("head_fit", *noisy)["subspace_error"]
    spectral = attack("spectral_features", *noisy)["subspace_error"]
    best = attack("best_features", *noisy)["subspace_error"]
    assert fitted is not None
    assert spectral is not None
    assert best is not None
    assert fitted < 20 * std
    assert fitted < spectral / 3
    assert best < 20 * std


def test_without_noise_a_fit_is_exact_and_finds_norms() -> None:
    scores = attack("head_fit", *observe(3), iterations=400)
    assert max(scores.per_image["subspace_error"]) < 1e-3  # of descent, which goes on falling
    assert max(scores.per_image["feature_error"]) < 0.01  # norms are found on a grid


@pytest.mark.parametrize("activation", ["tanh", "softplus"])
def test_a_fit_takes_any_activation(activation: str) -> None:
    scores = attack("head_fit", *observe(2, {"activation": activation}), iterations=300)
    assert max(scores.per_image["subspace_error"]) < 0.02


@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_pruning_hides_little(ratio: float) -> None:
    pruned = observe(4, defense=[{"name": "gradient_pruning", "ratio": ratio}])
    error = attack("best_features", *pruned)["subspace_error"]
    assert error is not None
    assert error < 0.02


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        ("activation_features", {"planted": 0}, "planted"),
        ("tensor_features", {"planted": 0}, "planted"),
        ("activation_features", {"activation": "tanh"}, "relu"),
        ("spectral_features", None, "two-layer head"),
        ("activation_features", None, "two-layer head"),
        ("tensor_features", None, "two-layer head"),
        ("head_fit", None, "two-layer head"),
        ("best_features", None, "two-layer head"),
    ],
)
def test_what_cannot_work_says_what_would(
    name: str, head: dict[str, Any] | None, message: str
) -> None:
    plain = make_observation(torch.rand(2, 1, 6, 6), torch.tensor([1, 2]), model="mlp")
    with pytest.raises(AttackFailed, match=message):
        attack(name, *(plain if head is None else observe(2, head)))


def test_a_head_whose_update_was_removed_is_refused() -> None:
    images = torch.rand(2, 1, 6, 6, generator=rng.generator(0, "feature example"))
    parameters = {"hidden": [12], "head": HEAD}
    observation, truth = make_observation(
        images, torch.tensor([1, 2]), model="mlp", model_parameters=parameters
    )
    update: dict[str, Tensor] = {
        name: torch.zeros_like(value) if name.startswith("head.") else torch.ones_like(value)
        for name, value in observation.update.items()
    }
    stripped = Observation(**{**vars(observation), "update": update})
    with pytest.raises(AttackFailed, match="nothing is left"):
        attack("best_features", stripped, truth)


def moving(
    hidden: list[int], lr: float, momentum: float, **head: Any
) -> tuple[Observation, GroundTruth]:
    """Three local steps on the same batch, with the features of an MLP."""
    images = torch.rand(6, 1, 6, 6, generator=rng.generator(0, "moving"))
    training = LocalTraining(
        algorithm="fedavg", lr=lr, steps=3, batch_size=6, batches="same", momentum=momentum
    )
    return make_observation(
        images,
        (3 * torch.arange(6)) % 10,
        model="mlp",
        model_parameters={"hidden": hidden, "head": {**HEAD, "planted_gain": 0.01, **head}},
        training=training,
    )


@pytest.mark.parametrize(("lr", "momentum"), [(4.0, 0.0), (1.0, 0.9)])
def test_the_features_before_local_steps_are_found(lr: float, momentum: float) -> None:
    scores = attack("best_features", *moving([48], lr, momentum))
    assert scores["subspace_error"] is not None
    assert scores["subspace_error"] < 0.002
    assert min(scores.per_image["feature_cosine"]) > 0.9999


@pytest.mark.slow
def test_features_that_move_far_need_their_steps_unrolled() -> None:
    case = moving([256, 48], 1.0, 0.0, width=2112, planted=2048)
    unrolled = attack("unrolled_features", *case, iterations=300)["subspace_error"]
    as_one_step = attack("head_fit", *case)["subspace_error"]
    assert unrolled is not None and as_one_step is not None
    assert unrolled < 0.1
    assert 3 * unrolled < as_one_step


def test_steps_are_not_unrolled_behind_noise() -> None:
    observation, truth = observe(2, defense=[{"name": "gaussian_noise", "std": 0.01}])
    with pytest.raises(AttackFailed, match="no exact row space"):
        attack("unrolled_features", observation, truth)


@pytest.mark.parametrize(("iterations", "endless"), [(100, True), (1500, False)])
def test_a_blurred_row_space_is_only_where_the_fit_starts(
    iterations: int, endless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind pruning: first in some directions of 144, then in all, within the budget of both."""
    if endless:  # no fit ends but by its budget
        monkeypatch.setattr(head_fit, "_NEARLY", 0.0)
        monkeypatch.setattr(head_fit, "_LITTLE", -1.0)
    images = torch.rand(2, 1, 12, 12, generator=rng.generator(0, "coarse"))
    observation, truth = make_observation(
        images,
        torch.tensor([1, 4]),
        model="mlp",
        model_parameters={"hidden": [], "head": {**HEAD, "planted_gain": 0.01}},
        defense=[{"name": "gradient_pruning", "ratio": 0.5}],
    )
    made = BestFeatures(iterations=iterations)
    state = made.init(observation, Knowledge(), rng.generator(0, "attack", 0))
    assert isinstance(state.solver, CoarseToFine)
    assert not state.solver.fine
    while not made.terminate(state):
        state = made.step(state)
    assert state.solver.fine
    assert state.iteration <= made.total()
    error = score(made.postprocess(state), truth)["subspace_error"]
    assert error is not None
    assert error < 0.02


def test_dropout_is_peeled() -> None:
    """Each image meets neurons of its own: rows stay exact, and ∂L/∂A is not to be fitted."""
    scores = attack("best_features", *observe(4, defense=[{"name": "dropout", "rate": 0.5}]))
    assert min(scores.per_image["feature_cosine"]) > 1 - 1e-6
