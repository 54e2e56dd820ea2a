"""Candidates of membership attacks: coins decide, copies and shifts are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny_scenario
from torch import Tensor

from fedsim.contracts.metric import ScoringError
from fedsim.scenario import cautions, resolve
from fedsim.targets.membership import _refuse_unlike
from fedsim.training.client import CandidateSplit, split_candidates
from fedsim.types import (
    CANDIDATE_INPUTS,
    CANDIDATE_LABELS,
    CANDIDATE_MEMBERS,
    FedsimError,
    GroundTruth,
)


def drawn(count: int = 400, seed: int = 0) -> GroundTruth:
    """Returns a truth of `count` random candidates with coins that know nothing of them."""
    stream = torch.Generator().manual_seed(seed)
    return GroundTruth(
        images=torch.zeros(1, 1, 2, 2),
        labels=torch.zeros(1, dtype=torch.int64),
        more={
            CANDIDATE_INPUTS: torch.rand(count, 1, 4, 4, generator=stream),
            CANDIDATE_LABELS: torch.randint(3, (count,), generator=stream),
            CANDIDATE_MEMBERS: torch.rand(count, generator=stream) < 0.5,
        },
    )


def test_candidates_are_the_clients_own_and_coins_are_fair() -> None:
    inputs = torch.rand(3000, 2)
    parts = [torch.arange(0, 1500), torch.arange(1500, 3000)]
    splits = split_candidates(parts, inputs, 1000, seed=1)
    for part, split in zip(parts, splits, strict=True):
        assert len(split.examples) == 1000 and bool(torch.isin(split.examples, part).all())
        # Six standard deviations of 1000 fair coins.
        assert abs(int(split.members.sum()) - 500) < 95
    assert not torch.equal(splits[0].members, splits[1].members)
    assert torch.equal(splits[0].members, split_candidates(parts, inputs, 1000, seed=1)[0].members)


def test_an_example_with_a_copy_at_any_client_is_no_candidate() -> None:
    inputs = torch.rand(20, 2)
    inputs[15] = inputs[3]
    parts = [torch.arange(10), torch.arange(10, 20)]
    splits = split_candidates(parts, inputs, 9, seed=0)
    assert 3 not in splits[0].examples and 15 not in splits[1].examples
    with pytest.raises(FedsimError, match=r"observe\.candidates.*without a copy"):
        split_candidates(parts, inputs, 10, seed=0)


def test_a_client_that_would_keep_no_batch_is_refused() -> None:
    with pytest.raises(FedsimError, match="fewer than the 19 of a batch"):
        split_candidates([torch.arange(20)], torch.rand(20, 1), 20, seed=0, least=19)


def test_candidates_that_differ_by_coins_alone_pass() -> None:
    for seed in range(5):
        _refuse_unlike(drawn(seed=seed))


@pytest.mark.parametrize("kind", ["brighter", "noisier", "other classes"])
def test_a_shift_between_members_and_others_is_refused(kind: str) -> None:
    truth = drawn()
    more = dict(truth.more)
    inputs, members = more[CANDIDATE_INPUTS], more[CANDIDATE_MEMBERS]
    if kind == "brighter":
        more[CANDIDATE_INPUTS] = torch.where(members[:, None, None, None], inputs + 0.2, inputs)
    elif kind == "noisier":
        wide = 0.5 + 2 * (inputs - 0.5)
        more[CANDIDATE_INPUTS] = torch.where(members[:, None, None, None], wide, inputs)
    else:
        more[CANDIDATE_LABELS] = torch.where(members, 0, more[CANDIDATE_LABELS])
    with pytest.raises(ScoringError, match="told from others without any update"):
        _refuse_unlike(replace(truth, more=more))


def test_a_member_that_is_a_copy_of_another_candidate_is_refused() -> None:
    truth = drawn()
    members = truth.more[CANDIDATE_MEMBERS]
    inside, outside = int(members.nonzero()[0]), int((~members).nonzero()[0])
    truth.more[CANDIDATE_INPUTS][outside] = truth.more[CANDIDATE_INPUTS][inside]
    with pytest.raises(ScoringError, match=f"candidate {outside} took no part and is a copy"):
        _refuse_unlike(truth)


def test_clients_of_other_classes_are_no_shift_but_members_of_one_beside_others_of_one_are() -> (
    None
):
    """Each client's coins are fair, so that a sum of skewed clients has nothing to be told by."""
    stream = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat_interleave(200)
    inputs = 0.2 * labels[:, None] + torch.rand(800, 8, generator=stream)
    splits = split_candidates(list(torch.arange(800).chunk(4)), inputs, 150, seed=0)
    _refuse_unlike(_truth_of(splits, inputs, labels))
    # What an experiment does that takes its non-members from elsewhere.
    biased = [replace(s, members=torch.full_like(s.members, k < 2)) for k, s in enumerate(splits)]
    with pytest.raises(ScoringError, match="told from others without any update"):
        _refuse_unlike(_truth_of(biased, inputs, labels))


def _truth_of(splits: list[CandidateSplit], inputs: Tensor, labels: Tensor) -> GroundTruth:
    """Returns the truth of a sum of clients with these candidates."""
    examples = torch.cat([split.examples for split in splits])
    more = {
        CANDIDATE_INPUTS: inputs[examples],
        CANDIDATE_LABELS: labels[examples],
        CANDIDATE_MEMBERS: torch.cat([split.members for split in splits]),
    }
    return replace(drawn(), more=more)


@pytest.mark.parametrize(
    ("count", "attack", "lines"),
    [
        (197, "update_membership", 1),
        (198, "update_membership", 0),
        (20, "source_inference", 0),
        (None, "label_inference", 0),
    ],
)
def test_too_few_candidates_for_a_low_rate_are_warned_of(
    count: int | None, attack: str, lines: int
) -> None:
    scenario = resolve(tiny_scenario(attacks=[attack], observe={"candidates": count}))
    assert len(cautions(scenario)) == lines


@pytest.mark.parametrize(("name", "said"), [("AdaptiveClipping", True), ("", False)])
def test_clients_that_clip_for_the_strategy_are_told_to_be_defended(name: str, said: bool) -> None:
    strategy = f"DifferentialPrivacyClientSide{name}" if name else "FedAvg"
    parameters = {"strategy": "FedAvg", "noise_multiplier": 0.1, "num_sampled_clients": 4}
    told = {**parameters, "clipped_count_stddev": 2.0} if name else {}
    scenario = resolve(
        tiny_scenario(
            training={"algorithm": "fedavg"},
            federation={"strategy": strategy, "strategy_parameters": told},
            attacks=["label_inference"],
        )
    )
    assert any("clip what it sends" in line for line in cautions(scenario)) == said
