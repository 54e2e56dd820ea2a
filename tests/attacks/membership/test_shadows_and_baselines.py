"""Known answers of attacks that ask whether a client's model or update goes with a candidate."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge, MembershipCandidates
from fedsim.targets.membership import membership_auc
from fedsim.testing.cases import make_observation
from fedsim.types import LocalTraining
from fedsim_attacks.membership._measures import odds_of_logits, weights_after
from fedsim_attacks.membership.baselines import FedMIA, GradientSimilarity, LossTrajectory
from fedsim_attacks.membership.shadow_likelihood import ShadowLikelihood

MEMBERS, CLIENTS = 12, 4
SGD = LocalTraining(algorithm="fedavg", steps=3, batch_size=MEMBERS, lr=0.2, batches="same")


@pytest.fixture(scope="module")
def seen():
    """Updates of clients that hold different images of noise, and all their images."""
    stream = torch.Generator().manual_seed(3)
    images = torch.rand(CLIENTS, MEMBERS, 1, 5, 5, generator=stream)
    labels = torch.randint(10, (CLIENTS, MEMBERS), generator=stream)
    updates = []
    for client in range(CLIENTS):
        model = {"model": "mlp", "model_parameters": {"hidden": []}, "training": SGD}
        observation, _ = make_observation(images[client], labels[client], **model)
        updates.append(replace(observation, client=client))
    return tuple(updates), images, labels


@pytest.fixture
def asked(seen):
    """The first client's update; candidates are its images, and as many that no client has."""
    updates, images, labels = seen
    stream = torch.Generator().manual_seed(4)
    others = torch.rand(images[0].shape, generator=stream)
    candidates = MembershipCandidates(
        inputs=torch.cat([images[0], others]),
        labels=torch.cat([labels[0], labels[0]]),
        seen=updates,
    )
    return updates[0], Knowledge(candidates=candidates)


def scores(attack, asked):
    return solve(attack, *asked, seed=0).reconstruction.membership


@pytest.mark.parametrize(
    "attack",
    [
        FedMIA(),
        FedMIA(measure="loss"),
        FedMIA(statistic="z"),
        GradientSimilarity(),
        LossTrajectory(),
        LossTrajectory(summary="fall"),
        ShadowLikelihood(shadows=32),
        ShadowLikelihood(shadows=32, measure="log_odds"),
    ],
    ids=repr,
)
def test_members_of_a_small_client_stand_out(attack, asked):
    members = torch.arange(2 * MEMBERS) < MEMBERS
    assert membership_auc(scores(attack, asked), members) > 0.8


def test_trajectory_is_the_mean_loss_under_the_clients_models(asked):
    observation, known = asked
    weights = weights_after(observation, observation.update)
    spec = observation.model
    mean, std = torch.tensor(spec.mean), torch.tensor(spec.std)
    images = (known.candidates.inputs - mean[0]) / std[0]
    matrix, bias = (weights[name] for name in weights)
    logits = images.flatten(1) @ matrix.T + bias
    expected = -F.cross_entropy(logits, known.candidates.labels, reduction="none")
    found = scores(LossTrajectory(), asked)
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-5)


def test_weights_that_an_update_lacks_stay_and_gradients_are_descended(asked):
    observation, _ = asked
    sent, (name, *left) = observation.parameters, observation.update
    for algorithm, factor in (("fedavg", 1.0), ("fedsgd", -SGD.lr)):
        seen = replace(observation, training=replace(SGD, algorithm=algorithm, steps=1))
        moved = weights_after(seen, {name: observation.update[name]})
        torch.testing.assert_close(moved[name], sent[name] + factor * observation.update[name])
        assert all(moved[each] is sent[each] for each in left) and left


def test_odds_hold_where_probabilities_are_rounded_to_one():
    logits = torch.tensor([[1.0, 0.0], [60.0, 0.0], [0.0, 800.0]], dtype=torch.float64)
    found = odds_of_logits(logits, torch.tensor([0, 0, 0]))
    assert found.tolist() == pytest.approx([1.0, 60.0, -800.0])


def test_fedmia_counts_deviations_of_the_other_clients():
    measured = torch.tensor([[3.0, 1.0], [0.0, 1.0], [2.0, -1.0]], dtype=torch.float64)
    found = FedMIA()._compare(measured, 0)
    # Others have means 1, 0 and deviations 1, 1: two above, and one above.
    assert found.tolist() == pytest.approx([0.97725, 0.84134], abs=1e-4)


def test_fedmia_is_refused_where_no_other_update_is_seen(asked):
    observation, known = asked
    behind_a_sum = replace(observation, vantage="aggregate")
    with pytest.raises(AttackFailed, match="behind a sum"):
        scores(FedMIA(), (behind_a_sum, known))
    alone = replace(known, candidates=replace(known.candidates, seen=(observation,)))
    with pytest.raises(AttackFailed, match=r"observe\.clients: all"):
        scores(FedMIA(), (observation, alone))


def test_shadows_without_enough_examples_are_refused(asked):
    observation, known = asked
    few = replace(
        known.candidates, inputs=known.candidates.inputs[:4], labels=known.candidates.labels[:4]
    )
    with pytest.raises(AttackFailed, match="public: test"):
        scores(ShadowLikelihood(shadows=4), (observation, replace(known, candidates=few)))
