"""Attacks on rows where the answer is known: exact, nothing at all, and in between."""

from dataclasses import dataclass

import pytest
import torch
from one_process import ask

from fedsim import rng
from fedsim.attacking.knowledge import hand_over_row
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.scoring import score
from fedsim.testing import make_observation, make_release
from fedsim.testing.cases import example_rows
from fedsim_attacks.closed_form.membership_inference import MembershipInference
from fedsim_attacks.closed_form.row_reconstruction import (
    Prior,
    RowReconstruction,
    _RowPosterior,
    prior,
)
from fedsim_attacks.gradient_matching.deep_leakage import DeepLeakage

OTHERS = Grant.least(rows="others")


def released(count=24, *, columns=4, **arguments):
    arguments.setdefault("parameters", {"columns": 50})
    return make_release(*example_rows(count, columns), **arguments)


def answer(attack, case):
    return ask(attack, *case, OTHERS, 0).reconstruction


OLS = {"learner": "least_squares", "parameters": {"method": "ols"}}
SUM = {"defense": [{"name": "aggregate"}], "num_clients": 3}


@pytest.mark.parametrize(
    ("count", "summed"), [(24, {}), pytest.param(60, SUM, marks=pytest.mark.slow)]
)
def test_coefficients_without_noise_give_rows_and_members_away(count, summed):
    """The constant feature tells the scale and the sign: nothing is left to guess."""
    case = released(count, **OLS, **summed)
    found = answer(RowReconstruction(), case)
    assert score(found, case[1])["rows_recovered"] == 1
    if not summed:
        wanted = case[1].rows[case[1].members]
        torch.testing.assert_close(found.rows, wanted, rtol=0, atol=1e-4)
    told = answer(MembershipInference(), case)
    assert torch.equal(told.membership > 0, case[1].members)
    assert score(told, case[1])["membership_auc"] == 1


@pytest.mark.parametrize("classes", [pytest.param(None, marks=pytest.mark.slow), ("no", "yes")])
def test_without_a_constant_feature_the_direction_is_exact(classes):
    """The scale is unknown, which two classes settle for most rows, and the sign: to a regression,
    -v is as good as v. (So its maximum is asked for: the mean lies between the two.)"""
    rows, taking_part = example_rows(24)
    stream = torch.Generator().manual_seed(3)
    rows[:, -2] = torch.rand(len(rows), generator=stream, dtype=torch.float64) * 2 - 1
    if classes:
        rows[:, -1] = rows[:, -1].sign()
    case = make_release(rows, taking_part, **OLS, intercept=False, classes=classes)
    found = answer(RowReconstruction(samples=0), case)
    wanted = case[1].rows[case[1].members]
    cosine = torch.cosine_similarity(found.rows[:, :-1], wanted[:, :-1]).abs()
    assert bool((cosine > 0.999).all())
    if classes:
        sign = (found.rows * wanted).sum(1, keepdim=True).sign()
        exact = (sign * found.rows - wanted).abs().amax(1) < 1e-3
        assert float(exact.double().mean()) > 0.5


@pytest.mark.slow
def test_a_wide_sketch_of_few_rows_gives_them_away():
    """Fewer rows than columns: the release leaves the span of the others in one direction only."""
    case = released(6, columns=8, parameters={"columns": 4000})
    assert int(case[1].members.sum()) < 8
    assert score(answer(RowReconstruction(), case), case[1])["row_cosine"] > 0.99


def test_a_row_is_asked_for_by_itself():
    """What is handed over about one target: never itself, unless asked; never who took part."""
    _, truth = released()
    for target in (0, 1):
        known = hand_over_row(truth, target, OTHERS, False)
        assert known.candidate is None
        (others,) = known.other_rows
        assert len(others) == int(truth.members.sum()) - int(truth.members[target])
        assert not bool((others == truth.rows[target]).all(1).any())
    assert hand_over_row(truth, 1, Grant.least(), True).other_rows == ()
    assert not torch.equal(truth.members, torch.ones_like(truth.members))


