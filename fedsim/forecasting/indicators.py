"""What about a model, its batch and its defenses lets images through, each with a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedsim.forecasting.disturbance import disturbance, noise_std
from fedsim.forecasting.gain import MOST_IMAGES, Estimate
from fedsim.forecasting.plan import Plan
from fedsim.forecasting.sensitivity import UpdateMap, flat
from fedsim.models.base import Classifier
from fedsim.models.victim import rebuild
from fedsim.types import Tensors
from fedsim.words import number_of

Side = Literal["attacker", "client", "neither"]
"""Whom it helps."""

_RANK_TOLERANCE = 1e-6
"""Singular values below so much of the largest count as zero."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LOUD, _FAINT = 0.5, 0.01
"""Noise over update, root mean squares, above which it hides much and below which little."""


@dataclass(frozen=True, kw_only=True)
class Indicator:
    """One thing that decides on whether an update can be attacked."""

    name: str
    value: str
    """For people."""
    number: float | None
    """The value as a number; None where it is a word."""
    helps: Side
    why: str
    """One sentence."""


def indicators(plan: Plan, estimate: Estimate) -> list[Indicator]:
    """Returns all indicators of `plan`, of which `estimate` has the gain."""
    observation, clients = plan.first, plan.first.num_clients
    steps = plan.training.steps if plan.training.batches == "different" else 1
    clients = max(1, min(clients, MOST_IMAGES // steps))
    size = min(plan.training.batch_size, max(1, MOST_IMAGES // (steps * clients)))
    small = plan.of_batches(size, clients)
    images, labels, _ = small.drawn(0, size)
    model = rebuild(observation)
    active = _active_share(model, images)
    update_map = UpdateMap(
        model, observation.parameters, observation.buffers, small.training, clients
    )
    update = observation.update or update_map.tensors(images, labels)
    singles = _single_gradients(small, images, labels)
    return [
        _labels(plan),
        *_ranks(observation.parameters, update, len(images)),
        *_alone(singles),
        *active,
        _norms(model, plan),
        _parameters(plan),
        _steps(plan),
        _clients(plan),
        _noise(small, images, labels, update_map),
        _server(plan),
        *_descent(estimate),
    ]


def _labels(plan: Plan) -> Indicator:
    """Whether labels are known, and how likely they all differ."""
    count, classes = plan.first.num_images, plan.first.model.num_classes
    distinct = math.prod(max(0, classes - k) / classes for k in range(min(count, classes + 1)))
    granted = plan.grant.labels
    good = distinct > 0.5 or granted == "known"
    return Indicator(
        name="labels",
        value=f"{count} in {classes} classes",
        number=distinct,
        helps="attacker" if good else "client",
        why=f"{granted}; all differ with probability {distinct:.2g}",
    )


def _ranks(parameters: Tensors, update: Tensors, count: int) -> list[Indicator]:
    """Numerical ranks of the gradients of the classifier and of the first dense layer."""
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
            spans = 0 < rank < full
            found.append(
                Indicator(
                    name=title,
                    value=f"{rank} of {full}, {number_of(count, 'image')}",
                    number=float(rank),
                    helps="attacker" if spans else "client",
                    why="its rows span the layer's inputs"
                    if spans
                    else "of full rank: the span of its rows tells nothing",
                )
            )
    return found


def _alone(singles: Tensors | None) -> list[Indicator]:
    """Share of images that are alone in some row of the first dense layer."""
    if singles is None:
        return []
    (rows,) = singles.values()
    active = rows > _RANK_TOLERANCE * rows.amax().clamp_min(1e-30)
    alone = ((active.sum(0) == 1) & active).any(1)
    share = float(alone.float().mean())
    return [
        Indicator(
            name="alone in a row",
            value=f"{int(alone.sum())} of {number_of(len(alone), 'image')}",
            number=share,
            helps="attacker" if share else "client",
            why="rows of the first dense layer that one image moves are multiples of its input",
        )
    ]


def _single_gradients(plan: Plan, images: Tensor, labels: Tensor) -> Tensors | None:
    """(images, rows): norm of each row of the first dense layer's gradient, image by image."""
    observation = plan.first
    names = [n for n, p in observation.parameters.items() if p.ndim == 2]
    body = [name for name in names if not name.startswith("head.")]
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
    return {chosen[0]: torch.stack(rows)}


def _active_share(model: Classifier, images: Tensor) -> list[Indicator]:
    """Share of rectified units that an image activates."""
    shares: list[float] = []

    def count(_: nn.Module, __: object, output: Tensor) -> None:
        shares.append(float((output > 0).float().mean()))

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
    if not shares:
        return [
            Indicator(
                name="rectified units",
                value="none",
                number=None,
                helps="attacker",
                why="without switches the gradient is smooth in the images",
            )
        ]
    share = sum(shares) / len(shares)
    return [
        Indicator(
            name="rectified units",
            value=f"{share:.0%} active",
            number=share,
            helps="client",
            why="each that switches is a jump of the gradient, at which descents end",
        )
    ]


def _norms(model: Classifier, plan: Plan) -> Indicator:
    batch = sum(isinstance(part, _NORMS) for part in model.modules())
    other = sum(isinstance(part, nn.GroupNorm | nn.LayerNorm) for part in model.modules())
    mode = plan.training.mode
    if batch and mode == "train":
        why, helps = "statistics of the batch couple its images, and are not known", "client"
    elif batch or other:
        why, helps = "known statistics; contrast is hardly seen", "neither"
    else:
        why, helps = "nothing hides brightness or contrast", "attacker"
    kinds = [f"{batch} batch ({mode})"] * bool(batch) + [f"{other} group or layer"] * bool(other)
    return Indicator(
        name="norm layers",
        value=", ".join(kinds) or "none",
        number=float(batch + other),
        helps=helps,  # type: ignore[arg-type]
        why=why,
    )


def _parameters(plan: Plan) -> Indicator:
    entries = sum(value.numel() for value in plan.first.parameters.values())
    pixels = plan.first.num_images * math.prod(plan.first.model.input_shape)
    ratio = entries / pixels
    return Indicator(
        name="parameters per pixel",
        value=f"{ratio:.3g}",
        number=ratio,
        helps="attacker" if ratio >= 1 else "client",
        why="more equations than unknowns" if ratio >= 1 else "fewer equations than unknowns",
    )


def _steps(plan: Plan) -> Indicator:
    training = plan.training
    steps = training.steps
    return Indicator(
        name="local steps",
        value=f"{steps}, {training.batches} batches" if steps > 1 else "1",
        number=float(steps),
        helps="attacker" if steps == 1 else "client",
        why="one gradient" if steps == 1 else "later steps are of weights that nobody saw",
    )


def _clients(plan: Plan) -> Indicator:
    clients, images = plan.first.num_clients, number_of(plan.first.num_images, "image")
    return Indicator(
        name="clients in the sum",
        value=str(clients),
        number=float(clients),
        helps="attacker" if clients == 1 else "client",
        why="seen alone" if clients == 1 else f"as a batch of {images}",
    )


def _noise(plan: Plan, images: Tensor, labels: Tensor, update_map: UpdateMap) -> Indicator:
    """Standard deviation of noise over the update's root mean square, behind clipping."""
    observation = plan.first
    std = noise_std(observation.effect.noise, observation.training, observation.num_clients)
    if std == 0:
        hidden = not observation.effect.exact
        return Indicator(
            name="noise over update",
            value="0" if observation.effect.known else "unknown",
            number=0.0 if observation.effect.known else None,
            helps="neither" if hidden else "attacker",
            why="no noise is declared, but the update is altered" if hidden else "no noise",
        )
    own = flat(update_map.tensors(images, labels), update_map.names)
    scale = disturbance(
        plan, observation, rebuild(observation), images, labels, update_map.names
    ).scale
    ratio = std / max(scale * float(own.square().mean().sqrt()), 1e-30)
    side: Side = "client" if ratio > _LOUD else "attacker" if ratio < _FAINT else "neither"
    return Indicator(
        name="noise over update",
        value=f"{ratio:.3g}",
        number=ratio,
        helps=side,
        why=f"deviation {std:.3g} of an entry, over its root mean square",
    )


def _server(plan: Plan) -> Indicator:
    server = plan.first.server
    why = {
        "honest": "it has planted nothing",
        "planted": "its weights of the head show every image's features",
        "modified": "its module writes images into the update",
    }[server]
    return Indicator(
        name="server",
        value=server,
        number=None,
        helps="neither" if server == "honest" else "attacker",
        why=why,
    )


def _descent(estimate: Estimate) -> list[Indicator]:
    if estimate.closed_form:
        return [
            Indicator(
                name="closed form",
                value="yes",
                number=1.0,
                helps="attacker",
                why="images are read by a formula: no descent has to find the way",
            )
        ]
    smooth = estimate.stall == 0
    found = [
        Indicator(
            name="descent stalls at",
            value="the truth" if smooth else f"{estimate.stall:.2g} of the way",
            number=estimate.stall,
            helps="attacker" if estimate.stall < 0.5 else "client",
            why="the slope leads all the way"
            if smooth
            else "there jumps of the gradient are more than the slope shows",
        )
    ]
    if estimate.unfinished is not None:
        found.append(
            Indicator(
                name="left undone",
                value=f"{estimate.unfinished:.2g} of the error",
                number=estimate.unfinished,
                helps="attacker" if estimate.unfinished < 0.5 else "client",
                why="by noise, pruning and a limited number of steps",
            )
        )
    return found


def as_row(indicator: Indicator) -> Mapping[str, object]:
    """Returns the indicator as it is written to JSON."""
    return {
        "name": indicator.name,
        "value": indicator.value,
        "number": indicator.number,
        "helps": indicator.helps,
        "why": indicator.why,
    }
