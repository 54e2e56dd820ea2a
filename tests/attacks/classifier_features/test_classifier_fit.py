"""Features of an ordinary classifier: exact where its gradient determines them, and only there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ordinary_classifier import classifier_gradient, search, softmax_gradient
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.victim import rebuild
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import GroundTruth, LocalTraining, Observation, Reconstruction
from fedsim_attacks.classifier_features import _profile, classifier_fit
from fedsim_attacks.classifier_features._certificates import bound_errors
from fedsim_attacks.classifier_features._profile import (
    Consistency,
    Profile,
)
from fedsim_attacks.classifier_features.classifier_fit import ClassifierFit

MLP: dict[str, Any] = {"model": "mlp", "model_parameters": {"hidden": [32]}}
LINEAR: dict[str, Any] = {"model": "mlp", "model_parameters": {"hidden": []}}


def observe(count: int, seed: int = 0, **case: Any) -> tuple[Observation, GroundTruth]:
    stream = rng.generator(seed, "ordinary classifier")
    images = torch.rand(count, 1, 6, 6, generator=stream)
    labels = torch.randint(10, (count,), generator=stream)
    return make_observation(images, labels, seed=seed, **{**MLP, **case})


def fit(observation: Observation, **parameters: Any) -> Reconstruction:
    return solve(ClassifierFit(**parameters), observation, Knowledge(), seed=1).reconstruction


def compared(found: Reconstruction, truth: GroundTruth) -> tuple[Tensor, Tensor]:
    """Returns relative errors of features (N,), and whose they are: in the truth's order."""
    assert found.features is not None and truth.features is not None
    distances = torch.cdist(truth.features, found.features)
    _, order = linear_sum_assignment(distances.numpy())
    whose = torch.from_numpy(order)
    errors = (found.features[whose] - truth.features).norm(dim=1) / truth.features.norm(dim=1)
    return errors, whose


@pytest.mark.parametrize("model", [MLP, {"model": "lenet"}], ids=["mlp", "lenet"])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_every_feature_and_label_comes_out(model: dict[str, Any], count: int) -> None:
    images, labels = example_batch(count)
    observation, truth = make_observation(images, labels, **model)
    found = fit(observation)
    errors, whose = compared(found, truth)
    assert float(errors.max()) < 1e-3
    assert found.labels is not None and found.determined is not None
    assert found.labels[whose].tolist() == truth.labels.tolist()
    assert bool(found.determined.all())


def test_without_a_bias_too() -> None:
    """Then no entry of the features is known."""
    torch.manual_seed(3)
    features, weights = torch.randn(5, 20).relu().double(), torch.randn(10, 20).double()
    labels = torch.tensor([1, 1, 4, 7, 9])
    gradient = softmax_gradient(features, weights, labels)
    problem = Consistency(classifier_gradient(weights, gradient, 5))
    starts = problem.unknowns(torch.randn(16, 5, 20).relu())
    fits = problem.descend(starts, labels.expand(16, -1), 120)
    best = fits.features[fits.losses.argmin()]
    assert float(torch.cdist(features, best).amin(1).max()) < 1e-6


def test_features_that_others_imitate_exactly_are_not_determined() -> None:
    """Without a bias, an image of one of two classes and its negative of the other do."""
    stream = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 8, generator=stream).double() / 2
    features = torch.randn(1, 8, generator=stream).relu().double()
    gradient = softmax_gradient(features, weights, torch.tensor([1]))
    problem = Profile(classifier_gradient(weights, gradient, 1))
    pool = -features.float() * torch.linspace(0.5, 1.5, 9)[:, None]
    found = search(problem, pool, torch.tensor([0]), stream, starts=8, exchanges=0)
    assert found.loss < 1e-20
    torch.testing.assert_close(found.features, -features.float())
    assert found.determined is not None and not bool(found.determined.any())


def test_a_single_image_of_which_a_network_is_sure_is_read_off() -> None:
    """Starts from noise of which it is as sure, but of another class, end in a false minimum."""
    stream = torch.Generator().manual_seed(0)
    weights = 0.1 * torch.randn(2, 9, generator=stream).double()
    away = weights[0, :-1] - weights[1, :-1]
    features = torch.randn(1, 8, generator=stream).relu().double()
    features -= (features @ away + 4)[:, None] / away.square().sum() * away
    labels = torch.tensor([1])
    gradient = softmax_gradient(F.pad(features, (0, 1), value=1.0), weights, labels)
    problem = Profile(replace(classifier_gradient(weights, gradient, 1), biased=True))
    assert 0 < float(gradient[0, -1]) < 0.05
    pool = (9 * away).float() + torch.randn(64, 8, generator=stream)
    found = search(problem, pool, labels, stream, starts=4, exchanges=2)
    assert found.labels is not None and found.labels.tolist() == [1]
    torch.testing.assert_close(found.features, features.float())


