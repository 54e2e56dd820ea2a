"""Words what one attack on one defense measured, metric by metric: page, dossier and terminal."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.report.figures import format_metric, format_number, format_percent, format_signed
from fedsim.report.row import LeaderboardRow
from fedsim.scoring import METRICS, Metric, Summary

ABSENT = "–"
"""Stands where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Holds the figures of one metric of a row, as text; a dash where nothing was measured.

    `guess` is the mean of the guess, and `worst` the value of the trial or image that leaked most.
    """

    metric: Metric
    value: str
    """Mean over trials, with its interval where the metric shows one."""
    guess: str
    above: str
    """Gain over the guess, with its sign and interval; positive where more leaks."""
    above_other: str
    """Gain over the same attack's answer to another update; a dash without that control."""
    worst: str
    limit: str
    """The most that the privacy claim allows."""

    @property
    def heading(self) -> str:
        """Name of the metric as a column has it, without its unit."""
        return heading_of(self.metric)

    @property
    def words(self) -> str:
        """Text of the metric's name and value."""
        return f"{self.heading} {self.value}"


def heading_of(metric: Metric) -> str:
    """Returns the name of a metric for people, without its unit."""
    return (metric.heading or metric.name.replace("_", " ")).removesuffix(" dB")


def metrics_of(row: LeaderboardRow) -> list[Measured]:
    """Returns the figures of all metrics that `row` has; the one that ranks the row comes first."""
    names = [name for name, summary in row.metrics.items() if summary]
    names.sort(key=lambda name: name != row.ranked_by)
    return [measure_row(row, name) for name in names]


def measure_row(row: LeaderboardRow, name: str) -> Measured:
    """Returns the figures of metric `name` of `row`.

    Where every trial failed, only the guess has a figure, and the rest are dashes. Where the guess
    has no value, the metric's value of an uninformed answer stands for it.
    """
    metric, over = METRICS[name], row.above_other(name)
    guess = row.baseline.get(name)
    guess = metric.uninformed if guess is None else guess
    figures = {
        "value": format_metric(row.metrics.get(name), metric),
        "above": _above(row, metric),
        "above_other": _format_gain(over, metric),
        "worst": _plain(row.worst.get(name), metric),
        "limit": _plain(row.limit(name), metric),
    }
    shown = figures if row.n_ok else dict.fromkeys(figures, ABSENT)
    return Measured(metric=metric, guess=_plain(guess, metric), **shown)


def excess(row: LeaderboardRow, name: str) -> float | None:
    """Returns the mean gain of metric `name` over the guess; None without a value or a guess.

    Where the guess has no value, the metric's value of an uninformed answer stands for it.

    It is positive where the attack's answer is better than the guess, also for errors.
    """
    if paired := row.above_guess(name):
        return paired.mean
    metric, value, guess = METRICS[name], row.metrics.get(name), row.baseline.get(name)
    guess = metric.uninformed if guess is None else guess
    return None if value is None or guess is None else metric.gain(value.mean, guess)


def _above(row: LeaderboardRow, metric: Metric) -> str:
    if paired := row.above_guess(metric.name):
        return _format_gain(paired, metric)
    mean = excess(row, metric.name)
    return ABSENT if mean is None else _with_sign(mean, metric)


def _format_gain(summary: Summary | None, metric: Metric) -> str:
    if summary is None:
        return ABSENT
    text = _with_sign(summary.mean, metric)
    if summary.low is None or summary.high is None:
        return text
    return f"{text} [{_with_sign(summary.low, metric)}, {_with_sign(summary.high, metric)}]"


def _with_sign(value: float, metric: Metric) -> str:
    if metric.shown_as == "percent":
        return f"{format_signed(100 * value, 0)}%"
    return format_signed(value, metric.digits)


def _plain(value: float | None, metric: Metric) -> str:
    if metric.shown_as == "percent":
        return format_percent(value)
    return format_number(value, metric.digits)
