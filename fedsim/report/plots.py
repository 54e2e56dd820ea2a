"""Draws plots as SVG for a page: text stays text, and colors are the page's own, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedsim.report.placement import Box, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from fedsim.report.svg import INK, MUTED, PAPER, RULE, color, dash, style, svg

EXACT = 1e-4
"""Feature errors below this are drawn at it."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A defense in the plot of leakage against utility."""

    label: str
    series: int
    """0 is the undefended stack."""
    accuracy: float
    gain: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One defense's training, as (round, value) pairs."""

    label: str
    series: int
    accuracy: list[tuple[int, float]]
    loss: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How much of the features' span the attacks on one defense missed, at one batch size."""

    label: str
    values: list[tuple[int, float, float | None, float | None]]
    """(series of the attack, mean, low, high); 0 is exact, 1 is guessing."""
    predicted: list[tuple[int, float]] = field(default_factory=list)
    """(series of the attack, error that theory predicts)."""


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """True and recovered entries of rows, from an attack on one defense."""

    label: str
    series: int
    points: list[tuple[float, float]]
    """(true, recovered), each in [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class Accused:
    """The accuracy with which an attack on one defense accuses members, at every threshold."""

    label: str
    series: int
    rates: list[tuple[float, float]]
    """(false, true positive rate)."""
    limit: tuple[float, float] | None
    """The largest rate that the privacy claim allows, as (false, true positive rate)."""


def leakage_utility(points: Sequence[Point], *, width: int, height: int) -> str:
    """Plots gain over guessing (dB) against test accuracy, a marker and interval per defense."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        style(axes)
        axes.axhline(0, color=MUTED, linewidth=1, dashes=(4, 3))
        for point in points:
            paint = color(point.series)
            x = point.accuracy * 100
            if point.low is not None and point.high is not None:
                axes.plot([x, x], [point.low, point.high], color=paint, linewidth=1.6, zorder=2)
            axes.plot(
                [x],
                [point.gain],
                marker="o",
                markersize=9,
                markeredgewidth=1.8,
                zorder=3,
                color=paint,
                markerfacecolor=PAPER if point.series == 0 else paint,
                markeredgecolor=paint,
            )
        axes.margins(x=0.16, y=0.14)
        _at_least(axes, 4.0, 2.0)
        axes.set_xlabel("test accuracy (%)  →  better model", parse_math=False)
        axes.set_ylabel("leak: dB above guessing  →  worse", parse_math=False)
        _label_points(figure, axes, points)

    return svg(draw, width, height, "Leakage against utility, a marker per defense")


