"""Two-layer heads of small multi-layer perceptrons, and what attacks on them find."""

import torch

from fedsim import rng
from fedsim.contracts.attack import create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.scoring import score
from fedsim.testing import make_observation
from fedsim_attacks.head_features._head_gradient import HeadGradient

HEAD = {"width": 4160, "planted": 4096, "planted_std": 0.1}


def draw(count, name="feature example", side=6, seed=0):
    return torch.rand(count, 1, side, side, generator=rng.generator(seed, name))


def observe(images, head=None, *, labels=None, hidden=None, **case):
    """Without `hidden` layers features are the normalized images: d = 36, their norm is about 7."""
    images = draw(images) if isinstance(images, int) else images
    truth = (3 * torch.arange(len(images))) % 10 if labels is None else torch.tensor(labels)
    parameters = {"hidden": hidden or [], "head": {**HEAD, **(head or {})}}
    return make_observation(images, truth, model="mlp", model_parameters=parameters, **case)


def read(case):
    """The head's gradient and the true features."""
    return HeadGradient.read(case[0]), case[1].features


def attack(name, observation, truth, **parameters):
    found = solve(create(name, parameters), observation, Knowledge(), seed=1).reconstruction
    return score(found, truth)


def span_error(name, case, **parameters):
    return attack(name, *case, **parameters)["subspace_error"]
