"""Attacks on kernel regressions where the answer is known: exact, by quadrature, nothing at all."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from one_process import ask
from sklearn.datasets import load_digits

from fedsim.attacking.knowledge import hand_over_row
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.contracts.guarantee import Release
from fedsim.contracts.target import GuessRequest
from fedsim.learners import ntk
from fedsim.privacy.membership import auc_limit
from fedsim.scoring import score, score_guess
from fedsim.targets.membership import membership_auc
from fedsim.testing import make_kernel_release
from fedsim_attacks.closed_form._kernel_release import (
    ClassPrior,
    KernelModel,
    Matched,
    _derive_equations,
    _posterior_mean,
    _symmetric_labels,
    class_prior,
    known_rows,
    match_rows,
    read_model,
)
from fedsim_attacks.closed_form._quadratic_form import complete_rows, decompose_form
from fedsim_attacks.closed_form.membership_inference import MembershipInference
from fedsim_attacks.closed_form.row_reconstruction import RowReconstruction
from fedsim_defenses.gaussian_sampling import sampled_covariance, square_root
from fedsim_defenses.truncated_laplace import TruncatedLaplace, truncated_laplace

OTHERS = Grant.least(rows="others")
CANDIDATES = 45
MODEL = {"release": "model", "ridge": 1.0}
FORM = {"release": "form", "ridge": 1.0}
OPAQUE = (
    {"name": "gaussian_sampling", "beta": 1.0, "lift": 3.0, "samples": 20},
    {"name": "truncated_laplace", "beta": 1.0, "epsilon": 0.5, "delta": 1e-4},
)


def noise(beta):
    """Ten thousand draws of K, and noise on the features alone that matters."""
    return (
        {"name": "gaussian_sampling", "beta": beta, "lift": 1.0, "samples": 10_000},
        {"name": "truncated_laplace", "beta": beta, "epsilon": 1.0, "delta": 1e-4},
    )


def released(parameters=MODEL, defense=(), num_clients=1, seed=0):
    """Of digits, a third of which take part."""
    digits, count = load_digits(), CANDIDATES * num_clients
    images = torch.from_numpy(digits.images[:count] * 15.9).to(torch.uint8)[:, None]
    labels, members = torch.from_numpy(digits.target[:count]).long(), torch.arange(count) % 3 == 1
    options = {"parameters": parameters, "defense": defense, "num_clients": num_clients}
    return make_kernel_release(images, labels, members, **options, seed=seed)


def answer(attack, case):
    return ask(attack, *case, OTHERS, 0).reconstruction


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=stream(seed), dtype=torch.float64)


def unit(*shape, seed=0):
    return torch.nn.functional.normalize(normal(*shape, seed=seed), dim=1)


@pytest.mark.parametrize("count", [1, 6, 30])
def test_who_knows_all_rows_but_one_finds_it_among_many(count):
    """Also where no two coefficients differ, and whatever the last row's are."""
    rows = unit(count, 10)
    weights = normal(15, 10, seed=2)
    smooth = weights.T @ weights / 15
    for alpha in (normal(count, 3, seed=1), torch.ones(count, 3, dtype=torch.float64)):
        form = ntk.quadratic_form(rows, alpha, weights)
        found, coefficients = complete_rows(form, smooth, rows[:-1])
        torch.testing.assert_close(found[:-1], rows[:-1])
        assert float((found[-1] @ rows[-1]).abs()) == pytest.approx(1.0, abs=1e-9)
        torch.testing.assert_close(coefficients, alpha, rtol=1e-6, atol=1e-8)


def test_what_known_rows_do_not_leave_is_not_found():
    rows = unit(20, 10)
    form = ntk.quadratic_form(rows, normal(20, 3, seed=1))
    eye = torch.eye(10, dtype=torch.float64)
    noise = normal(3, 10, 10, seed=3)
    for known, released in (
        (rows[:-2], form),
        (rows, form),
        (rows[:-1], form + 1e-3 * (noise + noise.transpose(1, 2))),
    ):
        with pytest.raises(AttackFailed, match="not of the known rows and one other"):
            complete_rows(released, eye, known)
    many = unit(50, 10)
    with pytest.raises(AttackFailed, match="too many to see"):
        complete_rows(ntk.quadratic_form(many, normal(50, 3, seed=1)), eye, many[:-1])


