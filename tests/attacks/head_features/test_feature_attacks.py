"""Attacks on the two-layer head: known features come out; and what `head_fit` is made of."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from example_heads import attack, draw, observe, read, span_error

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.victim import rebuild
from fedsim.scoring import score
from fedsim.testing import make_observation
from fedsim.testing.cases import near
from fedsim.types import LocalTraining
from fedsim_attacks.head_features import _joint_fit, head_fit
from fedsim_attacks.head_features._head_gradient import (
    HeadGradient,
    Objective,
    WholeHead,
    labels_of,
)
from fedsim_attacks.head_features.best_features import BestFeatures
from fedsim_attacks.head_features.head_fit import (
    CoarseToFine,
    OutputSolver,
    _propose_splits,
    random_starts,
)

NOISE = [{"name": "gaussian_noise", "std": 0.01}]


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("name", ["activation_features", "best_features"])
def test_features_come_out_with_sign_and_norm(name, count):
    scores = attack(name, *observe(count))
    assert max(scores.per_image["feature_error"]) < 1e-6
    assert min(scores.per_image["feature_cosine"]) > 1 - 1e-6


def test_rows_of_several_images_are_peeled():
    """Among 30 images not all have neurons of their own from the start."""
    observation, truth = observe(0.2 + 0.8 * draw(30, "peeled"))
    made = create("activation_features")
    solution = solve(made, observation, Knowledge(), seed=1).reconstruction
    assert solution.iterations > 1
    cosines = torch.tensor(score(solution, truth).per_image["feature_cosine"])
    assert float((cosines > 0.999).double().mean()) >= 0.95


def test_an_image_whose_loss_nearly_vanishes_is_found():
    """The model is certain of class 9: in all but the rows of its own its image is rounded away."""
    observation, truth = observe(4, {"planted_gain": 50.0}, labels=[9, 1, 2, 3])
    shares = observation.update["head.hidden.bias"].abs()
    assert float(shares[shares > 0].min() / shares.max()) < 1e-4
    for name in ("activation_features", "spectral_features", "best_features"):
        assert max(attack(name, observation, truth).per_image["subspace_error"]) < 1e-3


PAPER = {"divided": True, "unit_features": True, "planted_std": 1.0}
"""The paper's scale: 1/m before the head, and features of unit length."""


@pytest.mark.parametrize("name", ["activation_features", "spectral_features", "best_features"])
def test_neither_clipping_nor_the_papers_scale_hides_features(name):
    clipped = attack(name, *observe(4, defense=[{"name": "clip", "norm": 0.001}]))
    assert max(clipped.per_image["subspace_error"]) < 1e-6
    scores = attack(name, *observe(6, PAPER))
    assert max(scores.per_image["subspace_error"]) < 1e-5
    if name != "spectral_features":
        assert min(scores.per_image["feature_cosine"]) > 1 - 1e-5
        assert max(scores.per_image["feature_error"]) < 1e-4


@pytest.mark.parametrize("name", ["activation_features", "best_features"])
def test_a_neuron_at_the_kink_hides_no_feature(name):
    """Whether the client had it active is a matter of its rounding, and not of ours."""
    observation, truth = observe(6, PAPER)
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


@pytest.mark.parametrize("std", [0.001, 0.01])
def test_a_fit_sees_through_noise(std):
    noisy = observe(4, defense=[{"name": "gaussian_noise", "std": std}])
    fitted = span_error("head_fit", noisy)
    assert fitted < 20 * std
    assert fitted < span_error("spectral_features", noisy) / 3
    assert span_error("best_features", noisy) < 20 * std


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
def test_without_noise_a_fit_takes_any_activation(activation):
    scores = attack("head_fit", *observe(2, {"activation": activation}), iterations=300)
    # Descent goes on falling, and norms are found on a grid.
    assert max(scores.per_image["subspace_error"]) < 0.02
    if activation == "relu":
        assert max(scores.per_image["feature_error"]) < 0.01


