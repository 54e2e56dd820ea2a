"""The laws of closed-form releases: against SciPy, against draws, and their limits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.learners.closed_form import sketch
from fedsim.learners.least_squares import solve
from fedsim.privacy.numerics import gaussian
from fedsim.testing import make_release
from fedsim.types import UNKNOWN
from fedsim_attacks.closed_form._release_likelihood import release_likelihood

ROWS = torch.randn(30, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ROWS.clamp_(-1, 1)
ALL = torch.ones(len(ROWS), dtype=torch.bool)
ROW = torch.tensor([[0.9, -0.4, 0.3, -0.8]], dtype=torch.float64)
WORLDS = torch.cat([torch.zeros_like(ROW), ROW])


def observed(learner="sketch", *, clients=1, defense=(), **parameters):
    """A release of `ROWS`, to someone who knows all of them."""
    members = [*defense, *([{"name": "aggregate"}] if clients > 1 else [])]
    case = {"learner": learner, "parameters": parameters, "num_clients": clients}
    observation, _ = make_release(ROWS, ALL, **case, defense=members, intercept=False)
    return observation, Knowledge(
        grant=Grant.least(rows="others"), other_rows=ROWS.chunk(clients), target_client=0
    )


def gram(sigma=0.0, row=False, rows=ROWS):
    every = torch.cat([rows, ROW]) if row else rows
    return every.T @ every + sigma**2 * torch.eye(4, dtype=torch.float64)


def ratio(found):
    absent, present = found.log_likelihood(WORLDS).tolist()
    return float(present - absent)


def moments(whole):
    """(x̂, A, e²)."""
    features, target = whole[:-1, :-1], whole[:-1, -1]
    best = torch.linalg.solve(features, target)
    return best, features, float(whole[-1, -1] - target @ best)


def of_columns(columns, sigma=0.0):
    """The ratio of a sketch, whose columns are independent and normal."""
    with_row, without = (
        stats.multivariate_normal(np.zeros(4), gram(sigma, row).numpy()) for row in (True, False)
    )
    return float((with_row.logpdf(columns.numpy()) - without.logpdf(columns.numpy())).sum())


def of_coefficients(observation, law, added=0.0):
    """The ratio of coefficients, whose law has `added` variance."""
    densities = []
    for row in (True, False):
        best, features, residual = moments(gram(row=row))
        spread = residual * torch.linalg.inv(features)
        law_here = law(best.numpy(), (spread + 9 * added * torch.eye(3)).numpy())
        densities.append(float(law_here.logpdf(observation.update["release"].numpy())))
    return densities[0] - densities[1]


def limit(best, spread):
    return stats.multivariate_normal(best, spread / 9)


def student(best, spread):
    return stats.multivariate_t(best, spread / 7, df=7)


@pytest.mark.parametrize("sigma", [0.0, 1.5])
def test_a_sketch_has_independent_normal_columns(sigma):
    observation, knowledge = observed(columns=7)
    observation = replace(observation, spec=replace(observation.release, sigma=sigma))
    expected = of_columns(observation.update["release"].T, sigma)
    assert ratio(release_likelihood(observation, knowledge)) == pytest.approx(expected, rel=1e-6)


def test_the_sum_of_sketches_is_the_sketch_of_the_union():
    observation, knowledge = observed(columns=7, clients=3)
    expected = of_columns(3 * observation.update["release"].T)
    assert ratio(release_likelihood(observation, knowledge)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("method", "law"), [("als", student), ("ls", limit)])
def test_coefficients_follow_a_multivariate_t_or_its_normal_limit(method, law):
    """At r = 9 and d = 3, of ν = 7 degrees of freedom, by SciPy's density."""
    observation, knowledge = observed("least_squares", method=method, columns=9)
    expected = of_coefficients(observation, law)
    assert ratio(release_likelihood(observation, knowledge)) == pytest.approx(expected, rel=1e-6)


def test_draws_have_that_law():
    """4000 regressions on sketches: (x - x̂)'A(x - x̂) ν / (d e²) is F(d, ν), by Kolmogorov-Smirnov.

    The normal law of the same spread, which holds for many columns, is told from it.
    """
    draw = torch.Generator().manual_seed(2)
    found = torch.stack([solve(sketch(ROWS, 9, draw).T) for _ in range(4000)])
    best, features, residual = moments(gram())
    away = found - best
    distance = ((away @ features) * away).sum(1) / residual
    assert stats.kstest((distance * 7 / 3).numpy(), stats.f(3, 7).cdf).pvalue > 1e-3
    assert stats.kstest((distance * 9).numpy(), stats.chi2(3).cdf).pvalue < 1e-6


