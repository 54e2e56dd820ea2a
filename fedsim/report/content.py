"""Gathers what runs show: one object, from which report, server and dossier are set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fedsim.report import facts
from fedsim.report.charts import ChartGroup, draw_charts
from fedsim.report.facts import UtilityRow, attacks_nothing, utility
from fedsim.report.glossary import terms_of
from fedsim.report.judge import Failure, Judgement, Verdict, failures_of, judgements, level_of
from fedsim.report.leaderboard import aggregate
from fedsim.report.messages import invalid_reasons, warnings
from fedsim.report.pictures import Plate, plates_of
from fedsim.report.row import (
    ABSENT,
    LeaderboardRow,
    Measured,
    by_comparison,
    measure_row,
    metrics_of,
    population_of,
)
from fedsim.report.threat import describe_comparison, threat_model
from fedsim.results.lines import ResultRow
from fedsim.results.reading import StoredRun, measurements
from fedsim.scoring import Summary, Term

_QUESTION = "What do the clients’ updates show of their data, and which defense is worth its price?"

_DETAILED = 1000
"""Largest number of attacks on a defense that open their details: a page has to stay quick."""

_NAMED = 3

_Tint = Literal["", "bad", "some", "good"]
"""Class of what is colored: a leak, a part of one or a doubt, and what may be relied on."""

_TINTS: Mapping[str, _Tint] = {
    "leak": "bad",
    "features": "bad",
    "partial": "some",
    "undecided": "some",
}
"""Level of a leak -> class of its cell. Where nothing is certain it has no color."""


@dataclass(frozen=True, kw_only=True)
class _MatrixColumn:
    """An attack at one batch size and round: a column of the matrix."""

    attack: str
    batch_size: int
    round: int
    case: str  # batch size and round in words, each where columns differ in it; else empty


@dataclass(frozen=True, kw_only=True)
class _MatrixCell:
    """One attack on one defense: a cell of the matrix, and a row of the table."""

    id: str
    row: LeaderboardRow
    tint: _Tint
    plate: Plate | None  # none without pictures, or without room for them
    detailed: bool  # whether the page has room for its details

    @cached_property
    def best(self) -> Measured:
        return measure_row(self.row, self.row.ranked_by)

    @property
    def state(self) -> str:
        """Why the attack is not ranked, in words; empty if it is."""
        if not self.row.n_ok:
            return "every trial failed"
        return "no better than on another update" if self.row.is_uninformed else ""

    @property
    def setting(self) -> str:
        """What of the attacker is not usual: a malicious server, a grant, a vantage; or empty."""
        row = self.row
        words = [row.server if row.threat.malicious else "", *row.threat.beyond, row.sight]
        return ", ".join(word for word in words if word)

    @property
    def gain(self) -> str:
        """Text of what leaks beyond the guess, or of the value without a guess; with its unit."""
        above = self.best.above if self.best.above != ABSENT else self.best.value
        return above.partition(" ")[0] + (" dB" if self.best.metric.unit == "dB" else "")

    @property
    def interval(self) -> str:
        return self.best.above.partition(" ")[2]

    @property
    def metrics(self) -> list[Measured]:
        return metrics_of(self.row)

    @property
    def trials(self) -> str:
        apart = f" ({self.row.independent} independent)" * (self.row.independent != self.row.n)
        return f"{self.row.n_ok}/{self.row.n}{apart}"


@dataclass(frozen=True, kw_only=True)
class _DefenseLine:
    """A defense of a comparison, of a `number` from 1: its verdict, and each column's attacks."""

    number: int
    verdict: Verdict
    cells: list[list[_MatrixCell]]
    """Cells of each of `ComparisonSection.columns`, in order; empty where nothing was run."""
    color: int

    @property
    def tint(self) -> _Tint:
        tints: dict[str, _Tint] = {"rely": "good", "do not rely": "bad"}
        return tints.get(self.verdict.reliance, "some")

    @property
    def gain(self) -> Summary | None:
        """Gain of the strongest attack over guessing; None if the verdict is no answer."""
        return self.verdict.gain if self.verdict.finding != "no answer" else None


@dataclass(frozen=True, kw_only=True)
class _ComparisonSection:
    """Holds one comparison: what may be ranked together."""

    id: str
    title: str
    folders: list[str]
    """Names of the folders of a variant's runs; empty for a run that is no variant."""
    judged: Judgement
    lines: list[_MatrixCell]
    columns: list[_MatrixColumn]
    shared: str  # batch size and round in words, each where all columns share it; else empty
    defenses: list[_DefenseLine]
    threats: list[tuple[str, str]]  # (verb, words) of `fedsim.report.threat.threat_model`
    warnings: list[str]
    figures: list[ChartGroup]
    population: str  # what the intervals are of, in words


