"""Indicators: properties of a model, its batch and its defenses that let images through."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedsim.forecasting.gain import MOST_IMAGES, Estimate, UpdateMap, disturbance, flat, noise_std
from fedsim.forecasting.plan import UpdatePlan
from fedsim.models.base import Classifier
from fedsim.models.victim import rebuild
from fedsim.words import number_of

Advantage = Literal["attacker", "client", "neither"]
"""The side that an indicator helps."""

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LOUD, _FAINT = 0.5, 0.01
"""Noise over update, root mean squares, above which it hides much and below which little."""


@dataclass(frozen=True)
class Indicator:
    """One property that decides whether an update can be attacked."""

    name: str
    value: str
    """The value as people read it."""
    number: float | None
    """The value as a number; None where it is a word."""
    helps: Advantage
    """Side that the property helps: `attacker`, `client` or `neither`."""
    why: str
    """Why the property helps that side, in a clause."""


def indicators(plan: UpdatePlan, estimate: Estimate) -> list[Indicator]:
    """Returns all indicators of `plan`; `estimate` has to be the estimate of the same plan."""
    observation, clients = plan.first, plan.first.num_clients
    steps = plan.training.steps if plan.training.batches == "different" else 1
    clients = max(1, min(clients, MOST_IMAGES // steps))
    # At most `MOST_IMAGES` images in all, as for the gain.
    size = min(plan.training.batch_size, max(1, MOST_IMAGES // (steps * clients)))
    small = plan.of_batches(size, clients)
    images, labels, _ = small.draw_batch(0, size)
    model = rebuild(observation)
    active = _active_share(model, images)  # first: `UpdateMap` makes the model one of float64
    update_map = UpdateMap(
        model, observation.parameters, observation.buffers, small.training, clients
    )
    return [
        _labels(plan),
        active,
        _norms(model, plan),
        *_sizes(plan),
        _noise(small, images, labels, update_map),
        _server(plan),
        *_descent_indicators(estimate),
    ]


def _judge(
    good: bool, name: str, value: str, number: float, why: str, otherwise: str = ""
) -> Indicator:
    """Makes an indicator that helps the attacker if it is `good` for one, and else the client.

    Then `otherwise` says why, where that is something else.
    """
    side: Advantage = "attacker" if good else "client"
    return Indicator(name, value, number, side, why if good else otherwise or why)


def _labels(plan: UpdatePlan) -> Indicator:
    """Judges whether labels are known, and how likely they all differ."""
    count, classes = plan.first.num_images, plan.first.model.num_classes
    # The birthday problem for uniform labels; with more images than classes one factor is 0.
    distinct = math.prod(max(0, classes - k) / classes for k in range(min(count, classes + 1)))
    granted = plan.grant.labels
    good = distinct > 0.5 or granted == "known"
    why = f"{granted}; all differ with probability {distinct:.2g}"
    return _judge(good, "labels", f"{count} in {classes} classes", distinct, why)


def _active_share(model: Classifier, images: Tensor) -> Indicator:
    """Measures the share of rectified units that an image activates."""
    shares: list[float] = []

    def count(_: nn.Module, __: object, output: Tensor) -> None:
        shares.append(float((output > 0).float().mean()))

    # Only these switch off: a smooth activation leaves the gradient smooth.
    hooks = [
        part.register_forward_hook(count)
        for part in model.modules()
        if isinstance(part, nn.ReLU | nn.ReLU6)
    ]
    try:
        with torch.no_grad():
            model.eval()(images.float())
    finally:
        for hook in hooks:
            hook.remove()
    name = "rectified units"
    if not shares:
        why = "without switches the gradient is smooth in the images"
        return Indicator(name, "none", None, "attacker", why)
    share = sum(shares) / len(shares)
    why = "each that switches is a jump of the gradient, at which descents end"
    return Indicator(name, f"{share:.0%} active", share, "client", why)


def _norms(model: Classifier, plan: UpdatePlan) -> Indicator:
    batch = sum(isinstance(part, _NORMS) for part in model.modules())
    other = sum(isinstance(part, nn.GroupNorm | nn.LayerNorm) for part in model.modules())
    mode = plan.training.mode
    helps: Advantage
    if batch and mode == "train":
        why, helps = "statistics of the batch couple its images, and are not known", "client"
    elif batch or other:
        why, helps = "known statistics; contrast is hardly seen", "neither"
    else:
        why, helps = "nothing hides brightness or contrast", "attacker"
    kinds = [f"{batch} batch ({mode})"] * bool(batch) + [f"{other} group or layer"] * bool(other)
    return Indicator("norm layers", ", ".join(kinds) or "none", float(batch + other), helps, why)


def _sizes(plan: UpdatePlan) -> list[Indicator]:
    """Judges equations for each unknown, local steps, and clients in the sum."""
    images, clients, training = plan.first.num_images, plan.first.num_clients, plan.training
    entries = sum(value.numel() for value in plan.first.parameters.values())
    # Entries of the update are equations; pixels of all its images are unknowns.
    ratio = entries / (images * math.prod(plan.first.model.input_shape))
    several = f"{training.steps}, {training.batches} batches"
    return [
        _judge(
            ratio >= 1,
            "parameters per pixel",
            f"{ratio:.3g}",
            ratio,
            "more equations than unknowns",
            "fewer equations than unknowns",
        ),
        _judge(
            training.steps == 1,
            "local steps",
            several if training.steps > 1 else "1",
            float(training.steps),
            "one gradient",
            "later steps are of weights that nobody saw",
        ),
        _judge(
            clients == 1,
            "clients in the sum",
            str(clients),
            float(clients),
            "seen alone",
            f"as a batch of {number_of(images, 'image')}",
        ),
    ]


def _noise(plan: UpdatePlan, images: Tensor, labels: Tensor, update_map: UpdateMap) -> Indicator:
    """Judges the noise's deviation over the update's root mean square, behind clipping."""
    observation = plan.first
    effect, name = observation.effect, "noise over update"
    std = noise_std(effect.noise, observation.training, observation.num_clients)
    if std == 0 and not effect.exact:
        value, number = ("0", 0.0) if effect.known else ("unknown", None)
        why = "no noise is declared, but the update is altered"
        return Indicator(name, value, number, "neither", why)
    if std == 0:
        return Indicator(name, "0", 0.0, "attacker", "no noise")
    own = flat(update_map.tensors(images, labels), update_map.names)
    scale = disturbance(plan, observation, rebuild(observation), images, labels).scale
    # Clipping shortens the update before noise is added: the ratio is that of what is sent.
    ratio = std / max(scale * float(own.square().mean().sqrt()), 1e-30)
    side: Advantage = "client" if ratio > _LOUD else "attacker" if ratio < _FAINT else "neither"
    why = f"deviation {std:.3g} of an entry, over its root mean square"
    return Indicator(name, f"{ratio:.3g}", ratio, side, why)


def _server(plan: UpdatePlan) -> Indicator:
    server = plan.first.server
    why = {
        "honest": "it has planted nothing",
        "planted": "its weights of the head show every image's features",
        "modified": "its module writes images into the update",
    }[server]
    return Indicator("server", server, None, "neither" if server == "honest" else "attacker", why)


def _descent_indicators(estimate: Estimate) -> list[Indicator]:
    if estimate.closed_form:
        why = "images are read by a formula: no descent has to find the way"
        return [Indicator("closed form", "yes", 1.0, "attacker", why)]
    stall, left = estimate.stall, estimate.unfinished
    value, why = "the truth", "the slope leads all the way"
    if stall:
        value = f"{stall:.2g} of the way"
        why = "there jumps of the gradient are more than the slope shows"
    found = [_judge(stall < 0.5, "descent stalls at", value, stall, why)]
    if left is not None:
        why = "by noise, pruning and a limited number of steps"
        found.append(_judge(left < 0.5, "left undone", f"{left:.2g} of the error", left, why))
    return found