@pytest.mark.parametrize(
    ("rows", "neurons", "alike", "why"),
    [
        (11, 0, False, "does not tell its rows apart"),
        (20, 0, False, "does not tell its rows apart"),
        (6, 0, True, "rows with the same coefficients"),
        (4, 9, False, "neurons are fewer than the features"),
    ],
)
def test_a_predictor_that_does_not_tell_its_rows_keeps_them(rows, neurons, alike, why):
    features = unit(rows, 10)
    alpha = ntk.one_hot(torch.arange(rows) % 3, 3) if alike else normal(rows, 3, seed=1)
    weights = normal(neurons, 10, seed=2) if neurons else None
    form = ntk.quadratic_form(features, alpha, *([] if weights is None else [weights]))
    kernel = torch.eye(10).double() if weights is None else weights.T @ weights / neurons
    with pytest.raises(AttackFailed, match=why):
        decompose_form(form, kernel, stream())


def test_labels_are_told_whatever_the_kernel():
    """Y'α̃ is symmetric: no noise on K hides a label. Of two classes that is a single equation, and
    there are labels that nearly solve it."""
    for classes, least in ((10, 1.0), (2, 0.8)):
        labels = torch.arange(40) * 7 % classes
        for seed in range(3):
            factor = normal(40, 80, seed=seed)
            alpha = ntk.fit(factor @ factor.T / 40 * 3, ntk.one_hot(labels, classes), 0.5)
            right = _symmetric_labels(alpha).argmax(1) == labels
            assert float(right.double().mean()) >= least


@pytest.mark.parametrize("parameters", [MODEL, FORM], ids=["model", "form"])
@pytest.mark.parametrize("alpha", [True, False])
def test_without_noise_everything_is_told(parameters, alpha):
    case = released(parameters)
    found = answer(RowReconstruction(alpha=alpha), case)
    wanted = case[1].rows[case[1].members]
    torch.testing.assert_close(found.rows[:, :64], wanted[:, :64], rtol=0, atol=1e-7)
    scores = score(found, case[1])
    assert scores["rows_recovered"] == 1
    if alpha:
        assert scores["label_accuracy"] == 1
    assert score(answer(MembershipInference(alpha=alpha), case), case[1])["membership_auc"] == 1


@pytest.mark.parametrize(
    "defense", [(), ({"name": "gaussian_sampling", "beta": 1.0, "lift": 1.0, "samples": 50},)]
)
def test_a_predictor_of_more_rows_than_entries_hides_none_of_them(defense):
    """From who knows the others, as long as no noise is on the features."""
    observation, truth = released(FORM, [*defense, {"name": "aggregate"}], num_clients=5)
    assert int(truth.members.sum()) > 64
    knowledge = hand_over_row(truth, int(truth.members.nonzero()[3]), OTHERS, asked=False)
    found = solve(RowReconstruction(), observation, knowledge, seed=0).reconstruction
    target = truth.rows[truth.members][3]
    torch.testing.assert_close(found.rows[0], target.double(), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [MODEL, FORM], ids=["model", "form"])
def test_more_noise_never_tells_more(parameters):
    """On average over all rows; and it is the mean that is told, better than what was released."""
    errors, bare = [], []
    for beta in (1e-3, 1e-2, 3e-2, 1e-1):
        case = released(parameters, noise(beta))
        for samples, into in ((40, errors), (0, bare)):
            found = answer(RowReconstruction(samples=samples), case)
            into.append(score(found, case[1])["row_error"])
    assert errors == sorted(errors) and errors[1] > 10 * errors[0]
    assert all(mean <= 1.01 * row for mean, row in zip(errors, bare, strict=True))
    assert errors[1] < 0.6 * bare[1] and errors[-1] < 0.3 * bare[-1]


@pytest.mark.slow
def test_through_opaque_noise_only_the_label_is_seen():
    """Without α̃ the answers are a guess and a coin."""
    areas, told = [], []
    seeing = RowReconstruction(samples=50)
    for seed in range(4):
        case = released(MODEL, OPAQUE, seed=seed)
        guess = score_guess(GuessRequest(truth=case[1]))
        blind = score(answer(RowReconstruction(alpha=False, samples=50), case), case[1])
        assert blind["row_error"] == pytest.approx(guess["row_error"], rel=0.1)
        assert score(answer(seeing, case), case[1])["label_accuracy"] == 1
        for alpha, into in ((False, areas), (True, told)):
            found = answer(MembershipInference(alpha=alpha), case)
            into.append(score(found, case[1])["membership_auc"])
    # 60 members and 120 others: a coin's area has a standard deviation of 0.046.
    assert sum(areas) / 4 == pytest.approx(0.5, abs=4 * 0.046)
    assert sum(told) / 4 > 0.85


