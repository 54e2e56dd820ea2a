"""What a reader chooses first: a setting, which is a scenario's variant on its data and model.

A setting holds comparisons, one for each kind of server and each watcher, and its claims of ε.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.board.compact import SENTENCE, bound_text, exact, shortened
from fedsim.report.answers import answers, runs_of
from fedsim.report.control import describe_comparison, positive_controls, warnings
from fedsim.report.facts import awaited
from fedsim.report.figures import describe_variant, format_claim
from fedsim.report.row import Comparison, LeaderboardRow
from fedsim.report.utility import UtilityRow, utility
from fedsim.results.reading import Run

Setting = tuple[str, str, str, str]
"""(scenario, variant, data source, model)."""

_SEED = "seed"


class Settings:
    """All settings of the rows and of the runs that attack nothing, or are not scored."""

    def __init__(self, rows: Sequence[LeaderboardRow], runs: Sequence[Run]) -> None:
        """Reads them off; each row and each run belongs to one.

        Args:
            rows: of the leaderboard.
            runs: that the rows are from, and those that gave none.
        """
        self._members: dict[Comparison, list[LeaderboardRow]] = {}
        self._rows: dict[Setting, list[LeaderboardRow]] = {}
        for row in rows:
            self._members.setdefault(row.comparison, []).append(row)
            self._rows.setdefault(_of_row(row), []).append(row)
        self._unattacked: dict[Setting, list[Run]] = {}
        for run in runs:
            if not run.rows:
                self._unattacked.setdefault(_of_run(run), []).append(run)
        self._runs = runs
        self._by_folder = {str(run.folder): run for run in runs}
        self._controls = {c.comparison: c for c in positive_controls(rows)}
        self._comparisons = {key: i for i, key in enumerate(self._controls)}
        self._numbers = {key: i for i, key in enumerate({**self._rows, **self._unattacked})}

    def number(self, row: LeaderboardRow) -> int:
        """Returns the number of the setting of `row`."""
        return self._numbers[_of_row(row)]

    def comparison(self, key: Comparison) -> int:
        """Returns the number of a comparison."""
        return self._comparisons[key]

    def entries(self) -> list[dict[str, Any]]:
        """Returns a description of each setting, by their numbers."""
        return [self._entry(key) for key in self._numbers]

    def comparisons(self) -> list[dict[str, Any]]:
        """Returns whether each comparison is valid, and the answer for each of its defenses."""
        return [self._described(key) for key in self._comparisons]

    def _entry(self, key: Setting) -> dict[str, Any]:
        scenario, variant, dataset, model = key
        rows = self._rows.get(key, [])
        runs = self._runs_of(rows) + self._unattacked.get(key, [])
        name = f"{scenario} ({variant})" if variant else scenario
        waiting = awaited(runs)
        return {
            "title": shortened(", ".join(filter(None, (name, dataset, model)))),
            "folders": [shortened(str(run.folder)) for run in runs],
            "attacked": any(
                run.rows or run.unscored or (run.plan and run.plan.attack_runs) for run in runs
            ),
            "mark": waiting.mark if waiting else "",
            "claims": _claims(rows, runs),
        }

    def _described(self, key: Comparison) -> dict[str, Any]:
        control = self._controls[key]
        rows = self._members[key]
        return {
            "title": shortened(describe_comparison(key)),
            "valid": control.status == "passed",
            "mark": control.mark,
            "control": shortened(control.reason, SENTENCE),
            "warnings": [shortened(line, SENTENCE) for line in warnings(rows)],
            "answers": {
                shortened(answer.defense): {
                    "brief": shortened(answer.brief, SENTENCE),
                    "grounds": [
                        [name, shortened(words, SENTENCE)] for name, words in answer.grounds
                    ],
                    "verdict": answer.verdict,
                }
                for answer in answers(rows, control, runs_of(rows, self._runs))
            },
        }

    def _runs_of(self, rows: Sequence[LeaderboardRow]) -> list[Run]:
        folders = dict.fromkeys(path for row in rows for path in row.folders)
        return [self._by_folder[path] for path in folders]


def _claims(rows: Sequence[LeaderboardRow], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns what each defense of one setting claims, and the most that an audit found."""
    claims = {row.defense: _claim(row) for row in utility(runs)}
    weakest: dict[str, LeaderboardRow] = {}
    for row in rows:
        # Rows state δ, unit and neighbours also where the lines of rounds do not.
        audited = (claims.get(row.defense) or {}).get("audited")
        found = [value for value in (audited, row.audited_epsilon) if value is not None]
        stated = weakest.get(row.defense, row)
        weakest[row.defense] = max(
            stated, row, key=lambda r: -1 if r.epsilon is None else r.epsilon
        )
        claims[row.defense] = _claim(weakest[row.defense]) | {"audited": max(found, default=None)}
    return [claim | {"audited_text": bound_text(claim["audited"])} for claim in claims.values()]


def _claim(row: UtilityRow | LeaderboardRow) -> dict[str, Any]:
    return {
        "defense": shortened(row.defense),
        "epsilon": exact(row.epsilon),
        "claim": format_claim(row.epsilon, row.delta, row.unit, row.relation),
        "audited": row.audited_epsilon,
    }


def _of_row(row: LeaderboardRow) -> Setting:
    return (row.scenario, row.variant, row.dataset, row.model)


def _of_run(run: Run) -> Setting:
    """Returns the setting of a run without rows, as its scenario says it."""
    assignment = {k: v for k, v in run.variant.items() if k != _SEED}
    planned = run.plan.scenario if run.plan else None
    name = run.setting("name") or planned or run.folder.name
    source, model = run.setting("data", "source", "name"), run.setting("model", "name")
    return (str(name), describe_variant(assignment), str(source or ""), str(model or ""))