@pytest.mark.parametrize("failing", [Profile, Consistency])
def test_one_problem_is_searched_where_the_other_fails(
    failing: type[Profile] | type[Consistency], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any exact update, clipped or not; starts lead elsewhere there."""
    plain = failing.descend

    def nowhere(self: Any, points: Tensor, labels: Tensor, iterations: int, *_: float) -> Any:
        return plain(self, torch.zeros_like(points), labels, 0)

    monkeypatch.setattr(failing, "descend", nowhere)
    for case in ({}, {"defense": [{"name": "clip", "norm": 0.01}]}):
        observation, truth = observe(3, **case)
        errors, _ = compared(fit(observation, exchanges=2), truth)
        assert float(errors.max()) < 1e-3


@pytest.mark.parametrize(
    ("classes", "images", "biased", "factors", "unique"),
    [
        (3, 2, False, 0, False),
        (4, 2, False, 0, True),
        (3, 2, True, 0, True),
        (3, 2, True, 2, False),
        (4, 2, True, 2, True),
        (2, 1, True, 1, True),
        (3, 2, False, 1, False),
    ],
)
def test_as_many_equations_as_unknowns_determine_nothing(
    classes: int, images: int, biased: bool, factors: int, unique: bool
) -> None:
    weights = torch.ones(classes, 8, dtype=torch.float64)
    classifier = replace(
        classifier_gradient(weights, weights, images), biased=biased, factors=factors
    )
    assert classifier.unique == unique


@pytest.mark.slow
def test_the_factor_of_each_image_is_found() -> None:
    """As of clipped examples; with the bias, each feature's last entry is known."""
    observation, truth = observe(4, **LINEAR)
    assert truth.features is not None
    model = rebuild(observation)
    parameters = dict(model.named_parameters())
    sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for factor, x, y in zip((0.9, 0.5, 0.2, 0.1), truth.features, truth.labels, strict=True):
        loss = F.cross_entropy(model.head(x[None]), y[None])
        each = torch.autograd.grad(loss, list(parameters.values()))
        for name, gradient in zip(parameters, each, strict=True):
            sums[name] += factor * gradient / 4
    effect = replace(observation.effect, scaled_examples=True)
    errors, _ = compared(fit(replace(observation, update=sums, effect=effect)), truth)
    assert float(errors.max()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_steps_of_the_classifier_are_unrolled(momentum: float) -> None:
    """Of a model without a body nothing else moves."""
    training = LocalTraining(
        algorithm="fedavg", steps=3, batch_size=4, lr=0.3, momentum=momentum, batches="same"
    )
    observation, truth = observe(4, **LINEAR, training=training)
    errors, _ = compared(fit(observation), truth)
    assert float(errors.max()) < 1e-3


@pytest.mark.slow
def test_noise_beside_features_that_are_few() -> None:
    """No feature is outside the span of a hundred classes' rows, whose spread would be known."""
    noise = [{"name": "gaussian_noise", "std": 1e-4}]
    stream = torch.Generator().manual_seed(0)
    observation, _ = make_observation(
        torch.rand(1, 1, 6, 6, generator=stream),
        torch.tensor([7]),
        num_classes=100,
        defense=noise,
        **MLP,
    )
    assert fit(observation, exchanges=0).features is not None


@pytest.mark.parametrize("bits", [4, 5])
def test_two_rows_that_are_rounded_alike_hide_no_error(bits: int) -> None:
    """Of two classes rows are opposite, and so is what rounding adds: columns sum to 0."""
    defense = [
        {"name": "clip", "norm": 0.05},
        {"name": "quantization", "bits": bits, "rounding": "deterministic"},
    ]
    for seed in range(3):
        stream = torch.Generator().manual_seed(seed)
        observation, truth = make_observation(
            torch.rand(1, 1, 6, 6, generator=stream),
            torch.randint(2, (1,), generator=stream),
            seed=seed,
            num_classes=2,
            defense=defense,
            **MLP,
        )
        found = fit(observation, exchanges=2)
        errors, whose = compared(found, truth)
        assert found.determined is not None
        assert not bool((found.determined[whose] & (errors > 0.03)).any())


def test_weights_that_are_not_finite_are_refused() -> None:
    observation, _ = observe(2)
    weights = {
        name: torch.full_like(part, torch.inf) for name, part in observation.parameters.items()
    }
    with pytest.raises(AttackFailed, match="not finite"):
        fit(replace(observation, parameters=weights))


@pytest.mark.slow
def test_labels_that_were_misread_are_found_by_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    observation, truth = observe(6)
    misread = truth.labels.clone()
    misread[:3] = (misread[:3] + 1) % 10
    monkeypatch.setattr(classifier_fit, "infer_labels", lambda _: misread)
    stuck = fit(observation, exchanges=0)
    assert stuck.determined is not None and not bool(stuck.determined.any())
    found = fit(observation)
    errors, whose = compared(found, truth)
    assert float(errors.max()) < 1e-3
    assert found.labels is not None
    assert found.labels[whose].tolist() == truth.labels.tolist()


def test_an_image_without_error_signal_is_told_apart() -> None:
    """Its softmax is saturated: it has no part in the gradient."""
    torch.manual_seed(0)
    observation, truth = observe(4, **LINEAR)
    assert truth.features is not None
    far = torch.zeros(36)
    far[7] = 3000.0
    features = torch.cat([truth.features[:3], far[None]])
    model = rebuild(observation)
    labels = truth.labels.clone()
    labels[3] = int(model.head(far[None]).argmax())
    parameters = dict(model.named_parameters())
    loss = F.cross_entropy(model.head(features), labels)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    changed = replace(observation, update=dict(zip(parameters, gradients, strict=True)))
    found = fit(changed)
    assert found.determined is not None and found.features is not None
    right = torch.cdist(found.features, features).amin(1) / found.features.norm(dim=1) < 0.03
    assert not bool((found.determined & ~right).any())
    assert int(found.determined.sum()) < 4


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("std", [1e-6, 1e-4, 1e-2])
def test_what_is_called_determined_is_right(std: float, seed: int) -> None:
    noise = [{"name": "gaussian_noise", "std": std}]
    observation, truth = observe(5, seed, defense=noise)
    found = fit(observation, exchanges=2)
    errors, whose = compared(found, truth)
    assert found.determined is not None
    assert not bool((found.determined[whose] & (errors > 0.03)).any())
    if std >= 1e-2:
        assert not bool(found.determined.any())


def test_errors_are_as_large_as_they_are_said_to_be() -> None:
    torch.manual_seed(1)
    features, weights = torch.randn(4, 30).relu().double(), torch.randn(10, 30).double()
    labels = torch.tensor([0, 3, 5, 8])
    clean = softmax_gradient(features, weights, labels)
    inside = 0
    for _ in range(20):
        gradient = clean + 1e-5 * torch.randn_like(clean)
        problem = Consistency(classifier_gradient(weights, gradient, 4))
        fits = problem.descend(problem.unknowns(features[None]), labels[None], 30)
        bound = bound_errors(problem, fits, 0)
        errors = (fits.features[0] - features).norm(dim=1) / features.norm(dim=1)
        assert bool((errors > bound / 30).all())
        inside += int((errors < bound).sum())
    assert inside >= 78


def test_a_fit_that_ran_away_has_no_bound() -> None:
    """Strong noise drives descents to where slopes overflow; the attack goes on and says so."""
    torch.manual_seed(1)
    features, weights = torch.randn(2, 30).relu().double(), torch.randn(10, 30).double()
    labels = torch.tensor([0, 3])
    gradient = softmax_gradient(features, weights, labels)
    for problem in (Consistency, Profile):
        solved = problem(classifier_gradient(weights, gradient, 2))
        fits = solved.descend(solved.unknowns(features[None]), labels[None], 3)
        away = fits._replace(points=torch.full_like(fits.points, torch.nan))
        assert bound_errors(solved, away, 0).tolist() == [torch.inf, torch.inf]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"count": 10}, "of 9 images at most"),
        (
            {
                "count": 3,
                "defense": [{"name": "gradient_pruning", "ratio": 0.9}],
                "training": LocalTraining(
                    algorithm="fedavg", steps=2, batch_size=3, lr=0.1, batches="same"
                ),
            },
            "sets entries to zero",
        ),
        ({"count": 3, "defense": [{"name": "dropout", "rate": 0.5}]}, "dropout"),
        (
            {
                "count": 3,
                "model_parameters": {"hidden": [], "head": {"width": 40, "planted": 0}},
            },
            "not one linear layer",
        ),
    ],
    ids=["batch", "pruning", "dropout", "two layers"],
)
def test_what_holds_no_features_is_refused(case: dict[str, Any], why: str) -> None:
    observation, _ = observe(**case)
    with pytest.raises(AttackFailed, match=why):
        fit(observation)