@pytest.mark.parametrize(
    ("name", "case", "message"),
    [
        ("activation_features", {"head": {"planted": 0}}, "planted"),
        ("tensor_features", {"head": {"planted": 0}}, "planted"),
        ("activation_features", {"head": {"activation": "tanh"}}, "relu"),
        ("best_features", None, "two-layer head"),
        ("unrolled_features", {"defense": NOISE}, "no exact row space"),
    ],
)
def test_what_cannot_work_says_what_would(name, case, message):
    plain = make_observation(torch.rand(2, 1, 6, 6), torch.tensor([1, 2]), model="mlp")
    with pytest.raises(AttackFailed, match=message):
        attack(name, *(plain if case is None else observe(2, **case)))


def test_a_head_whose_update_was_removed_is_refused():
    observation, truth = observe(2, hidden=[12])
    kept = {n: t * (not n.startswith("head.")) for n, t in observation.update.items()}
    with pytest.raises(AttackFailed, match="nothing is left"):
        attack("best_features", replace(observation, update=kept), truth)


def moving(hidden, lr, momentum, **head):
    """Three local steps on the same batch, with the features of an MLP."""
    training = LocalTraining(
        algorithm="fedavg", lr=lr, steps=3, batch_size=6, batches="same", momentum=momentum
    )
    head = {"planted_gain": 0.01, **head}
    return observe(draw(6, "moving"), head, hidden=hidden, training=training)


@pytest.mark.parametrize(("lr", "momentum"), [(4.0, 0.0), (1.0, 0.9)])
def test_the_features_before_local_steps_are_found(lr, momentum):
    scores = attack("best_features", *moving([48], lr, momentum))
    assert scores["subspace_error"] < 0.002
    assert min(scores.per_image["feature_cosine"]) > 0.9999


@pytest.mark.slow
def test_features_that_move_far_need_their_steps_unrolled():
    case = moving([256, 48], 1.0, 0.0, width=2112, planted=2048)
    unrolled = span_error("unrolled_features", case, iterations=300)
    assert unrolled < 0.1
    assert 3 * unrolled < span_error("head_fit", case)


