"""Certificates on the road: the attacker's own, from what was observed alone, and judged apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedsim.attacking.replay import attack
from fedsim.contracts.grant import Grant
from fedsim.scoring import ScoringError, certificate
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import GroundTruth, Reconstruction


def answer(certified: list[bool]) -> Reconstruction:
    features = torch.eye(3, 6)
    return Reconstruction(
        features=features,
        labels=torch.tensor([0, 1, 2]),
        determined=torch.tensor([True, True, False]),
        certified=torch.tensor(certified),
        loss=0.0,
        iterations=1,
    )


def truth(order: list[int], labels: list[int]) -> GroundTruth:
    return GroundTruth(
        images=torch.zeros(3, 1, 2, 2), labels=torch.tensor(labels), features=torch.eye(3, 6)[order]
    )


def test_truth_counts_false_certificates_and_takes_none_back() -> None:
    found = answer([True, True, False])
    right = certificate(found, truth([2, 0, 1], [2, 0, 1]), {"features": [2, 0, 1]})
    wrong_label = certificate(found, truth([2, 0, 1], [2, 1, 1]), {"features": [2, 0, 1]})
    wrong_feature = certificate(found, truth([2, 2, 1], [2, 0, 1]), {"features": [2, 0, 1]})
    unknown = certificate(found, None)
    assert right and wrong_label and wrong_feature and unknown
    assert [c.certified for c in (right, wrong_label, wrong_feature, unknown)] == [2, 2, 2, 2]
    assert [c.determined for c in (right, wrong_label, wrong_feature, unknown)] == [2, 2, 2, 2]
    assert [c.false for c in (right, wrong_label, wrong_feature, unknown)] == [0, 1, 1, None]
    assert right.per_image["certified"] == [False, True, True]


def test_an_image_serves_one_certificate() -> None:
    found = replace(answer([True, True, False]), features=torch.eye(3, 6)[[0, 0, 2]])
    found = replace(found, labels=torch.tensor([0, 0, 2]))
    told = certificate(found, truth([0, 1, 2], [0, 1, 2]))
    assert told and told.false == 1


def test_features_at_another_length_are_not_right() -> None:
    found = answer([True, False, False])
    assert found.features is not None
    told = certificate(replace(found, features=1.2 * found.features), truth([0, 1, 2], [0, 1, 2]))
    assert told and told.false == 1


def test_who_says_nothing_has_no_certificate() -> None:
    silent = replace(answer([True, True, True]), determined=None, certified=None)
    assert certificate(silent, truth([0, 1, 2], [0, 1, 2])) is None
    with pytest.raises(ScoringError, match="certified: expected 3 truth values"):
        certificate(answer([True, True]), truth([0, 1, 2], [0, 1, 2]))


def test_what_the_attacker_knows_does_not_depend_on_the_truth() -> None:
    observation, known = make_observation(
        *example_batch(3), model="mlp", model_parameters={"hidden": [32]}
    )
    grant = Grant.least(labels="inferred")
    rows = [
        attack(observation, "classifier_fit", grant=grant, truth=given)[1]["certificate"]
        for given in (None, (known.images, known.labels), (known.images, (known.labels + 1) % 10))
    ]
    assert [row["certified"] for row in rows] == [3, 3, 3]
    # Away from a run the true features are not known, and nothing is called false.
    assert [row["false"] for row in rows] == [None, None, None]


def test_an_update_that_is_not_what_it_says_gets_no_certificate() -> None:
    observation, _ = make_observation(
        *example_batch(3), model="mlp", model_parameters={"hidden": [32]}
    )
    stream = torch.Generator().manual_seed(0)
    update = {
        name: part + 1e-3 * part.square().mean().sqrt() * torch.randn(part.shape, generator=stream)
        for name, part in observation.update.items()
    }
    grant = Grant.least(labels="inferred")
    changed = replace(observation, update=update)
    row = attack(changed, "classifier_fit", {"exchanges": 0}, grant=grant)[1]
    assert row["certificate"]["certified"] == 0
