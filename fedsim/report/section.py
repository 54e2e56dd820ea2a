"""Builds one comparison's part of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from types import MappingProxyType

from fedsim.report import plots
from fedsim.report.answers import Answer, answers, round_seconds, runs_of
from fedsim.report.cells import Column, columns
from fedsim.report.control import Control, describe_comparison
from fedsim.report.gallery import PictureRow, Plate, gallery, same_images
from fedsim.report.recovered import accused, clouds
from fedsim.report.row import LeaderboardRow
from fedsim.report.svg import series_color
from fedsim.report.verdict import Verdict
from fedsim.results.reading import Run
from fedsim.scoring import Summary

_WIDE, _NARROW = 760, 380
"""Widths in pixels. Plots are drawn twice, so that their text is readable on a desk and on a
phone."""


Markup = str


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Positions a gain and its interval on a common scale, in percent of its length."""

    zero: float
    at: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Section:
    """Holds one comparison's part of the report."""

    title: str
    folders: list[str]
    """Names of the folders of a variant's runs; empty for a run that is no variant."""
    control: Control
    rows: list[LeaderboardRow]
    columns: list[Column]
    """The table of `rows`."""
    answers: list[tuple[Answer, Strip | None, str]]
    """(answer, the strip of its gain, color of the defense)."""
    untried: list[str]
    """What no attack on any defense tried."""
    pictures: list[PictureRow]
    several_rounds: bool
    cautions: list[str]
    """Cautions that apply to every verdict."""
    gallery: list[tuple[str, str, list[Plate]]]
    """(defense, stack, its plates)."""
    omitted: int
    """Number of plates left out of the gallery."""
    leakage: list[tuple[str, Markup]]
    """(CSS class, SVG) by width; empty if test accuracy or gains were not measured."""
    features: list[tuple[str, Markup]]
    """Plots of errors of recovered features, if any were recovered."""
    recovered: list[tuple[str, Markup]]
    """Plots of recovered against true values of rows, if any were recovered."""
    membership: list[tuple[str, Markup]]
    """Plots of the rates at which members were accused, if an attack tried."""
    accused: list[tuple[str, str]]
    """(defense, color) of the lines in `membership`."""
    predicted: bool
    """Whether `features` shows the predictions of theory."""
    attacks: list[tuple[str, str]]
    """(attack on features, color)."""
    curves: list[tuple[str, Markup]]
    legend: list[tuple[str, str]]
    """(defense, color)."""


def build_section(control: Control, rows: Sequence[LeaderboardRow], runs: Sequence[Run]) -> Section:
    """Builds the section of the comparison that `control` judges."""
    lines = [row for row in rows if row.comparison == control.comparison]
    members = runs_of(lines, runs)
    series = _series(lines)
    answered = answers(lines, control, members)
    judgements = [answer.judgement for answer in answered]
    strips = _strips([verdict.gain for verdict in judgements])
    points = [
        plots.Point(
            label=verdict.strongest.defense,
            series=series[verdict.strongest.defense],
            accuracy=verdict.strongest.test_accuracy,
            gain=verdict.gain.mean,
            low=verdict.gain.low,
            high=verdict.gain.high,
        )
        for verdict in judgements
        if verdict.gain and verdict.strongest.test_accuracy is not None
    ]
    curves = _curves(members, series)
    pictures = gallery(lines, members)
    attacks = list(dict.fromkeys(row.attack for row in lines))
    numbers = {
        attack: number
        for number, attack in enumerate(
            sorted({row.attack for row in lines if row.metrics["subspace_error"]}), start=1
        )
    }
    errors = _errors(lines, numbers)
    row_clouds = clouds(lines, members, series)
    rates = accused(lines, members, series)
    return Section(
        title=describe_comparison(control.comparison, {row.comparison for row in rows}),
        folders=[run.folder.name for run in members] if lines[0].variant else [],
        control=control,
        rows=lines,
        columns=columns(lines, round_seconds(members)),
        answers=[
            (answer, strip, series_color(series[answer.defense]))
            for answer, strip in zip(answered, strips, strict=True)
        ],
        untried=[
            kind
            for kind in answered[0].untried
            if all(kind in answer.untried for answer in answered)
        ],
        pictures=same_images(lines, members),
        several_rounds=len({row.round for row in lines}) > 1,
        cautions=_shared_cautions(judgements),
        gallery=[
            (defense, stack, _plates(pictures.plates, defense, attacks))
            for defense, stack in dict.fromkeys((row.defense, row.stack) for row in lines)
        ],
        omitted=pictures.omitted,
        leakage=_both_widths(plots.leakage_utility, points, {"height": 420}, {"height": 360}),
        features=_both_widths(plots.feature_errors, errors),
        recovered=_both_widths(plots.recovered_rows, row_clouds),
        membership=_both_widths(plots.membership_rates, rates, {"height": 400}, {"height": 360}),
        accused=[(line.label, series_color(line.series)) for line in rates],
        predicted=any(line.predicted for line in errors),
        attacks=[(attack, series_color(number)) for attack, number in numbers.items()],
        curves=_both_widths(
            plots.training_curves,
            curves,
            {"height": 270, "stacked": False},
            {"height": 480, "stacked": True},
        ),
        legend=[(curve.label, series_color(curve.series)) for curve in curves],
    )


