"""Features of an ordinary classifier: exact where its gradient determines them, and only there."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from deep_victims import photos
from ordinary_classifier import classifier_gradient, search, softmax_gradient
from scipy.optimize import linear_sum_assignment

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import LocalTraining
from fedsim_attacks.classifier_features import _profile, classifier_fit
from fedsim_attacks.classifier_features._certificates import bound_errors
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._local_steps import LocalPath, _Drift, _features, _middle
from fedsim_attacks.classifier_features._profile import Consistency, Profile
from fedsim_attacks.classifier_features.classifier_fit import ClassifierFit

MLP = {"model": "mlp", "model_parameters": {"hidden": [32]}}
LINEAR = {"model": "mlp", "model_parameters": {"hidden": []}}


def observe(count, seed=0, num_classes=10, **case):
    stream = rng.generator(seed, "ordinary classifier")
    images = torch.rand(count, 1, 6, 6, generator=stream)
    labels = torch.randint(num_classes, (count,), generator=stream)
    chosen = {**MLP, "num_classes": num_classes, **case}
    return make_observation(images, labels, seed=seed, **chosen)


def fit(case, **parameters):
    """The answer in the order of the truth, and the relative errors (N,) of its features."""
    observation, truth = case
    found = solve(ClassifierFit(**parameters), observation, Knowledge(), seed=1).reconstruction
    distances = torch.cdist(truth.features, found.features)
    order = linear_sum_assignment(distances.numpy())[1]
    parts = {name: getattr(found, name)[order] for name in ("features", "labels", "determined")}
    found = replace(found, **parts)
    return found, (found.features - truth.features).norm(dim=1) / truth.features.norm(dim=1)


@pytest.mark.parametrize("model", [MLP, {"model": "lenet"}], ids=["mlp", "lenet"])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_every_feature_and_label_comes_out(model, count):
    observation, truth = make_observation(*example_batch(count), **model)
    found, errors = fit((observation, truth))
    assert float(errors.max()) < 1e-3
    assert torch.equal(found.labels, truth.labels)
    assert bool(found.determined.all())


def test_features_that_others_imitate_exactly_are_not_determined():
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
    assert not bool(found.determined.any())


def test_a_single_image_of_which_a_network_is_sure_is_read_off():
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
    assert found.labels.tolist() == [1]
    torch.testing.assert_close(found.features, features.float())


@pytest.mark.parametrize("failing", [Profile, Consistency])
def test_one_problem_is_searched_where_the_other_fails(failing, monkeypatch):
    """Of any exact update, clipped or not; starts lead elsewhere there."""
    plain = failing.descend

    def nowhere(self, points, labels, iterations, *_):
        return plain(self, torch.zeros_like(points), labels, 0)

    monkeypatch.setattr(failing, "descend", nowhere)
    for case in ({}, {"defense": [{"name": "clip", "norm": 0.01}]}):
        assert float(fit(observe(3, **case), exchanges=2)[1].max()) < 1e-3


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
def test_as_many_equations_as_unknowns_determine_nothing(classes, images, biased, factors, unique):
    weights = torch.ones(classes, 8, dtype=torch.float64)
    classifier = replace(
        classifier_gradient(weights, weights, images), biased=biased, factors=factors
    )
    assert classifier.unique == unique


@pytest.mark.slow
def test_the_factor_of_each_image_is_found():
    """As of clipped examples; with the bias, each feature's last entry is known."""
    observation, truth = observe(4, **LINEAR)
    model = rebuild(observation)
    parameters = dict(model.named_parameters())
    sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for factor, x, y in zip((0.9, 0.5, 0.2, 0.1), truth.features, truth.labels, strict=True):
        loss = F.cross_entropy(model.head(x[None]), y[None])
        each = torch.autograd.grad(loss, list(parameters.values()))
        for name, gradient in zip(parameters, each, strict=True):
            sums[name] += factor * gradient / 4
    effect = replace(observation.effect, scaled_examples=True)
    _, errors = fit((replace(observation, update=sums, effect=effect), truth))
    assert float(errors.max()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_steps_of_the_classifier_are_unrolled(momentum):
    """Of a model without a body nothing else moves."""
    training = LocalTraining(
        algorithm="fedavg", steps=3, batch_size=4, lr=0.3, momentum=momentum, batches="same"
    )
    assert float(fit(observe(4, **LINEAR, training=training))[1].max()) < 1e-3


@pytest.mark.slow
def test_noise_beside_features_that_are_few():
    """No feature is outside the span of a hundred classes' rows, whose spread would be known."""
    noise = [{"name": "gaussian_noise", "std": 1e-4}]
    fit(observe(1, num_classes=100, defense=noise), exchanges=0)


@pytest.mark.parametrize("bits", [4, 5])
def test_two_rows_that_are_rounded_alike_hide_no_error(bits):
    """Of two classes rows are opposite, and so is what rounding adds: columns sum to 0."""
    rounding = {"name": "quantization", "bits": bits, "rounding": "deterministic"}
    for seed in range(3):
        case = observe(1, seed, num_classes=2, defense=[{"name": "clip", "norm": 0.05}, rounding])
        found, errors = fit(case, exchanges=2)
        assert not bool((found.determined & (errors > 0.03)).any())


def test_weights_that_are_not_finite_are_refused():
    observation, truth = observe(2)
    weights = {name: part + torch.inf for name, part in observation.parameters.items()}
    with pytest.raises(AttackFailed, match="not finite"):
        fit((replace(observation, parameters=weights), truth))


@pytest.mark.slow
def test_labels_that_were_misread_are_found_by_exchanges(monkeypatch):
    observation, truth = observe(6)
    misread = truth.labels.clone()
    misread[:3] = (misread[:3] + 1) % 10
    monkeypatch.setattr(classifier_fit, "infer_labels", lambda _: misread)
    stuck, _ = fit((observation, truth), exchanges=0)
    assert not bool(stuck.determined.any())
    found, errors = fit((observation, truth))
    assert float(errors.max()) < 1e-3
    assert torch.equal(found.labels, truth.labels)


def test_an_image_without_error_signal_is_told_apart():
    """Its softmax is saturated: it has no part in the gradient."""
    stream = torch.Generator().manual_seed(0)
    features = F.pad(torch.rand(4, 36, generator=stream).double(), (0, 1), value=1.0)
    weights = torch.randn(10, 37, generator=stream).double() / 6
    features[3, 7] = 3000.0
    labels = torch.tensor([1, 4, 7, int((weights @ features[3]).argmax())])
    gradient = softmax_gradient(features, weights, labels)
    problem = Profile(classifier_gradient(weights, gradient, 4, biased=True))
    features, pool = features[:, :-1], torch.rand(64, 36, generator=stream)
    found = search(problem, pool, labels, stream, starts=4, exchanges=2)
    right = (
        torch.cdist(found.features.double(), features).amin(1) / found.features.norm(dim=1) < 0.03
    )
    assert not bool((found.determined & ~right).any())
    assert int(found.determined.sum()) < 4


@pytest.mark.parametrize("std", [1e-6, 1e-4, 1e-2])
def test_what_is_called_determined_is_right(std):
    noise = [{"name": "gaussian_noise", "std": std}]
    found, errors = fit(observe(5, defense=noise), exchanges=2)
    assert not bool((found.determined & (errors > 0.03)).any())
    if std >= 1e-2:
        assert not bool(found.determined.any())


def test_errors_are_as_large_as_they_are_said_to_be():
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


def test_a_fit_that_ran_away_has_no_bound():
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


TWO_STEPS = LocalTraining(algorithm="fedavg", steps=2, batch_size=3, lr=0.1, batches="same")
PRUNING = [{"name": "gradient_pruning", "ratio": 0.9}]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"count": 10}, "of 9 images at most"),
        ({"count": 3, "defense": PRUNING, "training": TWO_STEPS}, "sets entries to zero"),
        ({"count": 3, "defense": [{"name": "dropout", "rate": 0.5}]}, "dropout"),
        ({"count": 3, "model_parameters": {"head": {"width": 40}}}, "not one linear layer"),
    ],
    ids=["batch", "pruning", "dropout", "two layers"],
)
def test_what_holds_no_features_is_refused(case, why):
    with pytest.raises(AttackFailed, match=why):
        fit(observe(**case))


