"""Draws matplotlib figures as SVG for a page, whose stylesheet sets colors and fonts."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = 8
"""The page has so many colors for series, `--c0` (undefended) to `--c7`."""

INK, MUTED, RULE, PAPER = "#010101", "#010102", "#010103", "#010104"

_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"}

_VARIABLES |= {f"#0201{i:02x}": f"--c{i}" for i in range(COLORS)}

_FONT = "DejaVu Sans"

_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


def series_color(series: int) -> str:
    """Returns the CSS variable of a series' color; where colors repeat, dashes tell them apart."""
    return f"--c{_color_index(series)}"


def style(axes: Axes) -> None:
    """Styles axes in the page's colors, with faint horizontal lines."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, pad=6)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
    axes.title.set_color(INK)


def svg(draw: Callable[[Figure], None], width: int, height: int, description: str) -> str:
    """Returns what `draw` draws on a figure, as SVG for the page.

    Args:
        draw: draws on the figure.
        width: in pixels.
        height: in pixels.
        description: for those who cannot see it.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": description,
        "font.family": _FONT,
        "font.size": 12,
        "axes.titlesize": 12.5,
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.labelpad": 8,
        "text.parse_math": False,
    }
    with rc_context(settings):
        # 72 dots per inch: a point is a pixel.
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        figure.patch.set_visible(False)
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _for_page(buffer.getvalue(), width, height, description)


def _for_page(svg: str, width: int, height: int, description: str) -> str:
    """Replaces placeholder colors and fonts by the page's, and drops what would affect the page."""
    body = svg[svg.index("<svg") :]
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # A stylesheet inside an inline SVG would apply to the whole page.
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(rf"(?<=: )({'|'.join(_VARIABLES)})\b", lambda m: f"var({_VARIABLES[m[0]]})", body)
    body = body.replace(f"'{_FONT}'", "var(--sans)")
    return (
        f'<svg class="plot" role="img" aria-label="{escape(description)}" '
        f'viewBox="0 0 {width} {height}" style="max-width:{width}px" '
        f'stroke-linejoin="round" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">{body}'
    )


def color(series: int) -> str:
    """Returns the placeholder of a series' color, which the page replaces."""
    return f"#0201{_color_index(series):02x}"


def dash(series: int) -> Any:
    """Returns the dashes of a series, which tell those of one color apart."""
    return _DASHES[series // COLORS % len(_DASHES)]


def _color_index(series: int) -> int:
    return series if series < COLORS else 1 + (series - 1) % (COLORS - 1)
