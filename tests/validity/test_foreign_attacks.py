"""Careless attacks of third parties: what they write into, and what they draw from."""

from __future__ import annotations

import torch
from one_process import ask
from plugins_here import Idle

from fedsim.contracts.attack import AttackState
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.testing import make_observation
from fedsim.types import Observation, Reconstruction


class Careless(Idle):
    """Writes into what it is handed, and draws from torch's global stream."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> AttackState:
        if knowledge.true_labels is not None:
            knowledge.true_labels.fill_(0)
        if knowledge.true_features is not None:
            knowledge.true_features.fill_(1.0)
        return super().init(observation, knowledge, rng)

    def postprocess(self, state: AttackState) -> Reconstruction:
        return Reconstruction(images=torch.rand(2, 3, 8, 8), loss=0.0, iterations=0)


def test_what_an_attack_writes_into_its_knowledge_changes_no_truth() -> None:
    """Rule 5: the truth that an answer is scored against is out of an attack's reach."""
    observation, truth = make_observation(torch.rand(2, 3, 8, 8), torch.tensor([4, 7]), model="mlp")
    assert truth.features is not None
    features = truth.features.clone()
    ask(Careless(), observation, truth, Grant(labels="known", features="known"), 1)
    assert truth.labels.tolist() == [4, 7]
    assert torch.equal(truth.features, features)


def test_draws_from_the_global_stream_follow_from_the_seed() -> None:
    """Rule 27: a row does not depend on which jobs its process has done before."""
    observation, truth = make_observation(torch.rand(2, 3, 8, 8), torch.tensor([4, 7]), model="mlp")
    before = torch.get_rng_state()

    def drawn(seed: int) -> torch.Tensor:
        images = ask(Careless(), observation, truth, Grant.least(), seed).reconstruction.images
        assert images is not None
        return images

    first = drawn(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(drawn(1), first)
    assert not torch.equal(drawn(2), first)