@pytest.mark.parametrize("factors", [0, 1])
@pytest.mark.parametrize("spread", [None, 2.0])
def test_the_profile_is_what_the_best_rest_leaves(factors, spread):
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
    implied = (found @ weights.T).softmax(1) - targets
    torch.testing.assert_close(errors, implied, rtol=1e-9, atol=1e-9)
    centred = gradient - gradient.mean(0)
    shared = torch.eye(4).double() + 100
    span = torch.linalg.qr(weights.T)[0]
    outside = torch.eye(20).double() - span @ span.T

    def objective(rest):
        """What `rest`, added outside the span, leaves, and how unlikely that is beforehand."""
        whole = found + rest @ outside
        left = (errors.T @ whole / 4 - centred).square().sum()
        if spread is not None:
            own = whole @ outside
            ratio = (classifier.deviation / spread) ** 2
            left = left + ratio * (own * torch.linalg.solve(shared, own)).sum()
        return left

    at = torch.zeros(4, 20).double()
    left = problem._residuals(points, targets[None]).square().sum()
    torch.testing.assert_close(left, objective(at))
    assert float(torch.func.grad(objective)(at).norm()) < 1e-9


def test_noise_hides_no_more_than_it_must():
    """Errors are those of the error signals' inverse, which no fit can be better than by far."""
    ratios = []
    for seed in range(4):
        observation, truth = observe(5, seed, defense=[{"name": "gaussian_noise", "std": 1e-4}])
        errors = fit((observation, truth), exchanges=2)[1] * truth.features.norm(dim=1)
        logits = rebuild(observation).head(truth.features).detach().double()
        signals = logits.softmax(1) - F.one_hot(truth.labels, 10)
        least = 5e-4 * truth.features.shape[1] ** 0.5 * torch.linalg.pinv(signals.T).norm(dim=1)
        ratios.append(errors / least)
    assert 0.5 < float(torch.cat(ratios).median()) < 4


