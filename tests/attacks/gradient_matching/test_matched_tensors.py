"""What `tensors: body` matches: all of the update but the classifier's head."""

from dataclasses import replace

import pytest
import torch

from fedsim.attacking.knowledge import hand_over
from fedsim.contracts import plugins
from fedsim.contracts.attack import AttackFailed, create, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch

PLANTED = {"hidden": [12], "head": {"width": 640, "planted": 512}}
SHORT = {
    "deep_leakage": {"iterations": 3},
    "idlg": {"iterations": 3},
    "inverting_gradients": {"iterations": 3},
    "grad_inversion": {"iterations": 2, "seeds": 2},
    "generative_prior": {"iterations": 2},
    "feature_inversion": {"iterations": 2, "prior": "pixel", "features_from": "none"},
}


def observed():
    batch = example_batch(2)
    return make_observation(*batch, model="mlp", model_parameters=PLANTED)


def with_other(observation, part, factor):
    """The observation, with the update of the parameters called `part.…` times `factor`."""
    update = {
        name: tensor * factor if name.startswith(f"{part}.") else tensor
        for name, tensor in observation.update.items()
    }
    return replace(observation, update=update)


def test_every_attack_that_matches_gradients_is_known_here():
    """So that a new one is held to the tests below."""
    having = {
        name
        for name in plugins.names("fedsim.attacks")
        if "tensors" in plugins.load("fedsim.attacks", name).model_fields
    }
    assert having == set(SHORT)


@pytest.mark.parametrize("name", SHORT)
def test_an_attack_on_the_body_does_not_read_the_update_of_the_head(name):
    observation, truth = observed()

    def images(seen, tensors):
        attack = create(name, {**SHORT[name], "tensors": tensors})
        knowledge = Knowledge(grant=Grant(labels="known"), true_labels=truth.labels)
        return solve(attack, seen, knowledge, seed=0).reconstruction.images

    other = with_other(observation, "head", -3.0)
    assert torch.equal(images(observation, "body"), images(other, "body"))
    assert not torch.equal(images(observation, "all"), images(other, "all"))


@pytest.mark.parametrize("name", SHORT)
def test_where_nothing_is_outside_of_the_head_the_body_is_refused(name):
    observation, truth = observed()
    seen, knowledge = hand_over(with_other(observation, "body", 0.0), truth, Grant(labels="known"))
    attack = create(name, {**SHORT[name], "tensors": "body"})
    with pytest.raises(AttackFailed, match="outside of the head: match tensors: all"):
        solve(attack, seen, knowledge, seed=0)
