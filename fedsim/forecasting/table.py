"""Forecasts as text: gains, the indicators of the most attackable, and a verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fedsim.forecasting.forecast import Forecast, worded

_WIDTH = 80
_NO_PROOF = (
    "A no is a forecast of attacks that match gradients and no proof of safety: only an ε is a "
    "guarantee."
)
_NO_IMAGES = "of an attack that recovers features or labels and no image, none is told"


def render(forecasts: Sequence[Forecast], width: int = _WIDTH) -> str:
    """Returns `forecasts` as text: gains, the indicators of the most attackable, and a verdict."""
    worst = max(forecasts, key=lambda each: each.estimate.gain)
    lines = [f"{'defense':16} {'B':>3} {'images':>6}  {'attackable':10} {'gain dB':>18}  first"]
    for each in forecasts:
        gain = "–" if each.gain is None else " ".join(worded(each.gain))
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