@pytest.mark.parametrize("scope", ["global", pytest.param("tensor", marks=pytest.mark.slow)])
def test_removed_entries_are_filled_in(scope, monkeypatch):
    """A fit of zeros in their place is several times as far off."""
    defense = [{"name": "gradient_pruning", "ratio": 0.2, "scope": scope}]
    case = make_observation(*example_batch(3), model="lenet", defense=defense)
    found, errors = fit(case)
    assert float(errors.max()) < 4e-3
    assert torch.equal(found.labels, case[1].labels)
    assert not bool(found.determined.any())
    monkeypatch.setattr(_profile, "_TURNS", 0)
    assert float(fit(case)[1].max()) > 4 * float(errors.max())


def training(**fields):
    same = {"algorithm": "fedavg", "steps": 5, "batch_size": 4, "lr": 0.001}
    return LocalTraining(**{**same, "batches": "same", **fields})


def observe_photos(**case):
    """Four photographs in five steps of a ConvNet."""
    chosen = {"model": "convnet", "model_parameters": {"width": 8}}
    return make_observation(*photos(4), **{**chosen, "training": training(), **case})


def features_at(observation, share, truth):
    return _features(observation, share, normalize(truth.images, observation.model))


def test_noise_tells_most_of_how_features_drift():
    observation, truth = observe_photos()
    drift = _Drift(observation, 0.4, rng.generator(0, "drift"))
    middle_ = features_at(observation, 0.4, truth)
    for share in (0.0, 1.0):
        there = features_at(observation, share, truth)
        off = (drift(middle_, share) - there).norm() / (middle_ - there).norm()
        assert float(off) < 0.6
    torch.testing.assert_close(drift(middle_, 0.4), middle_)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_corrections_explain_what_the_middle_leaves(momentum):
    observation, truth = observe_photos(training=training(momentum=momentum))
    path = LocalPath(observation, rng.generator(0, "path"))
    share = _middle(observation.training, path._shares)
    features = features_at(observation, share, truth)
    seen = path.classifier.gradient
    whole = F.pad(features, (0, 1), value=1.0)
    errors = (whole @ path.classifier.weights.T).softmax(1) - F.one_hot(truth.labels, 10)
    one = errors.T @ whole / len(whole)
    before = float((seen - one).norm())
    after = float((seen - path._correction(features, truth.labels) - one).norm())
    assert after < 0.8 * before


CLIENTS = {"defense": [{"name": "aggregate"}], "num_clients": 2, "training": training(batch_size=2)}


@pytest.mark.parametrize(
    ("case", "suits"),
    [
        ({}, True),
        ({"model": "mlp", "model_parameters": {"hidden": []}}, False),
        ({"training": None}, False),
        ({"training": training(steps=2, batch_size=2, batches="different")}, False),
        ({"defense": [{"name": "gaussian_noise", "std": 1e-6}]}, False),
        ({"defense": [{"name": "clip", "norm": 1e-3}]}, False),
        (CLIENTS, False),
    ],
    ids=["steps", "no body", "one step", "other batches", "noise", "clip", "clients"],
)
def test_exact_steps_of_one_client_on_one_batch_have_a_path(case, suits):
    observation, _ = observe_photos(**case)
    assert LocalPath.suits(observation, ClassifierGradient.read(observation)) == suits


def test_features_over_five_steps_come_out_and_none_is_called_certain():
    observation, truth = observe_photos()
    found, errors = fit((observation, truth))
    assert float(F.cosine_similarity(truth.features, found.features).min()) > 0.998
    assert torch.equal(found.labels, truth.labels)
    assert not bool(found.determined.any())
    # They are of the weights that were sent: of those at the path's end hardly any is as near.
    end = features_at(observation, 1.0, truth).float()
    ends = (found.features - end).norm(dim=1) / truth.features.norm(dim=1)
    assert float(errors.mean()) < 0.5 * float(ends.mean())


def test_a_path_on_which_features_drift_too_far_is_not_followed():
    """Large steps of a fresh network: the middle says nothing of its features then."""
    near, far = (observe_photos(training=training(lr=lr))[0] for lr in (0.001, 0.1))
    paths = [LocalPath(each, rng.generator(0, "noise")) for each in (near, far)]
    assert [path.is_told for path in paths] == [True, False]