def training_curves(curves: Sequence[Curve], *, width: int, height: int, stacked: bool) -> str:
    """Plots test accuracy and training loss by round, a line per defense.

    Args:
        curves: of each defense.
        width: of the plot, in pixels.
        height: likewise.
        stacked: whether the loss is below the accuracy, or beside it.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots(*((2, 1) if stacked else (1, 2)))
        engine: Any = figure.get_layout_engine()
        engine.set(wspace=0.08, hspace=0.08)
        for ax, title in zip(axes, ("test accuracy (%)", "training loss"), strict=True):
            style(ax)
            ax.set_title(title, parse_math=False)
            ax.set_xlabel("round", parse_math=False)
            ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        for curve in curves:
            for ax, values, factor in (
                (axes[0], curve.accuracy, 100.0),
                (axes[1], curve.loss, 1.0),
            ):
                ax.plot(
                    [round for round, _ in values],
                    [value * factor for _, value in values],
                    color=color(curve.series),
                    linewidth=1.8,
                    linestyle=dash(curve.series),
                    marker="o",
                    markersize=3.5 if len(values) < 30 else 0,
                )

    return svg(draw, width, height, "Test accuracy and training loss by round")


def feature_errors(lines: Sequence[Errors], *, width: int) -> str:
    """Plots the mean error of each attack from `EXACT` to guessing, a line per defense."""
    height = 84 + 25 * len(lines)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        style(axes)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=RULE, linewidth=0.6)
        axes.axvline(1, color=MUTED, linewidth=1, dashes=(4, 3))
        for y, line in enumerate(lines):
            axes.axhline(y, color=RULE, linewidth=0.6, zorder=0)
            for series, mean, low, high in line.values:
                paint = color(series)
                if low is not None and high is not None:
                    ends = [max(low, EXACT), max(high, EXACT)]
                    axes.plot(ends, [y, y], color=paint, linewidth=1.6, zorder=2)
                x = max(mean, EXACT)
                axes.plot([x], [y], marker="o", markersize=7, color=paint, zorder=3)
            for series, value in line.predicted:
                axes.plot(
                    [max(value, EXACT)],
                    [y],
                    marker="o",
                    markersize=11,
                    markeredgewidth=1.4,
                    markerfacecolor="none",
                    markeredgecolor=color(series),
                    zorder=4,
                )
        axes.set_xscale("log")
        axes.set_xlim(EXACT * 0.7, 1.5)
        axes.set_xticks([EXACT, 1e-3, 1e-2, 0.1, 1], ["≤ 0.0001", "0.001", "0.01", "0.1", "1"])
        axes.set_xticks([], minor=True)
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.set_yticks(range(len(lines)), [line.label for line in lines])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.set_xlabel("error of the features' span; 1 is guessing  ←  worse", parse_math=False)

    return svg(draw, width, height, "Error of recovered features, a line per defense")


def recovered_rows(clouds: Sequence[Cloud], *, width: int) -> str:
    """Plots recovered against true entries, a panel per defense."""
    across = max(1, min(len(clouds), width // 185))
    down = -(-len(clouds) // across)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for ax in panels.flat[len(clouds) :]:
            ax.set_visible(False)
        for cloud, ax in zip(clouds, panels.flat, strict=False):
            style(ax)
            ax.set_title(cloud.label, parse_math=False, fontsize=10.5)
            ax.plot([-1, 1], [-1, 1], color=MUTED, linewidth=1, dashes=(4, 3), zorder=1)
            ax.scatter(
                [truth for truth, _ in cloud.points],
                [recovered for _, recovered in cloud.points],
                s=9,
                linewidths=0,
                alpha=0.55,
                color=color(cloud.series),
                zorder=2,
            )
            ax.set_xlim(-1.08, 1.08)
            ax.set_ylim(-1.08, 1.08)
            ax.set_xticks([-1, 0, 1])
            ax.set_yticks([-1, 0, 1])
            ax.set_aspect("equal")
        figure.supxlabel("true value, on its column’s range", color=MUTED, fontsize=11)
        figure.supylabel("recovered value", color=MUTED, fontsize=11)

    height = 46 + down * (width // across + 4)
    return svg(draw, width, height, "Recovered against true values, a panel per defense")


def membership_rates(lines: Sequence[Accused], *, width: int, height: int) -> str:
    """Plots true against false positive rates per defense; a ring is what its claim allows."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        style(axes)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, dashes=(4, 3))
        for line in lines:
            paint = color(line.series)
            axes.step(
                *zip(*line.rates, strict=True),
                where="post",
                color=paint,
                linewidth=1.8,
                linestyle=dash(line.series),
            )
            if line.limit:
                axes.plot(
                    *[[value] for value in line.limit],
                    marker="o",
                    markersize=9,
                    markeredgewidth=1.6,
                    markerfacecolor="none",
                    markeredgecolor=paint,
                    zorder=4,
                )
        axes.set_xlim(-0.01, 1.01)
        axes.set_ylim(-0.01, 1.02)
        axes.set_xlabel("share of other rows that are accused", parse_math=False)
        axes.set_ylabel("share of members found  →  worse", parse_math=False)

    return svg(draw, width, height, "True against false positive rate, a line per defense")


def _label_points(figure: Figure, axes: Axes, points: Sequence[Point]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    frame = axes.get_window_extent()
    anchors = [
        tuple(axes.transData.transform((point.accuracy * 100, point.gain))) for point in points
    ]
    obstacles = [Box(x - 7, y - 7, x + 7, y + 7) for x, y in anchors]
    for point, (x, _) in zip(points, anchors, strict=True):
        if point.low is not None and point.high is not None:
            ends = [axes.transData.transform((0, value))[1] for value in (point.low, point.high)]
            obstacles.append(Box(x - 3, ends[0], x + 3, ends[1]))
    texts = [
        axes.text(
            0,
            0,
            point.label,
            ha="left",
            va="center",
            color=INK,
            transform=None,
            in_layout=False,
            parse_math=False,
            zorder=5,
        )
        for point in points
    ]
    sizes = []
    for text in texts:
        extent = text.get_window_extent(canvas.get_renderer())
        sizes.append((extent.width + 4, extent.height + 3))
    bounds = Box(frame.x0 + 2, frame.y0 + 2, frame.x1 - 2, frame.y1 - 2)
    boxes = place(anchors, sizes, obstacles, bounds)
    for text, box, (x, y), point in zip(texts, boxes, anchors, points, strict=True):
        text.set_position((box.left + 2, (box.bottom + box.top) / 2))
        near = (min(max(x, box.left), box.right), min(max(y, box.bottom), box.top))
        if (near[0] - x) ** 2 + (near[1] - y) ** 2 > 18**2:
            axes.plot(
                [x, near[0]],
                [y, near[1]],
                transform=None,
                in_layout=False,
                color=color(point.series),
                linewidth=0.8,
                zorder=1,
            )


def _at_least(axes: Axes, x_span: float, y_span: float) -> None:
    """Widens narrow axes, so that noise does not look like a difference."""
    for get, put, span in (
        (axes.get_xlim, axes.set_xlim, x_span),
        (axes.get_ylim, axes.set_ylim, y_span),
    ):
        low, high = get()
        missing = max(0.0, span - (high - low)) / 2
        put(low - missing, high + missing)
