"""Draws the charts of a comparison: leakage against accuracy, recovered rows, members, training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from markupsafe import Markup
from torch import Tensor

from fedsim.recording.files import read_tensors
from fedsim.report.charts import Axis, Series, chart
from fedsim.report.judge import Verdict
from fedsim.report.pictures import reconstruction_file
from fedsim.report.row import LeaderboardRow, population_of
from fedsim.results.lines import ResultRow
from fedsim.results.reading import StoredRun
from fedsim.targets.membership import FALSE_POSITIVES

_POINTS = 400
"""Largest number of points that are drawn of one release, evenly among its rows and columns."""

_PANELS = 12
"""Largest number of charts of one comparison's releases."""


@dataclass(frozen=True, kw_only=True)
class ChartGroup:
    """Charts below one heading."""

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
    """Returns the charts of one comparison, those that have something to show.

    Args:
        rows: of the comparison.
        runs: that the rows are from.
        verdicts: on each defense.
        colors: Defense -> number of its color.
        confidence: of the intervals.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    figures = [
        _leakage(rows, verdicts, colors, confidence),
        _recovered_rows(rows, runs, colors),
        _membership(accused(rows, runs, colors)),
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
            Series(
                label=str(number),
                color=colors[verdict.defense],
                points=[(100 * row.test_accuracy, gain.mean)],
                bars=[(wide, high)],
                hollow=row.blind,
            )
        )
    if not series:
        return None
    drawn = chart(
        series,
        across=Axis("test accuracy, % → better model", least=4.0),
        up=Axis("gain over guessing, dB → worse", least=2.0),
        description="Leakage against accuracy, a dot for each defense",
    )
    note = (
        "Each dot is a defense, by its number in the matrix: what its strongest attack gains over "
        "guessing, against the accuracy of the model. Right and low is better. A bar up or down is "
        f"the {confidence:.0%} interval of the mean gain, {population_of(rows)}. A bar across is "
        "the interval of the accuracy, of the test examples."
    )
    if any(one.hollow for one in series):
        note += " A ring is an attack that does no better than on another update."
    legend = [(f"{n} {v.defense}", colors[v.defense]) for n, v in enumerate(verdicts, start=1)]
    return ChartGroup(
        title="Leakage against accuracy", note=note, charts=[("", drawn)], legend=legend
    )


def _recovered_rows(
    lines: Sequence[LeaderboardRow], runs: Sequence[StoredRun], colors: Mapping[str, int]
) -> ChartGroup | None:
    """Returns recovered beside true entries, a chart for each line that recovers rows.

    It shows the median trial by PSNR: neither the luckiest nor the worst.
    """
    charts = []
    recovering = [line for line in lines if not line.main.pictured and line.metrics["row_error"]]
    for line in recovering[:_PANELS]:
        scored = sorted(
            (row.metrics["psnr"], path)
            for row, path in _files(line, runs)
            if row.metrics and row.metrics["psnr"] is not None
        )
        if not scored:
            continue
        tensors = read_tensors(scored[(len(scored) - 1) // 2][1])
        pairs = torch.stack([tensors["truth_rows"], tensors["rows"]])[:, :, tensors["scored"]]
        # Every k-th entry, k rounded up: a chart has at most `_POINTS` dots.
        truth, recovered = pairs.flatten(1)[:, :: max(1, -(-pairs[0].numel() // _POINTS))].tolist()
        label = f"{line.attack} on {line.defense}, B = {line.batch_size}"
        points = list(zip(truth, recovered, strict=True))
        drawn = chart(
            [Series(color=colors[line.defense], points=points)],
            across=Axis("true value", (-1.08, 1.08)),
            up=Axis("recovered value", (-1.08, 1.08)),
            description=f"Recovered against true values, {label}",
            diagonal=True,
        )
        charts.append((label, drawn))
    if not charts:
        return None
    return ChartGroup(
        title="Recovered rows",
        note="Each dot is an entry of a row: across what the client has, up what the attack made "
        "of it. On the dashed diagonal it is exact. A level band is what somebody answers who saw "
        "nothing. The constant feature is left out. The median trial is shown.",
        charts=charts,
        legend=[],
    )


def _membership(lines: Sequence[Series]) -> ChartGroup | None:
    if not lines:
        return None
    drawn = chart(
        [replace(line, label="") for line in lines],
        across=Axis("share of other rows that are accused", (0, 1)),
        up=Axis("share of members found → worse", (0, 1)),
        description="True against false positive rate, a line for each defense",
        diagonal=True,
    )
    return ChartGroup(
        title="Who took part",
        note="The strongest attack on membership accuses rows one after the other, over all "
        "trials. A line shows which share of the members it has found by then. Dashed is a coin. A "
        "ring is the most that ε and δ of that defense allow at 5% false accusations. The line of "
        "a few trials may exceed it by chance.",
        charts=[("", drawn)],
        legend=[(line.label, line.color) for line in lines],
    )


def _training(runs: Sequence[StoredRun], colors: Mapping[str, int]) -> ChartGroup | None:
    """Returns the curves of each defense, from the first run of its stack; a point is no curve."""
    curves: dict[str, dict[str, Series]] = {"test_accuracy": {}, "train_loss": {}}
    for run in runs:
        for name in dict.fromkeys(row.defense for row in run.rounds):
            for field, of_field in curves.items():
                if name in of_field or name not in colors:
                    continue
                rounds = [row for row in run.rounds if row.defense == name]
                values = [(row.round, getattr(row, field)) for row in rounds]
                points = [
                    (float(at), float(value))
                    for at, value in values
                    if value is not None and math.isfinite(value)
                ]
                of_field[name] = Series(color=colors[name], points=points, shape="line")
    if all(len(curve.points) < 2 for curve in curves["test_accuracy"].values()):
        return None
    captions = {"test_accuracy": "test accuracy", "train_loss": "training loss"}
    return ChartGroup(
        title="Training",
        note="Test accuracy and training loss by round, of the first run of each defense.",
        charts=[
            (
                captions[field],
                chart(
                    list(of_field.values()),
                    across=Axis("round", counts=True),
                    up=Axis(captions[field]),
                    description=f"{captions[field]} by round, a line for each defense",
                ),
            )
            for field, of_field in curves.items()
            if any(curve.points for curve in of_field.values())
        ],
        legend=sorted(
            ((name, colors[name]) for name in curves["test_accuracy"]), key=lambda entry: entry[1]
        ),
    )


def accused(
    lines: Sequence[LeaderboardRow], runs: Sequence[StoredRun], colors: Mapping[str, int]
) -> list[Series]:
    """Returns the rates at which the best attack on each defense accuses, over all trials.

    `colors` has the number of each defense's color.

    A ring is the largest rate that the claim of the defense allows.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    best: dict[str, LeaderboardRow] = {}
    telling = [line for line in lines if "membership_auc" in line.gains]
    for line in sorted(telling, key=lambda line: -line.gains["membership_auc"].mean):
        best.setdefault(line.defense, line)
    curves = []
    for line in best.values():
        parts = [read_tensors(path) for _, path in _files(line, runs)]
        parts = [part for part in parts if "membership" in part]
        if not parts:
            continue
        scores = torch.cat([part["membership"] for part in parts])
        members = torch.cat([part["members"] for part in parts])
        limit = line.limits.get("membership_tpr")
        curves.append(
            Series(
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


def _files(line: LeaderboardRow, runs: Sequence[StoredRun]) -> list[tuple[ResultRow, Path]]:
    """Returns the successful trials of a line with the paths of their reconstructions."""
    return [
        (row, path)
        for run in runs
        for row in run.rows
        if row.cell == line.cell and row.ok and (path := reconstruction_file(run.folder, row))
    ]
