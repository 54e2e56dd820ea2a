"""The forecast of one plan: indicators, an expected gain with its band, a verdict; also as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsim.contracts import plugins
from fedsim.forecasting.gain import (
    MOST_GAIN,
    MOST_IMAGES,
    Estimate,
    UpdateMap,
    disturbance,
    estimate,
    flat,
    noise_std,
)
from fedsim.forecasting.plan import UpdatePlan
from fedsim.models.base import Classifier
from fedsim.models.victim import rebuild
from fedsim.types import FedsimError
from fedsim.words import number_of

Attackable = Literal["yes", "with luck", "no", "not told"]
Band = tuple[float, float]

LEAK = 3.0
"""Least gain over the guess, dB, from which fedsim says that a trial leaks."""
_FACTOR, _MARGIN = 2.0, 2.0
"""The band: gain / factor - margin to gain * factor + margin, dB."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expected gain of attacks on one kind of update, where the formula tells it."""

    stack: str
    rounds: tuple[int, ...]
    """Rounds, from 1, whose weights the forecast was computed at."""
    batch_size: int
    num_images: int
    """Number of images behind the update, all clients and steps together."""
    indicators: tuple[Indicator, ...]
    estimate: Estimate
    first_attack: str
    """Name of the attack to begin with."""
    beyond: str
    """What `first_attack` does, as a verb phrase, where the formula does not cover it; else empty.
    The formula covers matching gradients and reading a closed form."""
    source: str
    """Origin of the stand-in images."""

    @property
    def gain(self) -> float | None:
        """Gain expected of the best attack, dB of PSNR over the guess; None with a `reason`."""
        return None if self.reason else self.estimate.gain

    @property
    def band(self) -> Band | None:
        """Interval (low, high), dB, in which `gain` is expected; None where there is a `reason`."""
        return None if self.reason else band_of(self.estimate.gain)

    @property
    def reason(self) -> str:
        """Reason, as a clause, why no gain is told; empty if one is."""
        # Noise that hides the images even from an attack without descent hides them from any.
        hidden = self.estimate.ceiling is not None and _answer(self.estimate.ceiling) == "no"
        if not self.beyond or hidden or _answer(self.estimate.gain) != "no":
            return ""
        return (
            f"{self.first_attack} {self.beyond}, of which the forecast knows nothing, and matching "
            "gradients alone hardly gains anything"
        )

    @property
    def attackable(self) -> Attackable:
        """Whether attacks are expected to gain 3 dB (`LEAK`) or more.

        `yes`: the whole `band` lies there. `no`: none of it does. `with luck`: a part does.
        `not told`: there is no band.
        """
        return "not told" if self.reason else _answer(self.estimate.gain)

    @property
    def verdict(self) -> str:
        """The forecast as one plain sentence."""
        what = f"{number_of(self.num_images, 'image')} behind {self.stack}"
        run = f"Run {self.first_attack} to know what it gains."
        gain, band = _format_gain(self.estimate.gain)
        told = f"expected gain {gain} dB {band}"
        return {
            "yes": f"Attackable: {what}, first by {self.first_attack}; {told}.",
            "with luck": f"Attackable with luck: {what}, first by {self.first_attack}; {told}.",
            "no": f"Hardly attackable by matching gradients: {what}; {told}. {run}",
            "not told": f"No gain is told of {what}: {self.reason}. {run}",
        }[self.attackable]

    def as_row(self) -> dict[str, Any]:
        """Returns all fields but `beyond`, and all properties, by name, for JSON.

        Those of `estimate` are among them, its `gain` as `matching_gain`, its `images` as
        `images_computed`, but not its `ceiling`.
        """
        return {
            "stack": self.stack,
            "rounds": list(self.rounds),
            "batch_size": self.batch_size,
            "num_images": self.num_images,
            "attackable": self.attackable,
            "first_attack": self.first_attack,
            "gain": self.gain,
            "band": self.band and list(self.band),
            "reason": self.reason or None,
            "closed_form": self.estimate.closed_form,
            "stall": self.estimate.stall,
            "unfinished": self.estimate.unfinished,
            "matching_gain": self.estimate.gain,
            "images_computed": self.estimate.images,
            "draws": self.estimate.draws,
            "source": self.source,
            "verdict": self.verdict,
            "indicators": [asdict(each) for each in self.indicators],
        }


def band_of(gain: float) -> Band:
    """Returns the band of a forecast: (gain / 2 - 2, at least 0; 2 gain + 2, at most 54), dB."""
    low = max(0.0, gain / _FACTOR - _MARGIN)
    return low, min(MOST_GAIN + 2 * _MARGIN, gain * _FACTOR + _MARGIN)


def _answer(gain: float) -> Attackable:
    """Says whether attacks with this expected gain, dB, succeed: the whole band has to agree."""
    low, high = band_of(gain)
    if low >= LEAK:
        return "yes"
    return "no" if high < LEAK else "with luck"


def _format_gain(gain: float) -> tuple[str, str]:
    """Returns texts of a gain, dB, and of its band, such as `12.0` and `(4.0 to 26.0)`."""
    low, high = band_of(gain)
    return f"{gain:.1f}", f"({low:.1f} to {high:.1f})"


def forecast(plan: UpdatePlan) -> Forecast:
    """Forecasts the gain of attacks on `plan`; infinite or NaN weights are a FedsimError."""
    for each in plan.observations:
        for name, weights in each.parameters.items():
            if not torch.isfinite(weights).all():
                raise FedsimError(
                    f"{plan.stack_name}, round {each.round}: {name} holds NaN or infinity, so that "
                    "no gradient is a number; forecast at weights from before training diverged"
                )
    found = estimate(plan)
    first = _first_attack(plan, found)
    return Forecast(
        stack=plan.stack_name,
        rounds=tuple(each.round for each in plan.observations),
        batch_size=plan.training.batch_size,
        num_images=plan.first.num_images,
        indicators=tuple(_indicators(plan, found)),
        estimate=found,
        first_attack=first,
        beyond=_BEYOND.get(first, ""),
        source=plan.stand_ins.source,
    )


