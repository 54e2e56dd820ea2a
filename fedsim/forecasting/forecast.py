"""The forecast of one plan: indicators, an expected gain with its band, and a verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedsim.contracts import plugins
from fedsim.forecasting.gain import MOST_GAIN, Estimate, estimate
from fedsim.forecasting.indicators import Indicator, as_row, indicators
from fedsim.forecasting.plan import Plan
from fedsim.words import number_of

Answer = Literal["yes", "with luck", "no"]

LEAK = 3.0
"""dB over the guess from which fedsim says that a trial leaks."""
_FACTOR, _MARGIN = 2.0, 2.0
"""The band: gain / factor - margin to gain * factor + margin, dB."""
_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What attacks on one kind of update will gain."""

    stack: str
    rounds: tuple[int, ...]
    """Whose weights were looked at."""
    batch_size: int
    num_images: int
    """That the update is of, all clients and steps together."""
    indicators: tuple[Indicator, ...]
    estimate: Estimate
    first_attack: str
    source: str
    """Of the stand-in images."""

    @property
    def gain(self) -> float:
        """Expected gain of the best attack, dB over the guess."""
        return self.estimate.gain

    @property
    def band(self) -> tuple[float, float]:
        """Where the measured gain is expected, dB."""
        low = max(0.0, self.gain / _FACTOR - _MARGIN)
        return low, min(MOST_GAIN + 2 * _MARGIN, self.gain * _FACTOR + _MARGIN)

    @property
    def attackable(self) -> Answer:
        """`yes` or `no` where the whole band says so, else `with luck`."""
        low, high = self.band
        if low >= LEAK:
            return "yes"
        return "no" if high < LEAK else "with luck"

    @property
    def verdict(self) -> str:
        """One plain sentence."""
        what = f"{number_of(self.num_images, 'image')} behind {self.stack}"
        low, high = self.band
        told = f"expected gain {self.gain:.1f} dB ({low:.1f} to {high:.1f})"
        return {
            "yes": f"Attackable: {what}, first by {self.first_attack}; {told}.",
            "with luck": f"Attackable with luck: {what}, first by {self.first_attack}; {told}.",
            "no": f"Hardly attackable by matching gradients: {what}; {told}. "
            f"Run {self.first_attack} to know what it gains.",
        }[self.attackable]

    def as_row(self) -> dict[str, Any]:
        """Returns the forecast as it is written to JSON."""
        low, high = self.band
        return {
            "stack": self.stack,
            "rounds": list(self.rounds),
            "batch_size": self.batch_size,
            "num_images": self.num_images,
            "attackable": self.attackable,
            "first_attack": self.first_attack,
            "gain": self.gain,
            "band": [low, high],
            "closed_form": self.estimate.closed_form,
            "stall": self.estimate.stall,
            "unfinished": self.estimate.unfinished,
            "images_computed": self.estimate.images,
            "draws": self.estimate.draws,
            "source": self.source,
            "verdict": self.verdict,
            "indicators": [as_row(each) for each in self.indicators],
        }


def forecast(plan: Plan) -> Forecast:
    """Forecasts `plan` from a few gradients of stand-in images.

    Raises:
        FedsimError: the model cannot compute such a batch.
    """
    found = estimate(plan)
    return Forecast(
        stack=plan.stack_name,
        rounds=tuple(each.round for each in plan.observations),
        batch_size=plan.training.batch_size,
        num_images=plan.first.num_images,
        indicators=tuple(indicators(plan, found)),
        estimate=found,
        first_attack=_first_attack(plan, found),
        source=plan.stand_ins.source,
    )


def _first_attack(plan: Plan, found: Estimate) -> str:
    """Names the attack to begin with, of those that are installed.

    A closed form first; of a two-layer head the features; L-BFGS where the update is exact and
    smooth. Else the features of an ordinary classifier of more classes than images, or the
    direction of the update.
    """
    spec, effect = plan.first.model, plan.first.effect
    smooth = effect.exact and found.stall < 0.5 and plan.training.algorithm == "fedsgd"
    known = plan.grant.labels != "none"
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
    installed = {plugin.name for plugin in plugins.installed("fedsim.attacks")}
    fitting = [name for name, fits in wanted if fits]
    return next((name for name in fitting if name in installed), fitting[-1])


def render(forecasts: Sequence[Forecast], width: int = _WIDTH) -> str:
    """Returns `forecasts` as text: gains, the indicators of the most attackable, and a verdict."""
    worst = max(forecasts, key=lambda each: each.gain)
    lines = [f"{'defense':16} {'B':>3} {'images':>6}  {'attackable':10} {'gain dB':>18}  first"]
    for each in forecasts:
        low, high = each.band
        gain = f"{each.gain:.1f} ({low:.1f} to {high:.1f})"
        lines.append(
            f"{_cut(each.stack, 16):16} {each.batch_size:>3} {each.num_images:>6}  "
            f"{each.attackable:10} {gain:>18}  {each.first_attack}"
        )
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
    lines += ["", *textwrap.wrap(worst.verdict, width)]
    return "\n".join(lines) + "\n"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