def test_of_summed_coefficients_the_others_are_taken_away():
    """Without randomness what is left is the target client's own solution."""
    observation, knowledge = observed("least_squares", method="ols", clients=3)
    found = release_likelihood(observation, knowledge)
    torch.testing.assert_close(found.observed, solve(ROWS.chunk(3)[0]), rtol=1e-6, atol=1e-6)
    assert ratio(found) < -1e3


def test_declared_noise_is_part_of_the_law():
    noise = {"name": "gaussian_noise", "std": 0.7}
    observation, knowledge = observed("least_squares", method="ls", columns=9, defense=(noise,))
    expected = of_coefficients(observation, limit, added=0.49)
    assert ratio(release_likelihood(observation, knowledge)) == pytest.approx(expected, rel=1e-5)
    noisy, _ = observed(columns=7, defense=(noise,))
    expected = of_columns(noisy.update["release"].T, 0.7)
    assert ratio(release_likelihood(noisy, knowledge)) == pytest.approx(expected, rel=1e-6)


def test_calibrated_noise_is_that_of_its_multiplier():
    """An attacker that could not read ε and δ would fail, and the defense look perfect."""
    clip, calibrated = {"name": "clip", "norm": 2.0}, {"epsilon": 1.0, "delta": 1e-5}
    multiplier = float(gaussian.noise_multiplier(**calibrated))
    ratios = []
    for scale in (calibrated, {"multiplier": multiplier}, {"std": 2 * multiplier}):
        noisy, knowledge = observed(columns=7, defense=(clip, {"name": "gaussian_noise", **scale}))
        ratios.append(ratio(release_likelihood(noisy, knowledge)))
    assert ratios[0] == pytest.approx(ratios[1]) == pytest.approx(ratios[2])
    assert ratios[0] != 0


def test_of_summed_coefficients_the_others_have_a_law_too():
    """Their covariance is that of the t distribution, and each client adds its own noise."""
    noise = {"name": "gaussian_noise", "std": 0.7}
    for method, divisor in (("ls", 9), ("als", 9 - 3 - 1)):
        observation, knowledge = observed(
            "least_squares", method=method, columns=9, clients=3, defense=(noise,)
        )
        expected = 3 * 0.49 * torch.eye(3, dtype=torch.float64)
        for rows in ROWS.chunk(3)[1:]:
            _, features, residual = moments(gram(rows=rows))
            expected += residual * torch.linalg.inv(features) / divisor
        found = release_likelihood(observation, knowledge).variance
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_clipping_is_taken_as_the_scale_that_is_expected():
    """Of a sketch sqrt(r tr K), of coefficients |x̂|; one that is not reached changes nothing."""
    free, knowledge = observed(columns=40)
    wide, _ = observed(columns=40, defense=({"name": "clip", "norm": 1e6},))
    assert ratio(release_likelihood(wide, knowledge)) == ratio(release_likelihood(free, knowledge))
    tight, _ = observed(columns=40, defense=({"name": "clip", "norm": 2.0},))
    found = release_likelihood(tight, knowledge)
    assert found.scale == pytest.approx(2 / float(40 * gram().trace()) ** 0.5)
    torch.testing.assert_close(found.gram, found.scale**2 * gram(), rtol=1e-6, atol=1e-9)
    best = solve(ROWS)
    bound = float(best.norm()) / 3
    clipped, _ = observed("least_squares", method="ols", defense=({"name": "clip", "norm": bound},))
    found = release_likelihood(clipped, knowledge)
    assert found.scale == pytest.approx(1 / 3, rel=1e-6)
    torch.testing.assert_close(found.observed, best / 3, rtol=1e-6, atol=1e-9)
    assert ratio(found) < -1e3


def test_noise_that_is_not_told_is_not_guessed():
    observation, knowledge = observed(columns=7)
    with pytest.raises(AttackFailed, match="does not declare its effect"):
        release_likelihood(replace(observation, effect=UNKNOWN), knowledge)
