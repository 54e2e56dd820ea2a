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
from fedsim.types import Tensors
from fedsim.words import number_of

Advantage = Literal["attacker", "client", "neither"]
"""The side that an indicator helps."""

_RANK_TOLERANCE = 1e-6
"""Singular values below so much of the largest count as zero."""
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
    why: str
    """The reason in a clause."""


def indicators(plan: UpdatePlan, estimate: Estimate) -> list[Indicator]:
    """Returns all indicators of `plan`, of which `estimate` has the gain."""
    observation, clients = plan.first, plan.first.num_clients
    steps = plan.training.steps if plan.training.batches == "different" else 1
    clients = max(1, min(clients, MOST_IMAGES // steps))
    # At most `MOST_IMAGES` images in all, as for the gain.
    size = min(plan.training.batch_size, max(1, MOST_IMAGES // (steps * clients)))
    small = plan.of_batches(size, clients)
    images, labels, _ = small.draw_batch(0, size)
    model = rebuild(observation)
    active = _active_share(model, images)
    update_map = UpdateMap(
        model, observation.parameters, observation.buffers, small.training, clients
    )
    update = observation.update or update_map.tensors(images, labels)
    return [
        _labels(plan),
        *_ranks(observation.parameters, update, len(images)),
        *_alone(_row_norms(small, images, labels)),
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


def _ranks(parameters: Tensors, update: Tensors, count: int) -> list[Indicator]:
    """Judges the numerical ranks of the classifier's and the first dense layer's gradients."""
    found = []
    matrices = [name for name, value in parameters.items() if value.ndim == 2]
    heads = [name for name in matrices if name.startswith("head.")]
    bodies = [name for name in matrices if not name.startswith("head.")]
    for title, names in (("rank, last layer", heads[-1:]), ("rank, first dense", bodies[:1])):
        for name in names:
            values = torch.linalg.svdvals(update[name].detach().double())
            most = float(values.max())
            rank = int((values > _RANK_TOLERANCE * most).sum()) if most else 0
            full = min(parameters[name].shape)
            value = f"{rank} of {full}, {number_of(count, 'image')}"
            why = "its rows span the layer's inputs"
            full_rank = "of full rank: the span of its rows tells nothing"
            found.append(_judge(0 < rank < full, title, value, float(rank), why, full_rank))
    return found


def _alone(rows: Tensor | None) -> list[Indicator]:
    """Judges the share of images that are alone in some row of the first dense layer."""
    if rows is None:
        return []
    active = rows > _RANK_TOLERANCE * rows.amax().clamp_min(1e-30)
    # An image is alone if it is the only active one in at least one row.
    alone = ((active.sum(0) == 1) & active).any(1)
    share = float(alone.float().mean())
    value = f"{int(alone.sum())} of {number_of(len(alone), 'image')}"
    why = "rows of the first dense layer that one image moves are multiples of its input"
    return [_judge(share > 0, "alone in a row", value, share, why)]


def _row_norms(plan: UpdatePlan, images: Tensor, labels: Tensor) -> Tensor | None:
    """Returns (images, rows): row norms of each image's gradient of the first dense layer."""
    observation = plan.first
    names = [n for n, p in observation.parameters.items() if p.ndim == 2]
    body = [name for name in names if not name.startswith("head.")]
    # A model of a single dense layer has its head alone.
    chosen = body[:1] or names[:1]
    if not chosen or plan.training.algorithm != "fedsgd":
        return None
    one = plan.of_batches(1, 1)
    single = UpdateMap(
        rebuild(observation), observation.parameters, observation.buffers, one.training, 1
    )
    rows = []
    for k in range(len(images)):
        try:
            found = single.tensors(images[k : k + 1], labels[k : k + 1])[chosen[0]]
        except Exception:  # batch norm cannot train on one image
            return None
        rows.append(torch.linalg.vector_norm(found, dim=1))
    return torch.stack(rows)


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
    scale = disturbance(
        plan, observation, rebuild(observation), images, labels, update_map.names
    ).scale
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
