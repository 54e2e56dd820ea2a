"""Which client holds a record: exact evidence, single updates, sums, and what cannot be told."""

from dataclasses import replace

import pytest
import torch

from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge, SourceRecords
from fedsim.testing import make_observation
from fedsim.types import LocalTraining
from fedsim_attacks.membership._presence_fit import (
    _compute_evidence,
    _estimate_excess,
    _InnerProducts,
    _Weights,
)
from fedsim_attacks.membership.source_inference import SourceInference

HELD = 12
"""Number of records of each client."""


def federation(*rounds, clients=4):
    """Returns records with the mean update of each of `rounds`' clients, and who holds each."""
    stream = torch.Generator().manual_seed(3)
    images = torch.rand(clients * HELD, 1, 8, 8, generator=stream)
    labels = torch.randint(4, (len(images),), generator=stream)
    source = torch.arange(clients).repeat_interleave(HELD)
    seen = tuple(
        mean_of(images, labels, source, own, number) for number, own in enumerate(rounds, 1)
    )
    shuffled = torch.randperm(len(images), generator=stream)
    records = SourceRecords(
        inputs=images[shuffled], labels=labels[shuffled], seen=seen, participants=rounds
    )
    return records, source[shuffled]


def mean_of(images, labels, source, own, number):
    """Returns the mean update of the clients `own`, of 3 steps over all that they hold."""
    held = torch.isin(source, torch.tensor(own))
    model = {"model": "mlp", "model_parameters": {"hidden": [16]}, "num_classes": 4}
    summed = {"num_clients": len(own), "defense": [{"name": "aggregate"}] if len(own) > 1 else []}
    training = LocalTraining(algorithm="fedavg", steps=3, batch_size=HELD // 3, lr=0.1)
    observation, _ = make_observation(
        images[held], labels[held], **model, **summed, training=training
    )
    return replace(observation, round=number)


def accuracy(records, source, **parameters):
    attack = SourceInference.model_validate(parameters)
    found = solve(attack, records.seen[-1], Knowledge(records=records), 0).reconstruction
    return float((found.more["source"].argmax(1) == source).double().mean())


@pytest.mark.parametrize("excess", [1.0, 3.0])
def test_evidence_is_the_likelihood_ratio_of_the_linear_model(excess):
    """Compared with normal densities whose covariances are written out."""
    stream = torch.Generator().manual_seed(1)
    rows = torch.randn(5, 15, generator=stream, dtype=torch.float64)
    vector = torch.randn(15, generator=stream, dtype=torch.float64)
    mean, spread = torch.rand(2, 5, generator=stream, dtype=torch.float64)
    products = _InnerProducts(
        gram=rows @ rows.T, inner=rows @ vector, energy=float(vector @ vector), entries=15
    )
    weights = _Weights(mean=mean, spread=spread, member=0.7, member_spread=0.2)
    found = _compute_evidence(products.fit(mean, spread, 0.3, scored=True), weights, excess)
    for i, row in enumerate(rows):
        rest = spread.clone()
        rest[i] = 0
        cov = rows.T @ torch.diag(rest) @ rows + 0.3 * torch.eye(15, dtype=torch.float64)
        cov *= excess
        center = mean @ rows - mean[i] * row
        absent = torch.distributions.MultivariateNormal(center, cov)
        present = torch.distributions.MultivariateNormal(
            center + 0.7 * row, cov + 0.2 * torch.outer(row, row)
        )
        expected = present.log_prob(vector) - absent.log_prob(vector)
        torch.testing.assert_close(found[i], expected)


def test_excess_is_the_variance_of_most_scores_whatever_members_score():
    scores = 3 * torch.randn(4000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scores[:100] += 50
    assert _estimate_excess(scores) == pytest.approx(9, rel=0.1)
    assert _estimate_excess(scores / 30) == 1


def test_each_clients_own_update_names_it():
    records, source = federation((0,), (1,), (2,), (3,))
    assert accuracy(records, source) == 1.0


def test_losses_name_clients_better_than_chance_and_worse_than_gradients():
    records, source = federation((0,), (1,), (2,), (3,))
    # All four are of one round, so that losses compare.
    together = replace(records, seen=tuple(replace(each, round=1) for each in records.seen))
    assert 0.3 < accuracy(together, source, evidence="losses") < 1.0


def test_losses_name_no_client_for_how_often_it_took_part():
    """A client seen in each round three times over has the scores that it has seen once."""
    records, _ = federation((0,), (1,), (2,), (3,))
    once = replace(records, seen=tuple(replace(each, round=1) for each in records.seen))
    # In two more rounds, client 0 is there with client 1 alone, at their first updates.
    again = [replace(each, round=n) for n in (2, 3) for each in once.seen[:2]]
    often = replace(
        records, seen=(*once.seen, *again), participants=(*once.participants, *[(0,), (1,)] * 2)
    )
    scores = [
        solve(SourceInference(evidence="losses"), each.seen[-1], Knowledge(records=each), 0)
        .reconstruction.more["source"]
        .abs()
        .mean(0)
        for each in (once, often)
    ]
    # Sums over rounds would be about three times as large for those that took part three times.
    assert bool((scores[1][:2] < 1.5 * scores[0][:2]).all())


def test_sums_of_different_clients_name_single_ones():
    """Every client has a set of rounds of its own: presence and absence name it."""
    records, source = federation((0, 1), (0, 2), (1, 2), (2, 3))
    assert accuracy(records, source) > 0.9


def test_clients_that_always_take_part_together_are_a_tie():
    records, source = federation((0, 1), (2, 3))
    found = solve(SourceInference(), records.seen[-1], Knowledge(records=records), 0)
    scores = found.reconstruction.more["source"]
    assert torch.equal(scores[:, 0], scores[:, 1]) and torch.equal(scores[:, 2], scores[:, 3])
    named = scores.argmax(1) // 2
    assert float((named == source // 2).double().mean()) > 0.9


@pytest.mark.parametrize("rounds", [((0, 1),), ((0, 1), (0, 1)), ((0,),)])
def test_the_same_clients_in_each_round_cannot_be_told_apart(rounds):
    records, _ = federation(*rounds)
    with pytest.raises(AttackFailed, match="same clients took part"):
        solve(SourceInference(), records.seen[-1], Knowledge(records=records), 0)


def test_losses_of_sums_and_missing_records_are_refused():
    records, _ = federation((0, 1), (2,))
    with pytest.raises(AttackFailed, match="no model of a single client"):
        solve(SourceInference(evidence="losses"), records.seen[-1], Knowledge(records=records), 0)
    with pytest.raises(AttackFailed, match=r"observe\.candidates"):
        solve(SourceInference(), records.seen[-1], Knowledge(), 0)
