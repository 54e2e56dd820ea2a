"""Auditing a defense stack inside its federation: a canary takes part, or it does not.

The claim of a stack holds of any data, so the auditor chooses the worst that it can make: an update
of twice the bound where a whole client is hidden, an example whose label is exchanged among copies
of it where one example is. Either goes through the code that clients run, noise included, in as
many rounds as the worst-off client takes part in; the score is what the server sees along the
canary's direction. The global model stays at its start, as of a server that sends it again: a claim
is one against any server.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim import rng
from fedsim.defense import global_norm
from fedsim.learners.sgd import as_pixels
from fedsim.models.base import normalize
from fedsim.models.local import gradient, loss_function, mean_gradient_factor
from fedsim.privacy import ledger
from fedsim.privacy.audit import gaussian_bound, threshold_bound
from fedsim.types import Dataset, FedsimError, PrivacyClaim, Relation, Tensors, Unit, Update
from fedsim.workload import Workload

AUDITED: tuple[tuple[Unit, Relation], ...] = (("client", "zero_out"), ("example", "replace_one"))
"""(unit, relation) of the claims that there is a canary for."""


def check(claims: Mapping[str, PrivacyClaim]) -> None:
    """Refuse an audit of stacks, by name, that nothing could come of.

    Raises:
        FedsimError: no stack claims anything, or one does that there is no canary for.
    """
    proven = {name: claim for name, claim in claims.items() if claim.unit is not None}
    if not proven:
        raise FedsimError(
            "audit: no stack of defenses has a privacy claim that an audit could refute; add one "
            "that has, or leave audit out"
        )
    for name, claim in proven.items():
        if (claim.unit, claim.relation) not in AUDITED:
            raise FedsimError(
                f"audit: there is no canary for the claim of {name}, per {claim.unit} under "
                f"{claim.relation}; leave audit out"
            )


def audited_epsilon(
    workload: Workload, claim: PrivacyClaim, *, rounds: int, canaries: int, confidence: float
) -> float | None:
    """A lower bound of the stack's ε at the claim's δ; None if it claims nothing.

    Where the claim is one of Gaussian noise without sampling, it is the ε of the strongest Gaussian
    claim (μ-GDP) that is not refuted; else that of any (ε, δ) claim. Above the claim's ε it refutes
    the claim with `confidence`; below, it proves nothing.

    Args:
        workload: of the stack.
        claim: what the ledger says of it.
        rounds: that the worst-off client takes part in.
        canaries: how often the canary takes part in all of them, and how often it does not.
        confidence: in (0, 1), that a true claim is not refuted.

    Raises:
        FedsimError: too few draws, or training is impossible.
    """
    if claim.unit is None or claim.delta is None:
        return None
    draw = _update_scores if claim.unit == "client" else _example_scores
    absent, present = (draw(workload, world, rounds, canaries) for world in (False, True))
    gaussian = claim.accountant == ledger.EXACT
    each = 1 - (1 - confidence) / (2 if gaussian else 1)
    found = threshold_bound(absent, present, delta=claim.delta, confidence=each).epsilon
    if gaussian:
        fitted = gaussian_bound(absent, present, delta=claim.delta, confidence=each).epsilon
        found = max(found, fitted)
    return found


def _update_scores(
    workload: Workload, present: bool, rounds: int, canaries: int
) -> NDArray[np.float64]:
    """(canaries,) of a client that sends the same update in every round, or noise alone."""
    stack, declared = workload.stack, workload.declared
    seed = workload.scenario.seed
    parameters, _ = workload.initial()
    bounds = [held.sensitivity for held in stack.guarantees(declared) if held.mechanism is None]
    stream = rng.generator(seed, "canary")
    toward = {
        name: torch.randn(value.shape, generator=stream) for name, value in parameters.items()
    }
    length = float(torch.sqrt(sum((t.square().sum() for t in toward.values()), torch.zeros(()))))
    size = 2 * bounds[-1] / length if present else 0.0
    update = {name: size * value for name, value in toward.items()}
    scores = np.zeros(canaries)
    canary = copy(workload)
    for trial in range(canaries):
        server = rng.derive(seed, "canary", int(present), trial)
        canary.scenario = workload.scenario.model_copy(update={"seed": server})
        state = stack.init(update, declared)
        for round in range(1, rounds + 1):
            noise = rng.generator(seed, "canary", int(present), trial, round)
            released, state = stack.apply(update, state, noise)
            scores[trial] += _along(_seen(canary, released, round), toward)
    return scores


def _example_scores(
    workload: Workload, present: bool, rounds: int, canaries: int
) -> NDArray[np.float64]:
    """(canaries,) of a client all of whose examples are alike, but for one label or not even that.

    The client is the one with the least data: sampling hides its examples least.
    """
    data = workload.dataset
    assert isinstance(data, Dataset), "closed-form learners make no such claim"
    part = min(workload.parts, key=len)
    image, label = part[:1], data.train_labels[part[0]]
    other = (label + 1) % len(data.classes)
    labels = label.repeat(len(part))
    if present:
        labels[0] = other
    canary = copy(workload)
    canary.parts = [torch.arange(len(part))]
    canary.dataset = replace(
        data,
        train_images=data.train_images[image].expand(len(part), *data.input_shape),
        train_labels=labels,
    )
    parameters, buffers = workload.initial()
    pixels = as_pixels(data.train_images[image])
    toward = _difference(workload, parameters, buffers, pixels, other, label)
    sign = mean_gradient_factor(workload.training)
    scores = np.zeros(canaries)
    for trial in range(canaries):
        seed = rng.derive(workload.scenario.seed, "canary", int(present), trial)
        canary.scenario = workload.scenario.model_copy(update={"seed": seed})
        state: Tensors = {}
        for round in range(1, rounds + 1):
            result = canary.client_update(0, round, parameters, buffers, state)
            state = result.state
            scores[trial] += sign * _along(_seen(canary, result.update.tensors, round), toward)
    return scores


def _difference(
    workload: Workload,
    parameters: Tensors,
    buffers: Tensors,
    pixels: Tensor,
    label: Tensor,
    other: Tensor,
) -> Tensors:
    """Between the directions of the gradients of one image under two labels."""
    assert workload.model is not None and workload.spec is not None
    loss = loss_function(
        workload.model,
        {name: value.to(workload.device) for name, value in buffers.items()},
        workload.training,
    )
    at = {name: value.to(workload.device) for name, value in parameters.items()}
    inputs = normalize(pixels.to(workload.device), workload.spec)
    units = []
    for answer in (label, other):
        found = gradient(loss, at, inputs, answer.reshape(1).to(workload.device))
        norm = float(global_norm(found))
        units.append({name: (value / norm).cpu() for name, value in found.items()})
    return {name: value - units[1][name] for name, value in units[0].items()}


def _seen(workload: Workload, released: Tensors, round: int) -> Tensors:
    """What the server sees of it, if it knows what all others sent."""
    if workload.stack.aggregation is None:
        return released
    return workload.combined([Update(tensors=released, num_examples=1)], round).tensors


def _along(update: Tensors, toward: Tensors) -> float:
    return sum(
        float(torch.dot(update[name].flatten().double(), value.flatten().double()))
        for name, value in toward.items()
    )