def test_the_wrong_kind_is_refused():
    images = make_observation(torch.rand(1, 1, 16, 16), torch.tensor([1]))
    with pytest.raises(AttackFailed, match=r"reads sketch and .*clients send updates of a model"):
        ask(MembershipInference(), *images, Grant.least(), 0)
    with pytest.raises(AttackFailed, match=r"reads updates of a model.*releases of kind sketch"):
        ask(DeepLeakage(iterations=1), *released(), OTHERS, 0)
    observation, _ = released()
    with pytest.raises(AttackFailed, match="one at a time"):
        ask(RowReconstruction(), observation, None, OTHERS, 0)
    with pytest.raises(AttackFailed, match=r"knowledge\.rows: others"):
        solve(RowReconstruction(), observation, Knowledge(), 0)
    with pytest.raises(AttackFailed, match="no candidate"):
        solve(MembershipInference(), observation, Knowledge(), 0)


@dataclass(frozen=True)
class Normal:
    """A release that is one entry, behind normal noise."""

    seen: float
    std: float

    def log_likelihood(self, rows):
        return -((rows[:, 0] - self.seen) / self.std).square() / 2


def posterior(seen, std, targets, row_norm):
    """Of (value, constant 1, target) rows; value and target are correlated before any release."""
    covariance = torch.tensor([[0.4, 0.0, 0.3], [0.0, 1.0, 0.0], [0.3, 0.0, 0.5]]).double()
    prior = Prior(
        mean=torch.tensor([0.2, 1.0, -0.1], dtype=torch.float64),
        precision=torch.linalg.inv(covariance),
        low=torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64),
        high=torch.ones(3, dtype=torch.float64),
        row_norm=row_norm,
        targets=targets,
    )
    return _RowPosterior(likelihood=Normal(seen, std), prior=prior)


@pytest.mark.parametrize("row_norm", [2.0, 1.1])
@pytest.mark.parametrize("targets", [(), (-1.0, 1.0)])
@pytest.mark.parametrize(("seen", "std"), [(0.9, 0.5), (-0.3, 0.2), (0.5, 50.0)])
def test_it_is_the_integral(seen, std, targets, row_norm):
    """Also where it is cut off at a range, and where a longer row is scaled to the bound."""
    case = posterior(seen, std, targets, row_norm)
    axis = torch.linspace(-1, 1, 201, dtype=torch.float64)
    last = torch.tensor(targets, dtype=torch.float64) if targets else axis
    value, target = torch.meshgrid(axis, last, indexing="ij")
    rows = torch.stack([value.flatten(), torch.ones(value.numel()), target.flatten()], 1)
    ends = torch.where(axis.abs() == 1, 0.5, 1.0).double()  # the trapezoidal rule
    area = (ends[:, None] * (1.0 if targets else ends[None])).expand_as(value).flatten()
    losses = case.loss(rows)
    weights = area * (losses.min() - losses).exp()
    expected = weights @ case.prior.scale_rows(rows) / weights.sum()
    best = rows[losses.argsort()[:1]]
    found = case.mean(list(best), 20_000, rng.generator(0, "posterior"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)


def test_other_rows_are_taken_as_they_were_before_they_were_scaled():
    """A row longer than the bound is scaled to it, and its constant feature tells by how much."""
    rows, members = example_rows(24)
    observation, _ = make_release(rows, members, learner="sketch", parameters={"columns": 9})
    scaled = rows * torch.linspace(0.5, 1.0, len(rows), dtype=torch.float64)[:, None]
    known, found = (
        prior(observation.release, Knowledge(grant=OTHERS, other_rows=(each,)), True)
        for each in (rows, scaled)
    )
    torch.testing.assert_close(found.mean, known.mean)
    torch.testing.assert_close(found.precision, known.precision)
