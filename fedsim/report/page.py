"""The report: one HTML file that opens anywhere, with nothing to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from fedsim.recording.files import write_text
from fedsim.report import facts, plots
from fedsim.report.control import Control, describe_comparison, invalid_reasons, positive_controls
from fedsim.report.figures import (
    describe_variant,
    format_accuracy,
    format_claim,
    format_epsilon,
    format_metric,
    format_number,
    format_percent,
    format_signed,
    format_summary,
)
from fedsim.report.gallery import Plate, gallery
from fedsim.report.leaderboard import LeaderboardRow, aggregate
from fedsim.report.recovered import accused, clouds
from fedsim.report.threat import threat_model
from fedsim.report.utility import attacks_nothing, utility
from fedsim.report.verdict import Verdict, verdicts
from fedsim.results.reading import ResultRow, Run, load_runs, measurements
from fedsim.scoring import METRICS, Summary
from fedsim.words import number_of

_WIDE, _NARROW = 760, 380
"""Plots are drawn twice, so that their text is readable on a desk and on a phone."""

Markup = str


@dataclass(frozen=True, kw_only=True)
class Strip:
    """A gain and its interval as shares (percent) of a common scale."""

    zero: float
    at: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Section:
    """One comparison's part of the report."""

    title: str
    folders: list[str]
    """Names of the folders of a variant's runs; empty of a run that is no variant."""
    control: Control
    rows: list[LeaderboardRow]
    several_rounds: bool
    cautions: list[str]
    """What holds of every verdict."""
    verdicts: list[tuple[Verdict, Strip | None, str]]
    """With the strip, and the color of the defense."""
    gallery: list[tuple[str, str, list[Plate]]]
    """(defense, stack, its plates)."""
    omitted: int
    """Plates left out of the gallery."""
    leakage: list[tuple[str, Markup]]
    """(CSS class, SVG) by width; empty if test accuracy or gains were not measured."""
    features: list[tuple[str, Markup]]
    """Errors of recovered features, if any were."""
    recovered: list[tuple[str, Markup]]
    """Recovered against true values of rows, if any were."""
    membership: list[tuple[str, Markup]]
    """Who was taken for a member, if an attack tried."""
    accused: list[tuple[str, str]]
    """(defense, color) of what `membership` draws."""
    predicted: bool
    """Whether theory's predictions are drawn among them."""
    attacks: list[tuple[str, str]]
    """(attack on features, color)."""
    curves: list[tuple[str, Markup]]
    legend: list[tuple[str, str]]
    """(defense, color)."""