def matched(rows, alpha, labels, *, scale, bound, draws=math.inf, lift=0.5):
    """A model whose last row alone is not known."""
    law = {"draws": draws, "lift": lift, "ridge": 0.7, "scale": scale, "bound": bound}
    kernel = torch.eye(rows.shape[1], dtype=torch.float64)
    model = KernelModel(rows=rows, alpha=alpha, labels=labels, kernel=kernel, clients=1, **law)
    return Matched(model=model, others=torch.cat([rows, labels], 1)[:-1], likelihood=0.0)


def single(seen, scale, reach=50):
    """The posterior mean of one number, known as N(0.5, 0.7²), behind Laplace noise."""
    one = torch.ones(1, 1, dtype=torch.float64)
    like = ClassPrior(means=0.5 * one, covariance=0.49 * one, shares=one[0])
    alone = matched(seen * one, one, one, scale=scale, bound=reach * scale)
    return _posterior_mean(alone, like, False, 3_000, stream())


@pytest.mark.parametrize(("seen", "scale"), [(0.0, 0.1), (0.3, 0.1), (1.0, 1.0), (4.0, 1.0)])
def test_the_mean_is_that_of_quadrature(seen, scale):
    grid = np.linspace(-8, 8, 200_001)
    weights = np.exp(-np.abs(seen - grid) / scale - (grid - 0.5) ** 2 / (2 * 0.49))
    expected = float((grid * weights).sum() / weights.sum())
    assert float(single(seen, scale)) == pytest.approx(expected, abs=0.02)


def test_no_row_is_farther_than_the_noise_reaches():
    """Whatever the others are like."""
    assert float(single(4.0, 1.0, reach=0.25)) == 3.75


def regression(count, draw, seed=0):
    """(released exactly but for the target's noise, the target's row) of unit rows."""
    rows = unit(count, 5, seed=9)
    labels = ntk.one_hot(torch.arange(count) % 3, 3)
    lifted = ntk.kernel(rows, rows) + 0.5 * torch.eye(count, dtype=torch.float64)
    gram = sampled_covariance(square_root(lifted), draw, stream(seed)) if draw else lifted
    alpha = ntk.fit(gram, labels, 0.7)
    found = matched(rows, alpha, labels, scale=0.1, bound=1.0, draws=draw or math.inf)
    return found, rows[-1]


def test_coefficients_tell_kernel_values_exactly():
    known, row = regression(12, None)
    told = _derive_equations(known, row)
    values, slopes = told.linear(row)
    torch.testing.assert_close(told.values, values, rtol=0, atol=1e-10)
    step = 1e-6 * normal(5)
    torch.testing.assert_close(
        told.linear(row + step)[0] - values, slopes @ step, rtol=1e-4, atol=1e-12
    )


def test_the_errors_of_what_coefficients_tell_are_as_said():
    """χ² of 11 degrees of freedom, over draws of the kernel matrix."""
    squares = []
    for seed in range(400):
        known, row = regression(12, 400, seed)
        told = _derive_equations(known, row)
        away = told.values - told.linear(row)[0]
        squares.append(float(away @ told.precision @ away))
    assert sum(squares) / 400 == pytest.approx(11, abs=5 * math.sqrt(22 / 400) + 0.5)


def test_a_bare_kernel_gives_rows_away_through_coefficients():
    """More others than entries: noise on the features alone hides nothing."""
    known, row = regression(12, None)
    noisy = known.model.rows.clone()
    noisy[-1] = truncated_laplace(row, 0.1, 1.0, stream(3))
    bare = replace(known, model=replace(known.model, rows=noisy))
    like = class_prior(known.others, 5, False)
    with_alpha, without = (
        _posterior_mean(bare, like, alpha, 200, stream()) for alpha in (True, False)
    )
    assert float((with_alpha - row).norm()) < 1e-3 < 0.05 < float((without - row).norm())