def _first_attack(plan: UpdatePlan, found: Estimate) -> str:
    spec, effect = plan.first.model, plan.first.effect
    smooth = effect.exact and found.stall < 0.5 and plan.training.algorithm == "fedsgd"
    known = plan.grant.labels != "none"
    # In this order the first that fits and is installed is named; the last one always fits.
    wanted = [
        ("imprint", found.closed_form and bool(spec.parameters.get("imprint"))),
        ("spline_inversion", found.closed_form and spec.name == "kan"),
        ("patch_inversion", spec.name == "vit" and plan.first.num_images == 1),
        ("factored_inversion", bool(spec.parameters.get("head"))),
        ("idlg", smooth and known),
        ("deep_leakage", smooth),
        ("factored_inversion", plan.first.num_images < spec.num_classes),
        ("deep_leakage", not known),
        ("inverting_gradients", True),
    ]
    installed = {plugin.name for plugin in plugins.list_installed("fedsim.attacks")}
    fitting = [name for name, fits in wanted if fits]
    return next((name for name in fitting if name in installed), fitting[-1])


_BEYOND = {
    "factored_inversion": "recovers features first",
    "patch_inversion": "solves equations of the position embedding",
}
"""Means of an attack other than matching gradients or reading a closed form, by its name."""
_WIDTH = 80
_NO_PROOF = (
    "A no is a forecast of attacks that match gradients and no proof of safety: only an ε is a "
    "guarantee."
)
_NO_IMAGES = "of an attack that recovers features or labels and no image, none is told"


def render(forecasts: Sequence[Forecast], width: int = _WIDTH) -> str:
    """Returns `forecasts`, at least one, as text: gains, indicators of the worst, and a verdict.

    Lines below the table have up to `width` characters.
    """
    worst = max(forecasts, key=lambda each: each.estimate.gain)
    lines = [f"{'defense':16} {'B':>3} {'images':>6}  {'attackable':10} {'gain dB':>18}  first"]
    for each in forecasts:
        gain = "–" if each.gain is None else " ".join(_format_gain(each.gain))
        lines.append(
            f"{_cut(each.stack, 16):16} {each.batch_size:>3} {each.num_images:>6}  "
            f"{each.attackable:10} {gain:>18}  {each.first_attack}"
        )
    if any(each.attackable == "no" for each in forecasts):
        lines += ["", *textwrap.wrap(_NO_PROOF, width)]
    lines += ["", f"{worst.stack}, B = {worst.batch_size}:", ""]
    names = max(len(each.name) for each in worst.indicators)
    values = max(len(each.value) for each in worst.indicators)
    marks = {"attacker": "+", "client": "-", "neither": " "}
    for one in worst.indicators:
        start = f"{marks[one.helps]} {one.name:{names}}  {one.value:{values}}  "
        indent = " " * len(start)
        lines += textwrap.wrap(one.why, width, initial_indent=start, subsequent_indent=indent)
    lines += ["", "+ helps the attacker, - the client. Gradients were computed of"]
    lines += textwrap.wrap(f"{worst.source}; no attack was run.", width)
    lines += textwrap.wrap(f"Gains are of images: {_NO_IMAGES}.", width)
    lines += ["", *textwrap.wrap(worst.verdict, width)]
    for reason in dict.fromkeys(each.reason for each in forecasts if each.reason):
        if reason != worst.reason:
            lines += textwrap.wrap(f"– in the table: {reason}.", width)
    return "\n".join(lines) + "\n"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


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


def _indicators(plan: UpdatePlan, estimate: Estimate) -> list[Indicator]:
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
    """Makes an indicator that helps the attacker if `good`, and else the client, `otherwise`."""
    side: Advantage = "attacker" if good else "client"
    return Indicator(name, value, number, side, why if good else otherwise or why)


def _labels(plan: UpdatePlan) -> Indicator:
    count, classes = plan.first.num_images, plan.first.model.num_classes
    # The birthday problem for uniform labels; with more images than classes one factor is 0.
    distinct = math.prod(max(0, classes - k) / classes for k in range(min(count, classes + 1)))
    granted = plan.grant.labels
    good = distinct > 0.5 or granted == "known"
    why = f"{granted}; all differ with probability {distinct:.2g}"
    return _judge(good, "labels", f"{count} in {classes} classes", distinct, why)


def _active_share(model: Classifier, images: Tensor) -> Indicator:
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
    images, clients, training = plan.first.num_images, plan.first.num_clients, plan.training
    entries = sum(value.numel() for value in plan.first.parameters.values())
    # Entries of the update are equations; pixels of all its images are unknowns.
    ratio = entries / (images * math.prod(plan.first.model.input_shape))
    steps = training.steps
    several = f"{steps}, {training.batches} batches" if steps > 1 else "1"
    more, fewer = "more equations than unknowns", "fewer equations than unknowns"
    later = "later steps are of weights that nobody saw"
    together = f"as a batch of {number_of(images, 'image')}"
    return [
        _judge(ratio >= 1, "parameters per pixel", f"{ratio:.3g}", ratio, more, fewer),
        _judge(steps == 1, "local steps", several, float(steps), "one gradient", later),
        _judge(
            clients == 1,
            "clients in the sum",
            str(clients),
            float(clients),
            "seen alone",
            together,
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