def write_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write the report of a run, or of all variants of a sweep; returns its path.

    `out` is the file to write, by default `report.html` in `folder`.

    Raises:
        FedsimError: `folder` holds no results, or a file in it is damaged.
    """
    runs = load_runs([folder])
    path = Path(out) if out else Path(folder) / "report.html"
    write_text(path, _html(runs))
    return path


def _html(runs: Sequence[Run]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "summary": format_summary,
        "number": format_number,
        "number_of": number_of,
        "percent": format_percent,
        "accuracy": format_accuracy,
        "epsilon": format_epsilon,
        "claim": lambda row: format_claim(row.epsilon, row.delta, row.unit, row.relation),
        "signed": format_signed,
        "metric": format_metric,
    }
    return environment.get_template("report.html.j2").render(_context(runs))


def _context(runs: Sequence[Run]) -> dict[str, Any]:
    results = measurements(runs)
    unattacked = not results and attacks_nothing(runs)
    confidence = _confidence(runs)
    rows = aggregate(results, confidence=confidence)
    return {
        "title": ", ".join(_names(runs, results)) or "no results",
        "description": next((t for run in runs if (t := run.setting("description"))), ""),
        "summary": facts.UNATTACKED if unattacked else facts.sentence(runs, results),
        "utility": utility(runs) if unattacked else [],
        "covered": list(dict.fromkeys(row.privacy_covers for row in rows if row.privacy_covers)),
        "threats": threat_model(results),
        "invalid": [] if unattacked else invalid_reasons(rows),
        "confidence": f"{confidence:.0%}",
        "sections": [_section(control, rows, runs) for control in positive_controls(rows)],
        "metrics": [
            (metric, any(row.limit(metric.name) is not None for row in rows))
            for metric in METRICS.values()
            if metric.heading and metric.name != "psnr"
            if any(row.metrics[metric.name] for row in rows)
        ],
        "show_other": any(row.other_update or row.no_control for row in rows),
        "show_compared": any(row.other_update for row in rows),
        "show_intervals": any(
            summary and summary.low is not None
            for row in rows
            for summary in (row.metrics["psnr"], row.gain)
        ),
        "of_rows": any(row.subject == "rows" for row in rows),
        "of_images": any(row.subject == "images" for row in rows),
        "failures": facts.failures(results),
        "client_failures": facts.client_failures(runs),
        "notes": facts.notes(runs),
        "records": [
            {
                "name": run.folder.name,
                "variant": describe_variant(run.record.get("variant") or {}),
                "scenario": run.scenario_text,
                "facts": facts.made_with(run.record),
            }
            for run in runs
        ],
    }


def _names(runs: Sequence[Run], results: Sequence[ResultRow]) -> list[str]:
    """Of the scenarios."""
    named = [row.scenario for row in results] or [run.setting("name") for run in runs]
    return list(dict.fromkeys(name for name in named if name))


def _section(control: Control, rows: Sequence[LeaderboardRow], runs: Sequence[Run]) -> Section:
    own = [row for row in rows if row.comparison == control.comparison]
    cells = {row.cell for row in own}
    # A folder belongs to the comparison that its rows are part of.
    members = [run for run in runs if any(row.cell in cells for row in run.rows)]
    series = _series(own)
    judged = verdicts(own, control)
    strips = _strips([verdict.gain for verdict in judged])
    points = [
        plots.Point(
            label=verdict.strongest.defense,
            series=series[verdict.strongest.defense],
            accuracy=verdict.strongest.test_accuracy,
            gain=verdict.gain.mean,
            low=verdict.gain.low,
            high=verdict.gain.high,
        )
        for verdict in judged
        if verdict.gain and verdict.strongest.test_accuracy is not None
    ]
    curves = _curves(members, series)
    shown = gallery(own, members)
    attacks = list(dict.fromkeys(row.attack for row in own))
    painted = {
        attack: number
        for number, attack in enumerate(
            sorted({row.attack for row in own if row.metrics["subspace_error"]}), start=1
        )
    }
    errors = _errors(own, painted)
    rows_found = clouds(own, members, series)
    rates = accused(own, members, series)
    return Section(
        title=describe_comparison(control.comparison),
        folders=[run.folder.name for run in members] if own[0].variant else [],
        control=control,
        rows=own,
        several_rounds=len({row.round for row in own}) > 1,
        cautions=_shared_cautions(judged),
        verdicts=[
            (verdict, strip, plots.series_color(series[verdict.strongest.defense]))
            for verdict, strip in zip(judged, strips, strict=True)
        ],
        gallery=[
            (defense, stack, _plates(shown.plates, defense, attacks))
            for defense, stack in dict.fromkeys((row.defense, row.stack) for row in own)
        ],
        omitted=shown.omitted,
        leakage=[
            ("wide", plots.leakage_utility(points, width=_WIDE, height=420)),
            ("narrow", plots.leakage_utility(points, width=_NARROW, height=360)),
        ]
        if points
        else [],
        features=[
            ("wide", plots.feature_errors(errors, width=_WIDE)),
            ("narrow", plots.feature_errors(errors, width=_NARROW)),
        ]
        if errors
        else [],
        recovered=[
            ("wide", plots.recovered_rows(rows_found, width=_WIDE)),
            ("narrow", plots.recovered_rows(rows_found, width=_NARROW)),
        ]
        if rows_found
        else [],
        membership=[
            ("wide", plots.membership_rates(rates, width=_WIDE, height=400)),
            ("narrow", plots.membership_rates(rates, width=_NARROW, height=360)),
        ]
        if rates
        else [],
        accused=[(line.label, plots.series_color(line.series)) for line in rates],
        predicted=any(line.predicted for line in errors),
        attacks=[(attack, plots.series_color(number)) for attack, number in painted.items()],
        curves=[
            ("wide", plots.training_curves(curves, width=_WIDE, height=270, stacked=False)),
            ("narrow", plots.training_curves(curves, width=_NARROW, height=480, stacked=True)),
        ]
        if curves
        else [],
        legend=[(curve.label, plots.series_color(curve.series)) for curve in curves],
    )


def _errors(rows: Sequence[LeaderboardRow], painted: dict[str, int]) -> list[plots.Errors]:
    """What each attack left of the features, by defense, batch size and round as they come."""
    several = len({(row.batch_size, row.round) for row in rows}) > 1
    many_rounds = len({row.round for row in rows}) > 1
    lines: dict[str, list[tuple[int, float, float | None, float | None]]] = {}
    predicted: dict[str, list[tuple[int, float]]] = {}
    constant = _constant(rows)
    for row in rows:
        found = row.metrics["subspace_error"]
        if found is None:
            continue
        label = f"{row.defense}, B = {row.batch_size}" if several else row.defense
        label += f", round {row.round}" if many_rounds else ""
        value = (painted[row.attack], found.mean, found.low, found.high)
        lines.setdefault(label, []).append(value)
        if constant and row.tensor_rate:
            rate = min(1.0, constant * row.tensor_rate)
            predicted.setdefault(label, []).append((painted[row.attack], rate))
    return [
        plots.Errors(label=label, values=values, predicted=predicted.get(label, []))
        for label, values in lines.items()
    ]


def _constant(rows: Sequence[LeaderboardRow]) -> float | None:
    """What makes theory's rates meet the errors that the undefended cells have, on average."""
    ratios = [
        found.mean / row.tensor_rate
        for row in rows
        if row.undefended and row.tensor_rate
        if (found := row.metrics["subspace_error"]) and found.mean
    ]
    return geometric_mean(ratios) if ratios else None