def test_the_claim_bounds_what_a_move_by_beta_tells_and_no_more():
    """Of the two ends of the worst move the likelihood ratio stays within (ε, δ). Between two
    images it does not, and rows show no bound."""
    epsilon, delta, beta, d = 1.0, 1e-3, 0.05, 64
    laplace = {"name": "truncated_laplace", "beta": beta, "epsilon": 1, "delta": delta}
    observation, truth = released(MODEL, [laplace])
    target = int(truth.members.nonzero()[0])
    known = known_rows(hand_over_row(truth, target, OTHERS, True))
    model = match_rows(read_model(observation, known), known, True).model
    mechanism = TruncatedLaplace(beta=beta, epsilon=epsilon, delta=delta)

    def area(one, other):
        ratios = []
        for index, row in enumerate((one, other)):
            noisy = truncated_laplace(row.repeat(4000, 1), model.scale, model.bound, stream(index))
            away = replace(model, rows=noisy).log_density(torch.stack([one, other]))
            ratios.append(away[0] - away[1])
        return membership_auc(torch.cat(ratios), torch.arange(8000) < 4000)

    row = truth.rows[target, :d]
    worst = row + beta / math.sqrt(d)
    limit = auc_limit(epsilon, delta)
    spec = Release(kind="kernel_model", row_norm=1.0, columns=0, features=64)
    assert mechanism.public_parameters(spec) == {"scale": model.scale, "bound": model.bound}
    assert 0.55 < area(row, worst) <= limit + 5 * 0.5 / math.sqrt(4000)
    stranger = truth.rows[target + 1, :d]
    assert float((stranger - row).norm()) > 5 * beta
    assert area(row, stranger) > limit + 0.1


def test_the_declared_law_is_that_of_the_noise():
    """An attacker that were told another would be too weak, and no test would say so."""
    observation, truth = released(MODEL, noise(0.02))
    told = observation.release.statistics
    assert told["kernel"] == {"samples": 10_000, "lift": 1.0}
    members = truth.rows[truth.members]
    away = (observation.update["features"][: len(members)] - members[:, :64]).abs()
    scale, bound = told["features"]["scale"], told["features"]["bound"]
    assert float(away.max()) <= bound
    # The mean of 960 exponential variables, hardly cut off.
    assert float(away.mean()) == pytest.approx(scale, rel=5 / math.sqrt(away.numel()))


def test_whoever_was_exchanged_is_withheld():
    """Of a candidate that took no part one other row is unknown: the number does not tell."""
    _, truth = released(num_clients=3, parameters=FORM, defense=[{"name": "aggregate"}])
    inside, outside = int(truth.members.nonzero()[0]), int((~truth.members).nonzero()[-1])
    count = int(truth.members.sum())
    for target in (inside, outside):
        known = hand_over_row(truth, target, OTHERS, True, stream())
        assert sum(map(len, known.other_rows)) == count - 1
        assert [len(part) for part in known.other_rows][known.target_client] == 14
    assert int(truth.clients[outside]) == 2
    drawn = {
        tuple(hand_over_row(truth, outside, OTHERS, True, stream(s)).other_rows[2].sum(0).tolist())
        for s in range(40)
    }
    assert len(drawn) > 5
    plain = hand_over_row(truth, outside, OTHERS, True)
    assert sum(map(len, plain.other_rows)) == count


def test_what_cannot_be_read_is_refused():
    observation, truth = released(MODEL, [{"name": "clip", "norm": 1.0}])
    with pytest.raises(AttackFailed, match="what the defense of the update does to a kernel"):
        ask(RowReconstruction(), observation, truth, OTHERS, 0)
    observation, truth = released(MODEL)
    other = {"features": {"scale": 1.0, "tail": 2.0}}
    foreign = replace(observation, spec=replace(observation.release, statistics=other))
    with pytest.raises(AttackFailed, match="what features does"):
        ask(MembershipInference(), foreign, truth, OTHERS, 0)
    with pytest.raises(AttackFailed, match=r"knowledge\.rows: others"):
        solve(RowReconstruction(), observation, Knowledge(), 0)
    known = hand_over_row(truth, 0, OTHERS, False)
    few = replace(known, other_rows=(known.other_rows[0][:3],))
    for attack in (RowReconstruction(), MembershipInference()):
        asked = replace(few, candidate=truth.rows[0])
        with pytest.raises(AttackFailed, match="of 15 released rows 3 are known"):
            solve(attack, observation, asked, 0)


def test_releases_of_several_clients_that_nothing_combines_are_refused():
    with pytest.raises(ValueError, match="aggregation defense"):
        released(num_clients=2)
