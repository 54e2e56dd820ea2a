"""The picture of a privacy curve: δ over ε on a logarithmic axis, a line for each direction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.privacy import calculator
from fedsim.privacy.contract import Answer
from fedsim.types import FedsimError

_LINES = {
    "forward": ("row removed", "#0f6b8f", "-"),
    "reverse": ("row added", "#c4622d", "--"),
    "both": ("both directions", "#0f6b8f", "-"),
}
_POINTS = 200
_LOWEST = -30.0
"""Lowest end of the axis, as a power of ten, unless the answer itself lies below."""


def draw(path: Path, mechanism: str, keys: Mapping[str, Any], answer: Answer) -> None:
    """Writes a PNG of the curve of `mechanism` with `keys` to `path`, with the `answer` marked.

    Raises:
        FedsimError: the file's name does not end in .png, or a key is wrong.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix.lower() != ".png":
        raise FedsimError(f"plot: {path} does not end in .png; only that is written")
    curve = calculator.curve(mechanism, keys)
    shown = answer.log_delta / math.log(10)
    lowest = min(_LOWEST, 1.2 * shown) if math.isfinite(shown) else _LOWEST
    floor = lowest * math.log(10)
    center = answer.epsilon if math.isfinite(answer.epsilon) else 0.0
    reach = max(2 * center, 1.0)
    with calculator.numerics_errors():
        while reach < 1e6 and curve.delta(reach).log_delta > floor / 2:
            reach *= 2
        epsilons = np.linspace(0.0, reach, _POINTS)
        lines = curve.log_deltas(epsilons)
    # The Agg canvas needs no display, and leaves pyplot's global state alone.
    figure = Figure(figsize=(6.4, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for way, values in lines.items():
        label, color, style = _LINES[way]
        # A NaN leaves a gap in the line: δ = 0 has no place on a logarithmic axis.
        powers = np.where(np.isfinite(values), values / math.log(10), np.nan)
        axes.plot(epsilons, powers, style, color=color, label=label, linewidth=1.8)
    if math.isfinite(answer.epsilon) and math.isfinite(shown):
        axes.plot([answer.epsilon], [shown], "o", color="#222222", markersize=6)
        axes.annotate(
            f"ε = {answer.epsilon:.4g}, δ = {_power(shown)}",
            (answer.epsilon, shown),
            xytext=(8, 8),
            textcoords="offset points",
        )
    axes.set_xlim(0, reach)
    axes.set_ylim(lowest, 0.5)
    ticks = [float(tick) for tick in axes.get_yticks() if lowest <= tick <= 0]
    axes.set_yticks(ticks, [f"$10^{{{tick:g}}}$" if tick else "1" for tick in ticks])
    axes.set_xlabel(f"ε  ({answer.unit}; neighbours: {answer.neighbours})")
    axes.set_ylabel("δ")
    said = ", ".join(f"{key} = {value}" for key, value in keys.items())
    # A key's value, such as a path, may hold a dollar sign, which would begin a formula.
    axes.set_title(f"{mechanism}: {said}", loc="left", fontsize=10, parse_math=False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, format="png")


def _power(exponent: float) -> str:
    # Below 1e-308 a double underflows to 0, so that the power itself is written.
    return f"{10**exponent:.3g}" if exponent > -300 else f"10^{exponent:.1f}"
