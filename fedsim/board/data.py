"""Builds what the page shows from run folders: one JSON document, every figure in it measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedsim.board.compact import Texts, bound_text, exact, figure, interval, shortened
from fedsim.board.pictures import album
from fedsim.board.ranking import View, excess, levels_of, state_of, views, worst_attacks
from fedsim.board.settings import Settings
from fedsim.contracts.grant import Grant
from fedsim.report import facts
from fedsim.report.figures import format_accuracy, format_claim
from fedsim.report.glossary import terms
from fedsim.report.leaderboard import aggregate
from fedsim.report.level import Level
from fedsim.report.row import EXPOSED_GAIN, LeaderboardRow
from fedsim.report.threat import VANTAGES, unworded
from fedsim.results.reading import Run, load_runs, measurements
from fedsim.scoring import METRICS

METRIC_FIELDS = ("mean", "low", "high", "guess", "excess", "excess_low", "excess_high", "worst")
"""What the list of a row's metric holds, in this order; `excess` is what it leaks above the
guess."""


def board_data(folders: Iterable[Path | str]) -> dict[str, Any]:
    """Returns the document of the page over all runs below `folders`.

    Raises:
        ReportError: a folder holds no results, or a file in it is damaged.
    """
    runs = load_runs(folders)
    return document(aggregate(measurements(runs)), runs)


def document(rows: Sequence[LeaderboardRow], runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the document of rows that are already aggregated, and of their runs."""
    texts, settings, pictures = Texts(), Settings(rows, runs), album(rows, runs)
    shown = [name for name in METRICS if any(row.metrics[name] for row in rows)]
    by_view = views(rows)
    number = {view: i for i, view in enumerate(by_view)}
    of_row = {position: number[view] for view, members in by_view.items() for position in members}
    levels = {
        position: level
        for members in by_view.values()
        for position, level in zip(
            members, levels_of([rows[position] for position in members]), strict=True
        )
    }
    return {
        "metrics": [_metric(name) for name in shown],
        "metric_fields": METRIC_FIELDS,
        "exposed_gain": EXPOSED_GAIN,
        "settings": settings.entries(),
        "comparisons": settings.comparisons(),
        "views": [
            _view(view, members, rows, settings, texts, shown) for view, members in by_view.items()
        ],
        "rows": [
            _row(row, of_row[position], levels[position], texts, shown)
            | _pictures(pictures.of_row.get(position))
            for position, row in enumerate(rows)
        ],
        "pictures": list(pictures.addresses),
        "pictures_omitted": pictures.omitted,
        "notes": [shortened(line) for line in facts.unfinished(runs) + facts.unseen(runs)],
        "terms": [[term.name, term.meaning] for term in terms().values()],
        "texts": texts.all(),
    }


def _metric(name: str) -> dict[str, Any]:
    metric = METRICS[name]
    return {
        "name": name,
        "heading": metric.heading or name.replace("_", " "),
        "meaning": metric.meaning,
        "unit": metric.unit,
        "larger_leaks": metric.larger_leaks,
        "digits": metric.digits,
        "percent": metric.shown_as == "percent",
    }


def _view(
    view: View,
    members: Sequence[int],
    rows: Sequence[LeaderboardRow],
    settings: Settings,
    texts: Texts,
    shown: Sequence[str],
) -> dict[str, Any]:
    comparison, sight, batch_size, round = view
    own = [rows[position] for position in members]
    return {
        "setting": settings.number(own[0]),
        "comparison": settings.comparison(comparison),
        "threat": texts.number(own[0].threat.title),
        "granted": texts.number(_granted(own[0])),
        "vantage": sight,
        "sees": texts.number(VANTAGES.get(sight, sight)),
        "batch": batch_size,
        "round": round,
        "rows": list(members),
        "worst": {
            name: [
                [
                    members[worst.row],
                    worst.state,
                    worst.compared,
                    figure(worst.excess),
                    *interval(worst.gain)[1:],
                ]
                for worst in worst_attacks(own, name).values()
            ]
            for name in shown
            if any(row.metrics[name] for row in own)
        },
    }


def _granted(row: LeaderboardRow) -> str:
    """Words what is granted, as the report does."""
    values, meanings = Grant.values(), Grant.meanings(row.subject)
    words = [m.words[values[n].index(getattr(row.knowledge, n))] for n, m in meanings.items()]
    return "; ".join([*(word for word in words if word), *unworded(row.threat)])


def _row(
    row: LeaderboardRow, view: int, level: Level, texts: Texts, shown: Sequence[str]
) -> dict[str, int | float | str | list[Any] | dict[str, Any] | None]:
    accuracy = [row.test_accuracy]
    accuracy += [row.accuracy.low, row.accuracy.high] if row.accuracy else [None, None]
    failures = "; ".join(f"{count} × {reason}" for reason, count in row.failures.items())
    claim = format_claim(row.epsilon, row.delta, row.unit, row.relation)
    return {
        "view": view,
        "defense": texts.number(row.defense),
        "stack": texts.number(row.stack),
        "undefended": row.undefended,
        "attack": texts.number(row.attack),
        "n": row.n,
        "ok": row.n_ok,
        "independent": row.independent,
        "images": row.images,
        "metrics": {
            name: [
                *interval(row.metrics[name]),
                figure(row.baseline[name]),
                figure(excess(row, name)),
                *interval(row.above_guess(name))[1:],
                figure(row.worst[name]),
            ]
            for name in shown
            if row.metrics[name]
        },
        "state": {
            name: state
            for name in shown
            if row.metrics[name] and (state := state_of(row, name)) != "ranked"
        },
        "level": level,
        "exposed": row.exposed,
        "accuracy": [figure(value) for value in accuracy],
        "accuracy_text": texts.number(format_accuracy(row.test_accuracy, row.accuracy)),
        "epsilon": exact(row.epsilon),
        "claim": texts.number(claim),
        "audited": row.audited_epsilon,
        "audited_text": texts.number(bound_text(row.audited_epsilon)),
        "seconds": figure(row.seconds),
        "certified": _certified(row),
        "warning": texts.number(" | ".join(row.warnings)),
        "failures": texts.number(failures),
    }


def _certified(row: LeaderboardRow) -> list[int | None] | None:
    """Returns how many images are certified, of how many, and how many certificates are false."""
    stated = row.certificates
    if stated is None or stated.certified is None:
        return None
    return [stated.certified, stated.images, stated.false]


def _pictures(chosen: dict[str, Any] | None) -> dict[str, Any]:
    return {} if chosen is None else {"pictures": chosen}