@pytest.mark.parametrize("factors", [0, 1])
@pytest.mark.parametrize("spread", [None, 2.0])
def test_the_profile_is_what_the_best_rest_leaves(factors: int, spread: float | None) -> None:
    """Its features leave of the gradient what it says, and none moved in what is linear less."""
    torch.manual_seed(4)
    features, weights = torch.randn(4, 20).relu().double(), torch.randn(7, 20).double()
    labels = torch.tensor([0, 2, 2, 5])
    gradient = softmax_gradient(features, weights, labels)
    gradient = gradient + 0.01 * torch.randn_like(gradient)
    classifier = replace(classifier_gradient(weights, gradient, 4), factors=factors)
    problem = Profile(classifier, spread)
    points = problem.unknowns(torch.randn(1, 4, 20).relu())
    found, targets = problem.features(points, labels[None])[0], F.one_hot(labels, 7).double()
    errors = problem.errors(points[0], labels)
    torch.testing.assert_close(
        errors, (found @ weights.T).softmax(1) - F.one_hot(labels, 7), rtol=1e-9, atol=1e-9
    )
    centred = gradient - gradient.mean(0)
    shared = torch.eye(4).double() + 100

    def objective(rest: Tensor) -> Tensor:
        """What `rest`, added outside the span, leaves, and how unlikely that is beforehand."""
        whole = found + rest @ outside
        left = (errors.T @ whole / 4 - centred).square().sum()
        if spread is not None:
            own = whole @ outside
            ratio = (classifier.deviation / spread) ** 2
            left = left + ratio * (own * torch.linalg.solve(shared, own)).sum()
        return left

    span = torch.linalg.qr(weights.T)[0]
    outside = torch.eye(20).double() - span @ span.T
    at = torch.zeros(4, 20).double()
    torch.testing.assert_close(
        problem.residuals(points, targets[None]).square().sum(), objective(at)
    )
    slope = torch.func.grad(objective)(at)
    assert float(slope.norm()) < 1e-9


