"""Draws the charts of a comparison as SVG, with text as text, and in the page's own colors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from markupsafe import Markup
from torch import Tensor

from fedsim.recording.files import read_tensors
from fedsim.report.figures import read_texts
from fedsim.report.judge import Verdict
from fedsim.report.pictures import reconstruction_file
from fedsim.report.row import LeaderboardRow, population_of
from fedsim.results.reading import StoredRun, trial_of
from fedsim.targets.membership import FALSE_POSITIVES
from fedsim.types import CANDIDATE_MEMBERS

_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 24, 14, 42
_LABEL = 15
"""Labels of points stand at least so many pixels apart."""

_COLORS = 8
"""The page has so many colors for series, `--c0` (undefended) to `--c7`."""

_Point = tuple[float, float]
_Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class _Series:
    """One defense in a chart; `label` stands beside the last point, and `hollow` dots are rings."""

    color: int  # number of the color, 0 for the undefended stack
    points: Sequence[_Point]
    shape: Literal["dots", "line", "steps"] = "dots"
    label: str = ""
    bars: Sequence[tuple[_Span | None, _Span | None]] = ()
    """(horizontal, vertical) interval of each point, each (low, high) or None."""
    hollow: bool = False
    rings: Sequence[_Point] = ()


@dataclass(frozen=True)
class _ChartAxis:
    """One axis of a chart; `name` is the text beside it."""

    name: str
    ends: _Span | None = None  # least and largest value on it; by default those of the points
    counts: bool = False  # whether the axis counts, so that ticks are whole numbers
    least: float = 0.0  # least length of the axis, so that noise does not look like a difference

    def range_of(self, values: Sequence[float]) -> _Span:
        """Returns (least, largest) of the axis: `ends` if given, else a bit beyond `values`."""
        if self.ends:
            return self.ends
        low, high = min(values), max(values)
        missing = max(0.0, (self.least or 1e-9) - (high - low)) / 2
        margin = 0.08 * max(high - low, self.least or 1.0)
        return low - missing - margin, high + missing + margin

    def ticks(self, ends: _Span) -> list[float]:
        """Returns up to eight round numbers between `ends`, which are written at the axis."""
        low, high = ends
        rough = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        ticks = [round(number * step, 10) + 0.0 for number in range(first, last + 1)]
        return [tick for tick in ticks if not self.counts or tick.is_integer()]


def _draw_chart(
    series: Sequence[_Series],
    *,
    across: _ChartAxis,
    up: _ChartAxis,
    description: str,
    diagonal: bool = False,
) -> Markup:
    """Draws a chart as SVG; a dashed line marks equal values if `diagonal`, else zero of `up`."""
    points = [point for one in series for point in (*one.points, *one.rings)]
    bars = [bar for one in series for bar in one.bars]
    xs = [x for x, _ in points] + [end for bar, _ in bars for end in bar or ()]
    ys = [y for _, y in points] + [end for _, bar in bars for end in bar or ()]
    x_low, x_high = across.range_of(xs)
    y_low, y_high = up.range_of(ys)

    def x(value: float) -> float:
        share = (value - x_low) / (x_high - x_low)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        # SVG counts downwards.
        share = (value - y_low) / (y_high - y_low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    right, base = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in up.ticks((y_low, y_high)):
        parts.append(_line(_LEFT, y(tick), right, y(tick), "grid"))
        parts.append(_text(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end"))
    across_ticks = across.ticks((x_low, x_high))
    parts += [_text(x(tick), base + 16, f"{tick:g}", "middle") for tick in across_ticks]
    if diagonal:
        parts.append(_line(x(x_low), y(y_low), x(x_high), y(y_high), "guide"))
    elif y_low < 0 < y_high:
        parts.append(_line(_LEFT, y(0), right, y(0), "guide"))
    labels = []
    for one in series:
        drawn = [(x(a), y(b)) for a, b in one.points]
        parts.append(_draw_marks(one, drawn, [(x(a), y(b)) for a, b in one.rings]))
        for (a, b), (wide, high) in zip(drawn, one.bars, strict=False):
            color = f"s{_color(one.color)}"
            parts.append(_line(x(wide[0]), b, x(wide[1]), b, color) if wide else Markup(""))
            parts.append(_line(a, y(high[0]), a, y(high[1]), color) if high else Markup(""))
        if one.label and drawn:
            labels.append((*drawn[-1], one.label))
    # Last, when all are known: they are moved until none covers another.
    parts += [_text(a + 8, b, label, "start", "label") for a, b, label in _move_apart(labels)]
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 6, across.name, "middle"))
    middle = (_TOP + base) / 2
    parts.append(
        Markup('<text class="axis" transform="translate(12 {}) rotate(-90)" {}>{}</text>').format(
            middle, Markup('text-anchor="middle"'), up.name
        )
    )
    return Markup(
        '<svg class="chart" role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>'
    ).format(description, _WIDTH, _HEIGHT, Markup("").join(parts))


def _color(number: int) -> int:
    return number if number < _COLORS else 1 + (number - 1) % (_COLORS - 1)


def _draw_marks(one: _Series, points: Sequence[_Point], rings: Sequence[_Point]) -> Markup:
    marks = []
    if one.shape == "dots":
        radius = 5 if len(points) == 1 else 2
        marks = [_circle(*point, radius, hollow=one.hollow) for point in points]
    elif points:
        path = f"M{points[0][0]} {points[0][1]}"
        for a, b in points[1:]:
            path += f"H{a}V{b}" if one.shape == "steps" else f"L{a} {b}"
        dashed = ' stroke-dasharray="6 3"' if one.color >= _COLORS else ""
        marks.append(Markup(f'<path d="{path}" fill="none"{dashed}/>'))  # noqa: S704 - numbers
    marks += [_circle(*point, 5, hollow=True) for point in rings]
    return Markup('<g class="s{}">{}</g>').format(_color(one.color), Markup("").join(marks))


def _circle(x: float, y: float, radius: int, *, hollow: bool) -> Markup:
    return Markup('<circle cx="{}" cy="{}" r="{}"{}/>').format(
        x, y, radius, Markup(' class="hollow"') if hollow else ""
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>').format(x1, y1, x2, y2, kind)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "axis") -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}" class="{}">{}</text>').format(
        x, y, anchor, kind, text
    )


def _move_apart(labels: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Returns labels (x, y, text) moved down until none covers another, from the top on."""
    placed: list[tuple[float, float, str]] = []
    for x, y, text in sorted(labels, key=lambda label: label[1]):
        for other_x, other_y, other in placed:
            near = abs(x - other_x) < 8 * max(len(text), len(other)) + _LABEL
            if near and abs(y - other_y) < _LABEL:
                y = other_y + _LABEL
        placed.append((x, y, text))
    return placed