def _both_widths(
    plot: Callable[..., Markup],
    lines: Sequence[object],
    wide: Mapping[str, int] = MappingProxyType({}),
    narrow: Mapping[str, int] = MappingProxyType({}),
) -> list[tuple[str, Markup]]:
    """Draws `lines` for a desk and for a phone; (CSS class, SVG), or nothing without lines.

    Args:
        plot: a function of `fedsim.report.plots`.
        lines: what it draws.
        wide: its other arguments on a desk.
        narrow: its other arguments on a phone.
    """
    if not lines:
        return []
    return [
        ("wide", plot(lines, width=_WIDE, **wide)),
        ("narrow", plot(lines, width=_NARROW, **narrow)),
    ]


def _errors(rows: Sequence[LeaderboardRow], numbers: dict[str, int]) -> list[plots.Errors]:
    """Returns the errors of recovered features, a line per defense, batch size and round."""
    several = len({(row.batch_size, row.round) for row in rows}) > 1
    many_rounds = len({row.round for row in rows}) > 1
    lines: dict[str, list[tuple[int, float, float | None, float | None]]] = {}
    predicted: dict[str, list[tuple[int, float]]] = {}
    constant = _constant(rows)
    for row in rows:
        error = row.metrics["subspace_error"]
        if error is None:
            continue
        label = f"{row.defense}, B = {row.batch_size}" if several else row.defense
        label += f", round {row.round}" if many_rounds else ""
        value = (numbers[row.attack], error.mean, error.low, error.high)
        lines.setdefault(label, []).append(value)
        if constant and row.tensor_rate:
            rate = min(1.0, constant * row.tensor_rate)
            predicted.setdefault(label, []).append((numbers[row.attack], rate))
    return [
        plots.Errors(label=label, values=values, predicted=predicted.get(label, []))
        for label, values in lines.items()
    ]


def _constant(rows: Sequence[LeaderboardRow]) -> float | None:
    """Returns the factor that fits theory's rates to the undefended errors, as a geometric mean."""
    ratios = [
        error.mean / row.tensor_rate
        for row in rows
        if row.undefended and row.tensor_rate
        if (error := row.metrics["subspace_error"]) and error.mean
    ]
    return geometric_mean(ratios) if ratios else None


def _shared_cautions(judged: Sequence[Verdict]) -> list[str]:
    """Returns the cautions that all verdicts share."""
    first, *others = judged
    return [text for text in first.cautions if all(text in other.cautions for other in others)]


def _plates(plates: Sequence[Plate], defense: str, attacks: Sequence[str]) -> list[Plate]:
    """Returns the plates of one defense, by batch size and attack.

    The order is the same for all defenses, so that plates line up on the page.
    """
    return sorted(
        (plate for plate in plates if plate.line.defense == defense),
        key=lambda plate: (plate.line.batch_size, attacks.index(plate.line.attack)),
    )


def _series(rows: Sequence[LeaderboardRow]) -> dict[str, int]:
    """Numbers the defenses for all plots: 0 is the undefended stack, the others follow in order."""
    undefended = {row.defense for row in rows if row.undefended}
    others = [name for name in dict.fromkeys(row.defense for row in rows) if name not in undefended]
    return dict.fromkeys(undefended, 0) | {name: i for i, name in enumerate(others, start=1)}


def _strips(gains: Sequence[Summary | None]) -> list[Strip | None]:
    """Places all gains on one scale that holds zero and every interval."""
    intervals = [_ends(gain) for gain in gains if gain]
    low = min([0.0, *(ends[0] for ends in intervals)])
    high = max([1.0, *(ends[1] for ends in intervals)])
    pad = 0.03 * (high - low)

    def share(value: float) -> float:
        return round(100 * (value - low + pad) / (high - low + 2 * pad), 2)

    return [
        Strip(zero=share(0), at=share(gain.mean), low=share(ends[0]), high=share(ends[1]))
        if gain and (ends := _ends(gain))
        else None
        for gain in gains
    ]


def _ends(gain: Summary) -> tuple[float, float]:
    """Returns the ends of the interval; the mean twice if there is none."""
    if gain.low is None or gain.high is None:
        return gain.mean, gain.mean
    return gain.low, gain.high


def _curves(runs: Sequence[Run], series: dict[str, int]) -> list[plots.Curve]:
    """Returns the training curve of each defense, from the first run of its stack.

    Returns none if accuracy was tested once or never: a point is no curve.
    """
    curves: dict[str, plots.Curve] = {}
    for run in runs:
        for name in dict.fromkeys(row.defense for row in run.rounds):
            if name in curves or name not in series:
                continue
            rounds = [row for row in run.rounds if row.defense == name]
            curves[name] = plots.Curve(
                label=name,
                series=series[name],
                accuracy=[
                    (row.round, row.test_accuracy)
                    for row in rounds
                    if row.test_accuracy is not None
                ],
                loss=[(row.round, row.train_loss) for row in rounds if row.train_loss is not None],
            )
    if all(len(curve.accuracy) < 2 for curve in curves.values()):
        return []
    return sorted(curves.values(), key=lambda curve: curve.series)
