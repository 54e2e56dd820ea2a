"""Naming clients of records: ties, classes that give clients away, and copies at two clients."""

import itertools

import pytest
import torch

from fedsim.contracts.metric import ScoringError
from fedsim.recording.truth import add_sources, load_truth, save_truth
from fedsim.targets.source import (
    Source,
    _class_rule_accuracy,
    _measure_source,
    _name_clients,
    _shuffle_accuracies,
)
from fedsim.types import (
    CANDIDATE_INPUTS,
    CANDIDATE_LABELS,
    CANDIDATE_MEMBERS,
    SOURCE_INPUTS,
    SOURCE_PARTICIPANTS,
    GroundTruth,
)


def values(scores, source, labels, held=None):
    """Returns the metrics that have a value; without `held`, clients hold classes alike."""
    if held is None:
        held = torch.ones(scores.shape[1], int(labels.max()) + 1)
    found = _measure_source(scores.double(), source, labels, held)
    return {name: value for name, value in found.items() if isinstance(value, float)}


def test_ties_share_a_record():
    found = values(torch.zeros(8, 4), torch.arange(8) % 4, torch.zeros(8, dtype=torch.int64))
    assert found["source_accuracy"] == 0.25 and found["source_rank"] == 2.5
    assert found["source_p_value"] == 1.0 and found["source_advantage"] == pytest.approx(0)


def test_shuffles_have_the_law_of_all_permutations_within_classes():
    labels, source = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 0, 0, 1])
    named = _name_clients(torch.eye(2)[torch.tensor([0, 1, 0, 1, 1, 0])])
    exact = [
        float(named[[*first, *second], source].mean())
        for first in itertools.permutations([0, 1, 2])
        for second in itertools.permutations([3, 4, 5])
    ]
    drawn = _shuffle_accuracies(named, labels, source)
    law, found = torch.tensor(exact).double(), drawn
    # Four standard deviations of a mean of 999.
    assert abs(float(found.mean() - law.mean())) < 4 * float(law.std()) / 999**0.5
    assert found.unique().tolist() == pytest.approx(law.unique().tolist())
    # Records in another order have the same law.
    order = torch.tensor([5, 0, 3, 2, 4, 1])
    again = _shuffle_accuracies(named[order], labels[order], source[order])
    assert abs(float(again.mean() - law.mean())) < 4 * float(law.std()) / 999**0.5


def dealt(count, stream):
    """Returns classes and clients of examples: each class has a client that holds most of it."""
    labels = torch.randint(10, (count,), generator=stream)
    others = torch.randint(4, (count,), generator=stream)
    return labels, torch.where(torch.rand(count, generator=stream) < 0.6, labels % 4, others)


@pytest.mark.parametrize("seed", range(3))
def test_an_attack_that_knows_only_classes_tells_no_source(seed):
    """Classes are dealt unevenly: naming the class's main client is right far above chance."""
    stream = torch.Generator().manual_seed(seed)
    labels, source = dealt(600, stream)
    held = torch.zeros(4, 10)
    kinds, clients = dealt(600, stream)
    held.index_put_((clients, kinds), torch.ones(600), accumulate=True)
    main = labels % 4
    found = values(torch.eye(4)[main], source, labels, held)
    assert found["source_accuracy"] > 0.6
    assert found["source_advantage"] < 0.02 and found["source_advantage_beyond_chance"] == 0
    assert _class_rule_accuracy(labels, source, held) == pytest.approx(found["source_accuracy"])
    # An answer that says less than classes do gains nothing over them.
    assert (
        values(torch.rand(600, 4, generator=stream), source, labels, held)[
            "source_advantage_beyond_chance"
        ]
        == 0
    )
    # One that reads records beside their class is told apart from it.
    right = torch.rand(600, generator=stream) < 0.5
    read = torch.where(right, source, main)
    assert values(torch.eye(4)[read], source, labels, held)["source_advantage_beyond_chance"] > 0.3


def test_a_class_at_one_client_only_leaves_nothing_to_tell():
    labels = torch.arange(40) % 4
    found = _measure_source(torch.eye(4)[labels].double(), labels, labels, torch.eye(4))
    assert found["source_accuracy"] == 1.0 and not isinstance(found["source_advantage"], float)


def test_answers_of_chance_have_uniform_p_values():
    """Whole clients are named wrongly together, which no test of single records allows for."""
    stream = torch.Generator().manual_seed(5)
    found = []
    for _ in range(60):
        labels = torch.randint(3, (60,), generator=stream)
        source = torch.randint(3, (60,), generator=stream)
        blocks = torch.randint(3, (3,), generator=stream)[labels]
        found.append(values(torch.eye(3)[blocks], source, labels)["source_p_value"])
    # Binomial with 60 trials: fewer than 9 at 5% with probability 0.998.
    assert sum(p <= 0.05 for p in found) < 9


def truth_of(inputs):
    return GroundTruth(
        images=torch.zeros(1, 1, 2, 2),
        labels=torch.zeros(1, dtype=torch.int64),
        more={
            CANDIDATE_INPUTS: inputs,
            CANDIDATE_LABELS: torch.zeros(len(inputs), dtype=torch.int64),
            CANDIDATE_MEMBERS: torch.arange(len(inputs)) < len(inputs) - 1,
        },
    )


def test_records_of_all_clients_join_without_copies_and_without_an_order(tmp_path):
    images = torch.rand(3, 5, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    images[2, 0] = images[0, 0]  # held by two clients: no single one is its source
    ids = ["s/round-0001/aggregate-training", "s/round-0002/aggregate-training"]
    for id, clients in zip(ids, [(0, 4), (4, 7)], strict=True):
        for client in clients:
            save_truth(truth_of(images[(0, 4, 7).index(client)]), tmp_path, id, client)
    truth = add_sources(load_truth(tmp_path, ids[1]), tmp_path, ids)
    records, source = truth.more[SOURCE_INPUTS], truth.more["source"]
    assert len(records) == 3 * 4 - 2 and source.bincount().tolist() == [3, 4, 3]
    for record, owner in zip(records, source.tolist(), strict=True):
        assert any(torch.equal(record, each) for each in images[owner][:4])
    assert source.tolist() != sorted(source.tolist())
    assert truth.more[SOURCE_PARTICIPANTS].tolist() == [[True, True, False], [False, True, True]]
    with pytest.raises(ScoringError, match="10 records and 3 clients"):
        Source().check(torch.zeros(10, 2), truth)
    with pytest.raises(ScoringError, match="finite"):
        Source().check(torch.full((10, 3), float("nan")), truth)