def test_noise_hides_no_more_than_it_must() -> None:
    """Errors are those of the error signals' inverse, which no fit can be better than by far."""
    ratios = []
    for seed in range(4):
        noise = 1e-4
        observation, truth = observe(5, seed, defense=[{"name": "gaussian_noise", "std": noise}])
        assert truth.features is not None
        found = fit(observation, exchanges=2)
        _, whose = compared(found, truth)
        assert found.features is not None
        errors = (found.features[whose] - truth.features).norm(dim=1)
        logits = rebuild(observation).head(truth.features).detach().double()
        signals = logits.softmax(1) - F.one_hot(truth.labels, 10)
        least = (
            noise * 5 * truth.features.shape[1] ** 0.5 * torch.linalg.pinv(signals.T).norm(dim=1)
        )
        ratios.append(errors / least)
    typical = float(torch.cat(ratios).median())
    assert 0.5 < typical < 4


@pytest.mark.parametrize("scope", ["global", pytest.param("tensor", marks=pytest.mark.slow)])
def test_removed_entries_are_filled_in(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit of zeros in their place is several times as far off."""
    images, labels = example_batch(3)
    defense = [{"name": "gradient_pruning", "ratio": 0.2, "scope": scope}]
    observation, truth = make_observation(images, labels, model="lenet", defense=defense)
    found = fit(observation)
    errors, whose = compared(found, truth)
    assert float(errors.max()) < 4e-3
    assert found.labels is not None and found.determined is not None
    assert found.labels[whose].tolist() == truth.labels.tolist()
    assert not bool(found.determined.any())
    monkeypatch.setattr(_profile, "_TURNS", 0)
    zeros, _ = compared(fit(observation), truth)
    assert float(zeros.max()) > 4 * float(errors.max())