@pytest.mark.parametrize(("iterations", "endless"), [(100, True), (1500, False)])
def test_a_blurred_row_space_is_only_where_the_fit_starts(iterations, endless, monkeypatch):
    """Behind pruning: first in some directions of 144, then in all, within the budget of both."""
    if endless:  # no fit ends but by its budget
        monkeypatch.setattr(head_fit, "_NEARLY", 0.0)
        monkeypatch.setattr(head_fit, "_LITTLE", -1.0)
    pruning = [{"name": "gradient_pruning", "ratio": 0.5}]
    observation, truth = observe(
        draw(2, "coarse", 12), {"planted_gain": 0.01}, labels=[1, 4], defense=pruning
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
    assert error < 0.02


def test_dropout_is_peeled():
    """Each image meets neurons of its own: rows stay exact, and ∂L/∂A is not to be fitted."""
    scores = attack("best_features", *observe(4, defense=[{"name": "dropout", "rate": 0.5}]))
    assert min(scores.per_image["feature_cosine"]) > 1 - 1e-6


PRUNED = [{"name": "gradient_pruning", "ratio": 0.8}]


def see(count=4, **case):
    """The head's gradient and the true features (N, 36)."""
    return read(observe(draw(count, "head fit"), {"planted_gain": 0.01}, **case))


def worst(found, features):
    """The least cosine of a true feature with the found one that is nearest to it."""
    cosines = F.normalize(features, dim=1) @ F.normalize(found, dim=1).T
    return float(cosines.max(1).values.min())


def fit(seen, start, budget):
    solver = OutputSolver(head_fit.OutputFit(seen, [start]), budget)
    while not solver.finished:
        solver.improve()
    return solver.best[1]


@pytest.mark.parametrize("defense", [None, PRUNED])
def test_the_truth_explains_everything(defense):
    seen, features = see(defense=defense or [])
    value = Objective(seen)(features)
    assert value.loss < 1e-10
    assert Objective(seen)(near(features, 0.3)).loss > 1e-4
    # One error signal an image: negative at its label only, and none in all.
    assert value.errors.argmin(0).tolist() == [0, 3, 6, 9]
    torch.testing.assert_close(value.errors.sum(0), torch.zeros(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("defense", [None, PRUNED])
def test_the_slope_is_the_derivative(defense):
    seen, features = see(defense=defense or [])
    objective, at = Objective(seen), near(features, 0.3)
    along = torch.randn(at.shape, generator=rng.generator(2, "along"))
    along *= 1e-3 * at.norm() / along.norm()
    rise = objective(at + along).loss - objective(at - along).loss
    expected = 2 * (objective(at).slope * along).sum()
    assert float(rise) == pytest.approx(float(expected), rel=0.02)


def test_removed_entries_count_where_they_are_predicted_too_large():
    """The residual of a removed entry is what exceeds the least kept one; of a kept one, all."""
    seen, features = see(defense=PRUNED)
    at = near(features, 0.3)
    value = Objective(seen)(at)
    predicted = value.errors @ seen.activation(at @ seen.hidden.T + seen.bias)
    kept = seen.grad_output != 0
    bound = seen.grad_output[kept].abs().min()
    excess = predicted.abs().sub(bound).clamp(min=0) * predicted.sign()
    assert bool((excess[~kept] != 0).any())
    expected = torch.where(kept, seen.grad_output - predicted, -excess)
    torch.testing.assert_close(value.residual, expected, atol=1e-5, rtol=1e-4)
    # The best D: nothing of the residual is in the hidden values' span.
    hidden = seen.activation(at @ seen.hidden.T + seen.bias)
    assert bool((value.residual @ hidden.T).norm() < 1e-4 * value.residual.norm() * hidden.norm())


@pytest.mark.parametrize("paper", [{}, {"divided": True, "unit_features": True}])
@pytest.mark.parametrize("std", [1e-4, 0.1])
def test_noise_is_estimated_from_outside_the_span(std, paper):
    """At the paper's scale ∂L/∂A is 1/m of what the formulas take it for, and so is its noise."""
    seen, features = read(observe(4, paper, defense=[{"name": "gaussian_noise", "std": std}]))
    assert seen.noise == pytest.approx((seen.divisor * std) ** 2, rel=0.05)
    assert paper == {} or seen.divisor == 4160
    objective = Objective(seen)
    loss = float(objective(features).loss)
    assert loss == pytest.approx(objective.noise_floor(seen.noise), rel=0.1)
    assert see()[0].noise == 0


def test_a_move_frees_a_feature_that_stands_for_two_images():
    """Two images of one label have one feature; what is left over corrects it."""
    seen, features = see(6, labels=[1, 1, 4, 4, 7, 9])
    mean = (features[0] + features[1]) / 2
    stuck = torch.cat([mean[None], near(mean[None], 0.2), features[2:]])
    first = next(iter(_propose_splits(Objective(seen), stuck)))
    assert worst(first, features) > worst(stuck, features) + 0.01
    assert worst(fit(seen, first, 400), features) > 0.9999


@pytest.mark.slow
def test_splits_are_what_frees_a_fit(monkeypatch):
    """Of eight images of two labels, those of one alike."""
    images = draw(2, "alike", seed=4).repeat_interleave(4, 0) + draw(8, "alike", seed=5)
    seen, features = read(observe(images / 2, {"planted_gain": 0.01}, labels=[1] * 4 + [4] * 4))
    starts = [next(random_starts(seen, 1, rng.generator(seed, "start"))) for seed in range(3)]
    assert min(worst(fit(seen, start, 1500), features) for start in starts) > 0.999
    monkeypatch.setattr(head_fit, "_propose_splits", lambda objective, features: iter(()))
    assert min(worst(fit(seen, start, 1500), features) for start in starts) < 0.95


def test_rows_tell_features_that_few_entries_of_the_output_do_not():
    """Pruning per tensor leaves ∂L/∂A few entries, and ∂L/∂W its share."""
    seen, features = see(defense=[{"name": "gradient_pruning", "ratio": 0.7, "scope": "tensor"}])
    assert head_fit.OutputFit(seen, [features]).fits_rows
    start = near(features, 0.05)
    errors = Objective(seen)(features).errors
    found = start
    for _ in range(6):
        found = head_fit._fit_rows(seen, found, errors)
    assert head_fit._rows_unexplained(seen, features, errors) < 1e-8
    assert head_fit._rows_unexplained(seen, start, errors) > 1e-4
    assert worst(start, features) < 0.999 < worst(found, features)
    # A coordinate that few rows tell of may be off, which one by how the processor rounds.
    off = [float((each - features).abs().median()) for each in (start, found)]
    assert off[1] < 0.02 * off[0]


JOINT_HEAD = {"width": 1600, "planted": 1024, "planted_std": 0.1, "planted_gain": 0.1}
LABELS = [2, 2, 4, 4]


def observe_alike(std, clip=None, **head):
    """Two images of each label, alike as those of a barely trained model: d = 36."""
    stream = rng.generator(0, "joint example")
    images = (0.5 + 0.5 * torch.rand(1, 1, 6, 6, generator=stream)).repeat(4, 1, 1, 1)
    images = (images + 0.2 * torch.randn(4, 1, 6, 6, generator=stream)).clamp(0, 1)
    defense = [{"name": "gaussian_noise", "std": std}] if std else []
    if clip:
        defense = [{"name": "clip", "norm": clip}, *defense]
    return observe(images, {**JOINT_HEAD, **head}, labels=LABELS, defense=defense)


@pytest.mark.parametrize("divided", [False, True])
def test_it_is_the_squared_distance_of_the_heads_own_gradient(divided):
    observation, truth = observe_alike(1e-4, divided=divided)
    seen, true = read((observation, truth))
    features = true + 0.1 * torch.randn(4, 36, generator=rng.generator(1, "off"))
    head = rebuild(observation).head
    loss = F.cross_entropy(head(features), truth.labels)
    names = [name for name, _ in head.named_parameters()]
    slopes = torch.autograd.grad(loss, list(head.parameters()))
    left = [
        slope - observation.update[f"head.{name}"]
        for name, slope in zip(names, slopes, strict=True)
    ]
    count = sum(each.numel() for each in left)
    expected = sum(each.double().square().sum() for each in left) / count / 1e-8
    value = WholeHead(seen, truth.labels)(features).detach()
    torch.testing.assert_close(value, expected, rtol=0.02, atol=0)  # the noise is estimated


def test_at_the_truth_the_noise_is_left():
    for clip in (None, 0.05):
        std = 1e-3 if clip is None else 1e-4
        seen, features = read(observe_alike(std, clip))
        value = WholeHead(seen, torch.tensor(LABELS))(features)
        assert float(value.detach()) == pytest.approx(1, rel=0.02)


def test_it_applies_where_features_stand_out_of_noise():
    for std, expected in ((0.0, False), (1e-4, True), (1.0, False)):
        assert _joint_fit.joint_fit_applies(read(observe_alike(std))[0]) == expected


def test_all_of_the_gradient_tells_more_than_its_part():
    whole, part = (
        max(attack(name, *observe_alike(1e-3)).per_image["feature_error"])
        for name in ("best_features", "head_fit")
    )
    assert whole < 1.5 * part < 0.01


def test_labels_are_what_features_do_not_explain():
    """Of a confident model D is small at the label, and any other entry may be less by noise."""
    observation, truth = observe_alike(0, planted=0)
    seen, features = read((observation, truth))
    hidden = seen.activation(features @ seen.hidden.T + seen.bias)
    sure = F.one_hot(truth.labels, 10).float()
    weights = torch.linalg.lstsq(hidden, 8 * sure).solution.T
    seen = replace(seen, output=weights)
    errors = ((hidden @ weights.T).softmax(1) - sure).T / 4
    assert float(errors.abs().max()) < 0.01
    errors[7] -= 0.01
    assert errors.argmin(0).tolist() == [7] * 4
    assert labels_of(seen, features, errors).tolist() == LABELS
    clipped = replace(seen, clipped=True)
    errors[7] += 0.01
    assert labels_of(clipped, features, 0.3 * errors).tolist() == LABELS