_TEXTS = read_texts()["charts"]


@dataclass(frozen=True)
class ChartGroup:
    """Charts below one heading, `title`, with an explaining text, `note`."""

    title: str
    note: str
    charts: list[tuple[str, Markup]]
    """(caption, SVG)."""
    legend: list[tuple[str, int]]
    """(defense, number of its color)."""


def draw_charts(
    rows: Sequence[LeaderboardRow],
    runs: Sequence[StoredRun],
    verdicts: Sequence[Verdict],
    colors: Mapping[str, int],
    confidence: float,
) -> list[ChartGroup]:
    """Returns the charts of one comparison that have something to show: leakage, members, training.

    A FedsimError says that a reconstruction cannot be read.

    Args:
        rows: Rows of the comparison.
        runs: Runs that the rows are from.
        verdicts: The verdict on each defense.
        colors: Stack's name -> number of its color, 0 for the undefended stack.
        confidence: Confidence of the rows' intervals, between 0 and 1.
    """
    figures = [
        _leakage(rows, verdicts, colors, confidence),
        _membership(_list_accused(rows, runs, colors)),
        _training(runs, colors),
    ]
    return [figure for figure in figures if figure is not None]


def _leakage(
    rows: Sequence[LeaderboardRow],
    verdicts: Sequence[Verdict],
    colors: Mapping[str, int],
    confidence: float,
) -> ChartGroup | None:
    series = []
    for number, verdict in enumerate(verdicts, start=1):
        gain, row = verdict.gain, verdict.strongest
        if not gain or row.test_accuracy is None or verdict.finding == "no answer":
            continue
        accuracy = row.accuracy
        wide = (100 * accuracy.low, 100 * accuracy.high) if accuracy else None
        high = None if gain.low is None or gain.high is None else (gain.low, gain.high)
        series.append(
            _Series(
                label=str(number),
                color=colors[verdict.defense],
                points=[(100 * row.test_accuracy, gain.mean)],
                bars=[(wide, high)],
                hollow=row.is_uninformed,
            )
        )
    if not series:
        return None
    # Bars of many defenses hide one another and the dots.
    if crowded := len(series) > _COLORS:
        series = [replace(one, bars=()) for one in series]
    drawn = _draw_chart(
        series,
        across=_ChartAxis("test accuracy, % → better model", least=4.0),
        up=_ChartAxis("gain over guessing, dB → worse", least=2.0),
        description="Leakage against accuracy, a dot for each defense",
    )
    bars = _TEXTS["bars"].format(confidence=confidence, population=population_of(rows))
    note = _TEXTS["leakage"] + (_TEXTS["crowded"] if crowded else bars)
    if any(one.hollow for one in series):
        note += _TEXTS["ring"]
    legend = [(f"{n} {v.defense}", colors[v.defense]) for n, v in enumerate(verdicts, start=1)]
    return ChartGroup("Leakage against accuracy", note, [("", drawn)], legend)