def _shared_cautions(judged: Sequence[Verdict]) -> list[str]:
    first, *others = judged
    return [text for text in first.cautions if all(text in other.cautions for other in others)]


def _plates(plates: Sequence[Plate], defense: str, attacks: Sequence[str]) -> list[Plate]:
    """One defense's, in an order that is the same for all, so that they line up on the page."""
    return sorted(
        (plate for plate in plates if plate.line.defense == defense),
        key=lambda plate: (plate.line.batch_size, attacks.index(plate.line.attack)),
    )


def _series(rows: Sequence[LeaderboardRow]) -> dict[str, int]:
    """Defense -> its number in all plots: 0 for the undefended stack, the others as they come."""
    undefended = {row.defense for row in rows if row.undefended}
    others = [name for name in dict.fromkeys(row.defense for row in rows) if name not in undefended]
    return dict.fromkeys(undefended, 0) | {name: i for i, name in enumerate(others, start=1)}


def _strips(gains: Sequence[Summary | None]) -> list[Strip | None]:
    """All on one scale that holds zero and every interval."""
    every = [_ends(gain) for gain in gains if gain]
    low = min([0.0, *(ends[0] for ends in every)])
    high = max([1.0, *(ends[1] for ends in every)])
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
    known = gain.low is not None and gain.high is not None
    return (gain.low or 0.0, gain.high or 0.0) if known else (gain.mean, gain.mean)


def _curves(runs: Sequence[Run], series: dict[str, int]) -> list[plots.Curve]:
    """Training of each defense; of several runs of the same stack the first is drawn.

    None where there is but one round: a point is no curve.
    """
    found: dict[str, plots.Curve] = {}
    for run in runs:
        for name in dict.fromkeys(row.defense for row in run.rounds):
            if name in found or name not in series:
                continue
            own = [row for row in run.rounds if row.defense == name]
            found[name] = plots.Curve(
                label=name,
                series=series[name],
                accuracy=[(r.round, r.test_accuracy) for r in own if r.test_accuracy is not None],
                loss=[(r.round, r.train_loss) for r in own if r.train_loss is not None],
            )
    if all(len(curve.accuracy) < 2 and len(curve.loss) < 2 for curve in found.values()):
        return []
    return sorted(found.values(), key=lambda curve: curve.series)


def _confidence(runs: Sequence[Run]) -> float:
    """The scenario's, which all variants of a sweep share; else 95%."""
    for run in runs:
        value = run.setting("scoring", "confidence")
        if isinstance(value, float) and 0 < value < 1:
            return value
    return 0.95
