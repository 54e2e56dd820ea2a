"""The score test on known answers, a control without members, and what it reads of a defense."""

from dataclasses import replace

import pytest
import torch

from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge, MembershipCandidates
from fedsim.targets.membership import membership_auc
from fedsim.testing import make_observation
from fedsim.types import LocalTraining
from fedsim_attacks.membership._presence_fit import (
    _MOVES,
    _expect_weights,
    _InnerProducts,
    _Scaled,
)
from fedsim_attacks.membership.update_membership import UpdateMembership


def scores(observation, knowledge):
    return solve(UpdateMembership(), observation, knowledge, 0).reconstruction.membership


def test_scores_are_the_exact_score_test_of_the_linear_model():
    stream = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 15, generator=stream, dtype=torch.float64)
    vector = torch.randn(15, generator=stream, dtype=torch.float64)
    mean, variance = torch.rand(2, 6, generator=stream, dtype=torch.float64)
    variance += 0.1
    products = _InnerProducts(
        gram=rows @ rows.T, inner=rows @ vector, energy=float(vector @ vector), entries=15
    )
    fit = products.fit(mean, variance, 0.3, scored=True)
    left = vector - mean @ rows
    eye = torch.eye(15, dtype=torch.float64)
    whole = rows.T @ torch.diag(variance) @ rows + 0.3 * eye
    for i, row in enumerate(rows):
        without = torch.linalg.inv(whole - variance[i] * torch.outer(row, row))
        expected = row @ without @ left / (row @ without @ row).sqrt()
        torch.testing.assert_close(fit.scores[i], expected)
    law = torch.distributions.MultivariateNormal(mean @ rows, whole)
    other = products.fit(mean, variance, 0.5, scored=False)
    changed = torch.distributions.MultivariateNormal(mean @ rows, whole + 0.2 * eye)
    difference = law.log_prob(vector) - changed.log_prob(vector)
    assert fit.log_likelihood - other.log_likelihood == pytest.approx(float(difference))


def asked(members, others, **changes):
    """Returns an update of random images, candidates, and which of these are members.

    With `members` 0 no candidate took part in the update.
    """
    stream = torch.Generator().manual_seed(3)
    images = torch.rand(members + others + 20, 1, 8, 8, generator=stream)
    labels = torch.randint(4, (len(images),), generator=stream)
    used = slice(0, members) if members else slice(others, others + 20)
    model = {"model": "mlp", "model_parameters": {"hidden": [16]}, "num_classes": 4}
    observation, _ = make_observation(images[used], labels[used], **model, **changes)
    known = MembershipCandidates(
        inputs=images[: members + others], labels=labels[: members + others], seen=(observation,)
    )
    return observation, Knowledge(candidates=known), torch.arange(members + others) < members


@pytest.mark.parametrize(("algorithm", "steps"), [("fedsgd", 1), ("fedavg", 1), ("fedavg", 3)])
def test_members_without_a_defense_are_told_exactly(algorithm, steps):
    """A gradient points along those of members, a change of weights against them."""
    training = LocalTraining(algorithm=algorithm, steps=steps, batch_size=30 // steps, lr=0.1)
    observation, knowledge, members = asked(30, 30, training=training)
    assert membership_auc(scores(observation, knowledge), members) == 1.0


@pytest.mark.parametrize("move", _MOVES)
def test_the_likeliest_moves_are_those_that_were_drawn(move):
    """And members are told better by them than by a drift that lies across gradients."""
    observation, *_ = asked(10, 10)
    # Each member takes part once, so that weights vary by what moved alone.
    dealt = replace(observation.training, sampling="balls_in_bins")
    observation = replace(observation, training=dealt)
    stream = torch.Generator().manual_seed(5)
    # Gradients have a few long directions in common, as those of networks have.
    lengths = torch.arange(1, 601, dtype=torch.float64) ** -0.7
    rows = torch.randn(400, 600, generator=stream, dtype=torch.float64) * lengths
    members = torch.arange(400) < 100
    drawn = torch.randn(400, generator=stream, dtype=torch.float64) * move**0.5
    vector = (members + drawn) @ rows / 100
    vector += (
        0.1 * vector.norm() * torch.randn(600, generator=stream, dtype=torch.float64) / 600**0.5
    )
    products = _InnerProducts(
        gram=rows @ rows.T, inner=rows @ vector, energy=float(vector @ vector), entries=600
    )
    chances = torch.full((200,), 0.5, dtype=torch.float64)
    tried = {
        each: _Scaled.of(products, _expect_weights(observation, 400, 0.0, chances, each), 0.01, 0.0)
        for each in (0.0, *_MOVES)
    }
    assert max(tried, key=lambda each: tried[each].log_likelihood) == move
    told, across = (
        float(membership_auc(tried[each].fit().scores[:200], members[:200])) for each in (move, 0.0)
    )
    assert told > across


def test_sums_count_by_the_share_of_the_clients_asked_about_in_them():
    """A round without any of them says nothing of them, and one of half of them half as much."""
    own, knowledge, _ = asked(30, 30)
    other, *_ = asked(0, 60)
    whole = replace(own, client=-1, participants=(0, 1))

    def behind(*seen):
        return scores(whole, Knowledge(candidates=replace(knowledge.candidates, seen=seen)))

    alone, half = behind(whole), replace(other, client=-1, participants=(1, 2))
    absent = replace(half, participants=(2, 3))
    torch.testing.assert_close(behind(absent, whole), alone)
    torch.testing.assert_close(behind(half, whole), (2 * alone + behind(half)) / 5**0.5)


def test_without_members_the_scores_know_nothing():
    observation, knowledge, _ = asked(0, 400)
    coins = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.5
    # Four standard deviations of the AUC of 200 against 200 exchangeable scores.
    assert abs(membership_auc(scores(observation, knowledge), coins) - 0.5) < 4 * 0.029


@pytest.mark.parametrize(
    ("defense", "least"),
    [
        ([{"name": "clip", "norm": 0.01}], 1.0),
        ([{"name": "gradient_pruning", "ratio": 0.5}], 0.9),
        ([{"name": "gaussian_noise", "std": 0.01}], 0.7),
    ],
)
def test_members_are_told_behind_weak_defenses(defense, least):
    observation, knowledge, members = asked(30, 30, defense=defense)
    assert membership_auc(scores(observation, knowledge), members) >= least


@pytest.mark.parametrize("std", [0.02, 0.2])
def test_scores_of_others_have_unit_spread_behind_declared_noise(std):
    defense = [{"name": "gaussian_noise", "std": std}]
    observation, knowledge, members = asked(60, 200, defense=defense)
    found = scores(observation, knowledge)
    # Their mean lies below 0: the model expects half of every candidate. Three standard deviations
    # of the spread of 200 scores.
    assert float(found[~members].std()) == pytest.approx(1.0, abs=3 / 400**0.5)


def test_rounds_add_up_and_no_candidates_are_a_stated_failure():
    observation, knowledge, _ = asked(10, 10)
    twice = replace(knowledge.candidates, seen=(observation, observation))
    one, two = scores(observation, knowledge), scores(observation, Knowledge(candidates=twice))
    torch.testing.assert_close(two, one * 2**0.5)
    with pytest.raises(AttackFailed, match="no candidates"):
        scores(observation, Knowledge())