def _membership(lines: Sequence[_Series]) -> ChartGroup | None:
    if not lines:
        return None
    drawn = _draw_chart(
        [replace(line, label="") for line in lines],
        across=_ChartAxis("share of other rows that are accused", (0, 1)),
        up=_ChartAxis("share of members found → worse", (0, 1)),
        description="True against false positive rate, a line for each defense",
        diagonal=True,
    )
    legend = [(line.label, line.color) for line in lines]
    return ChartGroup("Who took part", _TEXTS["membership"], [("", drawn)], legend)


def _training(runs: Sequence[StoredRun], colors: Mapping[str, int]) -> ChartGroup | None:
    """Returns the curves of each defense, from the first run of its stack; a point is no curve."""
    curves: dict[str, dict[str, _Series]] = {"test_accuracy": {}, "train_loss": {}}
    for run in runs:
        for name in dict.fromkeys(row.defense for row in run.rounds if row.defense in colors):
            for field, of_field in curves.items():
                values = [
                    (float(row.round), getattr(row, field))
                    for row in run.rounds
                    if row.defense == name
                ]
                points = [(at, float(v)) for at, v in values if v is not None and math.isfinite(v)]
                of_field.setdefault(name, _Series(color=colors[name], points=points, shape="line"))
    if all(len(curve.points) < 2 for curve in curves["test_accuracy"].values()):
        return None
    charts = []
    for name, of_field in curves.items():
        caption = name.replace("_", " ").replace("train ", "training ")
        said = f"{caption} by round, a line for each defense"
        if any(curve.points for curve in of_field.values()):
            across, up = _ChartAxis("round", counts=True), _ChartAxis(caption)
            drawn = _draw_chart(list(of_field.values()), across=across, up=up, description=said)
            charts.append((caption, drawn))
    legend = [(name, colors[name]) for name in curves["test_accuracy"]]
    legend.sort(key=lambda entry: entry[1])
    return ChartGroup("Training", _TEXTS["training"], charts, legend)


def _list_accused(
    lines: Sequence[LeaderboardRow], runs: Sequence[StoredRun], colors: Mapping[str, int]
) -> list[_Series]:
    """Returns a curve for each defense: (false, true) rates of its best membership attack."""
    best: dict[str, LeaderboardRow] = {}
    telling = [line for line in lines if "membership_auc" in line.gains]
    for line in sorted(telling, key=lambda line: -line.gains["membership_auc"].mean):
        best.setdefault(line.defense, line)
    curves = []
    for line in best.values():
        files = {
            trial_of(run, row): path  # a copied trial counts once
            for run in runs
            for row in run.rows
            if row.cell == line.cell and row.ok and (path := reconstruction_file(run.folder, row))
        }
        parts = [part for part in map(read_tensors, files.values()) if "membership" in part]
        if not parts:
            continue
        scores = torch.cat([part["membership"] for part in parts])
        members = torch.cat(
            [part[CANDIDATE_MEMBERS if CANDIDATE_MEMBERS in part else "members"] for part in parts]
        )
        limit = line.limits.get("membership_tpr")
        curves.append(
            _Series(
                label=line.defense,
                color=colors[line.defense],
                shape="steps",
                points=_rates(scores, members),
                rings=[] if limit is None else [(FALSE_POSITIVES, limit)],
            )
        )
    return sorted(curves, key=lambda curve: curve.color)


def _rates(scores: Tensor, members: Tensor) -> list[tuple[float, float]]:
    """Returns (false, true) positive rates at every threshold; equal scores stay on one side."""
    falling = scores.sort(descending=True)
    members = members[falling.indices]
    last = torch.cat([falling.values[1:] != falling.values[:-1], torch.ones(1, dtype=torch.bool)])
    false, true = (
        (part.double().cumsum(0) / part.sum().clamp_min(1))[last].tolist()
        for part in (~members, members)
    )
    return [(0.0, 0.0), *zip(false, true, strict=True)]