@dataclass(frozen=True, kw_only=True)
class _ScenarioSummary:
    """Holds the runs of one scenario: what was run, what it cost, how to repeat it."""

    name: str
    runs: list[StoredRun]
    summary: str
    utility: list[UtilityRow]
    again: facts.Again


class Content:
    """Holds all that pages show of runs, each part worked out when it is first asked for."""

    def __init__(self, runs: Sequence[StoredRun]) -> None:
        """Shows `runs`, which are not read again."""
        self.runs = runs

    @cached_property
    def results(self) -> list[ResultRow]:
        """Rows of attacks that were scored or failed, each measurement once (`measurements`)."""
        return measurements(self.runs)

    @cached_property
    def confidence(self) -> float:
        """Confidence of intervals, from 0 to 1; 0.95 where the scenarios state none or differ."""
        stated = {run.setting("scoring", "confidence") for run in self.runs} - {None}
        value = stated.pop() if len(stated) == 1 else None
        return value if isinstance(value, float) and 0 < value < 1 else 0.95

    @cached_property
    def rows(self) -> list[LeaderboardRow]:
        """Rows of the leaderboard, in its order."""
        return aggregate(self.results, confidence=self.confidence)

    @cached_property
    def judgements(self) -> list[Judgement]:
        """Judgement of each comparison, in the order of `rows`."""
        return judgements(self.rows, self.runs)

    @cached_property
    def awaited(self) -> facts.Awaited | None:
        """Reason why no attack is scored yet; None if some are, or none ever will be."""
        return facts.awaited(self.runs)

    @property
    def unattacked(self) -> bool:
        """Whether there are no results, since no scenario declares an attack."""
        return not self.results and attacks_nothing(self.runs)

    @cached_property
    def late(self) -> list[tuple[str, str]]:
        """(`UNFINISHED` or `UNSCORED`, words) of each such run; one of all if nothing is scored."""
        if self.awaited:
            return [(self.awaited.mark, self.awaited.reason)]
        pairs = [line.partition(": ") for line in facts.unfinished(self.runs)]
        return [(mark, words) for mark, _, words in pairs]

    @cached_property
    def invalid(self) -> list[str]:
        """Reasons why comparisons that have ended prove nothing; empty where none is judged yet."""
        if self.unattacked or self.awaited or (self.late and not self.rows):
            return []
        return invalid_reasons(self.rows, unended=False)

    @property
    def invalid_mark(self) -> str:
        """`INVALID` or `INVALID in part`, where comparisons prove nothing; else empty."""
        if not self.invalid:
            return ""
        return "INVALID in part" if len(self.invalid) < len(self.judgements) else "INVALID"

    @property
    def mark(self) -> str:
        """Word before the title: `UNFINISHED`, `UNSCORED` or `invalid_mark`; empty if none fits."""
        return self.late[0][0] if self.late else self.invalid_mark

    @property
    def names(self) -> list[str]:
        """Names of the scenarios, each once, in the order of the results."""
        stated = [row.scenario for row in self.results]
        stated = stated or [run.setting("name") for run in self.runs]
        return list(dict.fromkeys(name for name in stated if name))

    @property
    def title(self) -> str:
        """Title of the page: the names of the first scenarios, and how many more there are."""
        first, others = self.names[:_NAMED], self.names[_NAMED:]
        return (", ".join(first) or "no results") + (f" and {len(others)} more" if others else "")

    @property
    def question(self) -> str:
        """Question that the runs answer: the only scenario's description, or a general one."""
        own = [text for run in self.runs if (text := run.setting("description"))]
        return own[0] if own and len(self.names) < 2 else _QUESTION

    @cached_property
    def terms(self) -> list[Term]:
        """Terms of the glossary that the page uses."""
        unscored = any(mark == "UNSCORED" for mark, _ in self.late)
        return terms_of(self.rows, invalid=bool(self.invalid), unscored=unscored)

    @property
    def notes(self) -> list[str]:
        """Lines on what went wrong in the runs' rounds, then notes of the runs."""
        return [*facts.client_failures(self.runs), *facts.notes(self.runs)]

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Failures of attacks, one for each attack and reason."""
        return failures_of(self.rows)

    @cached_property
    def _album(self) -> tuple[dict[str, Plate], int]:
        return plates_of(self.rows, self.runs)

    @property
    def plates(self) -> dict[str, Plate]:
        """`LeaderboardRow.cell` -> pictures of the row; rows without pictures are missing."""
        return self._album[0]

    @property
    def without_pictures(self) -> int:
        """Number of rows whose pictures the page has no room for."""
        return self._album[1]

    @cached_property
    def scenarios(self) -> list[_ScenarioSummary]:
        """Each scenario's `name`, `runs`, `summary` (a sentence), `utility` (rows) and `again`."""
        by_name: dict[str, list[StoredRun]] = {}
        for run in self.runs:
            by_name.setdefault(run.name, []).append(run)
        return [
            _ScenarioSummary(
                name=name,
                runs=runs,
                summary=facts.summarize_runs(runs),
                utility=utility(runs),
                again=facts.again(runs),
            )
            for name, runs in by_name.items()
        ]

    @cached_property
    def sections(self) -> list[_ComparisonSection]:
        """What the page shows of each comparison, in the order of the leaderboard.

        Among its fields are `title`, `judged` (the judgement), `lines` (one for each row),
        `warnings` and `figures` (charts). A FedsimError says that scores cannot be read.
        """
        order = sorted(range(len(self.rows)), key=lambda at: not self.rows[at].strongest)
        detailed = {self.rows[at].cell for at in order[:_DETAILED]}
        ids = {row.cell: f"r{number}" for number, row in enumerate(self.rows, start=1)}
        return [
            self._section(f"c{number}", judged, ids, detailed)
            for number, judged in enumerate(self.judgements, start=1)
        ]

    def _section(
        self, id: str, judged: Judgement, ids: Mapping[str, str], detailed: set[str]
    ) -> _ComparisonSection:
        control, rows = judged.control, by_comparison(self.rows)[judged.comparison]
        runs = facts.runs_of(rows, self.runs)
        colors = _colors(rows)
        varying = [name for name in _PLACES if len({getattr(row, name) for row in rows}) > 1]
        attacks = list(dict.fromkeys(row.attack for row in rows))
        columns = sorted(
            {_column(row, varying) for row in rows},
            key=lambda column: (column.batch_size, -column.round, attacks.index(column.attack)),
        )
        lines = [
            _MatrixCell(
                id=ids[row.cell],
                row=row,
                tint="" if control.mark else _tint(row, rows),
                plate=self.plates.get(row.cell),
                detailed=row.cell in detailed,
            )
            for row in rows
        ]
        cells: dict[tuple[str, _MatrixColumn], list[_MatrixCell]] = {}
        for line in lines:
            cells.setdefault((line.row.defense, _column(line.row, varying)), []).append(line)
        defenses = [
            _DefenseLine(
                number=number,
                verdict=verdict,
                cells=[cells.get((verdict.defense, column), []) for column in columns],
                color=colors[verdict.defense],
            )
            for number, verdict in enumerate(judged.verdicts, start=1)
        ]
        seen = {row.cell for row in rows}
        results = [row for row in self.results if row.cell in seen]
        return _ComparisonSection(
            id=id,
            title=describe_comparison(judged.comparison, by_comparison(self.rows)),
            folders=[run.folder.name for run in runs] if rows[0].variant else [],
            judged=judged,
            lines=lines,
            columns=columns,
            shared=", ".join(
                f"{words} {getattr(rows[0], name)}"
                for name, words in _PLACES.items()
                if name not in varying
            ),
            defenses=defenses,
            threats=threat_model(results),
            warnings=warnings(rows),
            figures=draw_charts(rows, runs, judged.verdicts, colors, self.confidence),
            population=population_of(rows),
        )


_PLACES = {"batch_size": "batch size", "round": "round"}


def _column(row: LeaderboardRow, varying: Sequence[str]) -> _MatrixColumn:
    words = [f"{words} {getattr(row, name)}" for name, words in _PLACES.items() if name in varying]
    return _MatrixColumn(
        attack=row.attack, batch_size=row.batch_size, round=row.round, case=", ".join(words)
    )


def _tint(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> _Tint:
    """Returns how badly a row leaks, among those on the same defense at the same place."""
    own = (row.defense, row.batch_size, row.round, row.sight)
    rivals = [r for r in rows if (r.defense, r.batch_size, r.round, r.sight) == own]
    return _TINTS.get(level_of(row, rivals), "")


def _colors(rows: Sequence[LeaderboardRow]) -> dict[str, int]:
    """Numbers the colors of defenses: 0 is the undefended stack, the others follow in order."""
    undefended = {row.defense for row in rows if row.undefended}
    others = [name for name in dict.fromkeys(row.defense for row in rows) if name not in undefended]
    return dict.fromkeys(undefended, 0) | {name: i for i, name in enumerate(others, start=1)}
