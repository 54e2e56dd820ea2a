"""Lays the leaderboard out as the report's table: one column a figure, with its term."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedsim.report.figures import (
    format_claim,
    format_metric,
    format_number,
    format_percent,
    format_signed,
)
from fedsim.report.row import LeaderboardRow
from fedsim.scoring import METRICS, Metric, Summary

Cell = tuple[str, str]
"""(figure, what stands small beside it); a dash where nothing was measured."""

_NONE: Cell = ("–", "")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the table."""

    heading: str
    term: str
    """Key of the glossary's term that explains it; empty if it needs none."""
    cells: list[Cell]
    """One for each row."""
    left: bool = False
    """Whether it is set to the left: words, no figures."""


def columns(rows: Sequence[LeaderboardRow], seconds: Mapping[str, float]) -> list[Column]:
    """Returns the columns that have a figure in some of `rows`, which are of one comparison.

    Args:
        rows: of the table.
        seconds: of a round, by defense.
    """
    of_rows = rows[0].subject == "rows"
    several_rounds = len({row.round for row in rows}) > 1
    table: list[tuple[str, str, Callable[[LeaderboardRow], Cell]]] = [
        ("Rows" if of_rows else "Batch", "batch", lambda row: (str(row.batch_size), "")),
        ("Round", "", lambda row: (str(row.round), "") if several_rounds else _NONE),
        ("Trials ok", "n", lambda row: (f"{row.n_ok}/{row.n}", "")),
        ("Gain, dB", "gain", _recovered(lambda row: _signed(row.gain))),
        ("Accuracy", "accuracy", _accuracy),
        ("Chance", "chance", lambda row: (format_percent(_chance(row)), "")),
        ("ε (δ, unit, neighbours)", "epsilon", _claim),
        ("s a round", "", lambda row: (format_number(seconds.get(row.defense), 2), "")),
        ("PSNR, dB", "psnr", _recovered(lambda row: _summary(row.metrics["psnr"]))),
        ("3 dB or more", "recognizable", _recovered(lambda row: (str(row.leaking or "–"), ""))),
        ("Median", "psnr", _recovered(lambda row: _median(row.metrics["psnr"]))),
        ("Worst", "psnr", _recovered(lambda row: (format_number(row.worst["psnr"], 1), ""))),
        ("Guess", "guess", lambda row: (format_number(row.baseline["psnr"], 1), "")),
        ("Other", "other", _recovered(_other)),
    ]
    for metric in METRICS.values():
        if metric.heading and metric.name != "psnr":
            heading = metric.heading[0].upper() + metric.heading[1:]
            table.append((heading, metric.term.key, _recovered(_metric(metric))))
            table.append((f"{heading} at most", "epsilon", _limit(metric)))
    table += [
        ("Certified", "certified", _certified),
        ("Different rows" if of_rows else "Images", "", lambda row: _count(row.images)),
        ("s a trial", "", lambda row: (format_number(row.seconds, 1), "")),
    ]
    filled = [
        Column(heading=heading, term=term, cells=[cell(row) for row in rows])
        for heading, term, cell in table
    ]
    names = [(row.defense, "") for row in rows]
    attacks = [(row.attack, _case(row)) for row in rows]
    return [
        Column(heading="Defense", term="", cells=names, left=True),
        Column(heading="Attack", term="", cells=attacks, left=True),
        *(column for column in filled if any(figure != "–" for figure, _ in column.cells)),
    ]


def _recovered(cell: Callable[[LeaderboardRow], Cell]) -> Callable[[LeaderboardRow], Cell]:
    """Returns `cell` with a dash where every trial failed: what it then has is the guess's."""
    return lambda row: cell(row) if row.n_ok else _NONE


def _count(images: int | None) -> Cell:
    return _NONE if images is None else (str(images), "")


def _certified(row: LeaderboardRow) -> Cell:
    stated = row.certificates
    if stated is None or stated.certified is None:
        return _NONE
    beside = "" if stated.determined is None else f"{stated.determined} determined"
    if stated.false:
        beside = f"{stated.false} false!"
    return f"{stated.certified}/{stated.images}", beside


def _signed(summary: Summary | None) -> Cell:
    return _NONE if summary is None else (format_signed(summary.mean), _interval(summary))


def _summary(summary: Summary | None) -> Cell:
    return _NONE if summary is None else (format_number(summary.mean, 1), _interval(summary))


def _median(summary: Summary | None) -> Cell:
    return _NONE if summary is None else (format_number(summary.median, 1), "")


def _interval(summary: Summary) -> str:
    if summary.low is None or summary.high is None:
        return ""
    return f"{format_number(summary.low, 1)} to {format_number(summary.high, 1)}"


def _other(row: LeaderboardRow) -> Cell:
    if row.no_control:
        return row.no_control, ""
    return format_number(row.other_update.mean if row.other_update else None, 1), ""


def _metric(metric: Metric) -> Callable[[LeaderboardRow], Cell]:
    def cell(row: LeaderboardRow) -> Cell:
        summary, guess = row.metrics[metric.name], row.baseline[metric.name]
        guess = metric.uninformed if guess is None else guess
        if summary is None or guess is None:
            return format_metric(summary, metric), ""
        as_text = (
            format_percent(guess)
            if metric.shown_as == "percent"
            else format_number(guess, metric.digits)
        )
        return format_metric(summary, metric), f"guess {as_text}"

    return cell


def _limit(metric: Metric) -> Callable[[LeaderboardRow], Cell]:
    return lambda row: (format_number(row.limit(metric.name), 2), "")


def _chance(row: LeaderboardRow) -> float | None:
    return row.accuracy.chance if row.accuracy else None


def _accuracy(row: LeaderboardRow) -> Cell:
    accuracy = row.accuracy
    if accuracy is None:
        return format_percent(row.test_accuracy), ""
    mark = "!" if accuracy.is_chance else ""
    ends = f"{100 * accuracy.low:.0f} to {accuracy.high:.0%}"
    return f"{format_percent(row.test_accuracy)}{mark}", ends


def _claim(row: LeaderboardRow) -> Cell:
    return format_claim(row.epsilon, row.delta, row.unit, row.relation), ""


def _case(row: LeaderboardRow) -> str:
    """Words what sets the row's attacker apart from an honest server without any grant."""
    words = [
        "" if row.server == "honest" else row.server,
        "labels given" if row.knowledge.labels == "known" else "",
        "" if row.knowledge.bn == "none" else f"bn {row.knowledge.bn}",
        row.sight,
    ]
    return " ".join(word for word in words if word)
