"""The forecast of one plan: indicators, an expected gain with its band, a verdict; also as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from fedsim.contracts import plugins
from fedsim.forecasting.gain import MOST_GAIN, Estimate, estimate
from fedsim.forecasting.indicators import Indicator, indicators
from fedsim.forecasting.plan import UpdatePlan
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
    """The expected gain of attacks on one kind of update, where the formula tells it.

    `stack` is the name of the stack of defenses, and `first_attack` the name of the attack to run
    first.
    """

    stack: str
    rounds: tuple[int, ...]
    """Rounds whose weights the forecast was computed at."""
    batch_size: int
    num_images: int
    """Images that the update was computed on, all clients and steps together."""
    indicators: tuple[Indicator, ...]
    estimate: Estimate
    first_attack: str
    beyond: str
    """What `first_attack` does, as a verb phrase, where the formula does not cover it; else empty.
    The formula covers matching gradients and reading a closed form."""
    source: str
    """Origin of the stand-in images."""

    @property
    def gain(self) -> float | None:
        """Gain expected of the best attack, dB of PSNR over who saw no update, or None."""
        return None if self.reason else self.estimate.gain

    @property
    def band(self) -> Band | None:
        """Interval (low, high), dB, in which a gain is expected; None where there is a `reason`."""
        return None if self.reason else band_of(self.estimate.gain)

    @property
    def reason(self) -> str:
        """Reason, as a clause, why no gain is told; empty if one is.

        The formula covers attacks that match gradients. Where these gain nothing, no gain is told
        of a first attack by other means, unless noise hides the images from any attack.
        """
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
        gain, band = format_gain(self.estimate.gain)
        told = f"expected gain {gain} dB {band}"
        return {
            "yes": f"Attackable: {what}, first by {self.first_attack}; {told}.",
            "with luck": f"Attackable with luck: {what}, first by {self.first_attack}; {told}.",
            "no": f"Hardly attackable by matching gradients: {what}; {told}. {run}",
            "not told": f"No gain is told of {what}: {self.reason}. {run}",
        }[self.attackable]

    def as_row(self) -> dict[str, Any]:
        """Returns the fields of this class and of `Estimate` as JSON can hold them.

        `gain` is called `matching_gain`, and `images` `images_computed`.
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
    """Returns (low, high), dB, between which a gain is measured where `gain` is forecast."""
    low = max(0.0, gain / _FACTOR - _MARGIN)
    return low, min(MOST_GAIN + 2 * _MARGIN, gain * _FACTOR + _MARGIN)


def _answer(gain: float) -> Attackable:
    """Says whether attacks with this expected gain, dB, succeed: the whole band has to agree."""
    low, high = band_of(gain)
    if low >= LEAK:
        return "yes"
    return "no" if high < LEAK else "with luck"


def format_gain(gain: float) -> tuple[str, str]:
    """Returns the texts of a gain, dB, and of its band, such as `12.0` and `(4.0 to 26.0)`."""
    low, high = band_of(gain)
    return f"{gain:.1f}", f"({low:.1f} to {high:.1f})"


def forecast(plan: UpdatePlan) -> Forecast:
    """Forecasts `plan` from a few gradients of stand-in images.

    Raises:
        FedsimError: the model cannot compute such a batch, or its weights are no numbers.
    """
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
        indicators=tuple(indicators(plan, found)),
        estimate=found,
        first_attack=first,
        beyond=_BEYOND.get(first, ""),
        source=plan.stand_ins.source,
    )


def _first_attack(plan: UpdatePlan, found: Estimate) -> str:
    """Names the installed attack to begin with, by what the update gives away."""
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

    Lines have at most `width` characters.
    """
    worst = max(forecasts, key=lambda each: each.estimate.gain)
    lines = [f"{'defense':16} {'B':>3} {'images':>6}  {'attackable':10} {'gain dB':>18}  first"]
    for each in forecasts:
        gain = "–" if each.gain is None else " ".join(format_gain(each.gain))
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
