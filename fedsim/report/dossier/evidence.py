"""Everything that the chapters of a dossier are worded from, read and aggregated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedsim.report import facts
from fedsim.report.answers import Answer, answers, runs_of
from fedsim.report.control import Control, describe_comparison, positive_controls
from fedsim.report.dossier.repetition import Numbered, numbered
from fedsim.report.leaderboard import aggregate
from fedsim.report.page import confidence_of
from fedsim.report.row import LeaderboardRow
from fedsim.results.lines import ResultRow
from fedsim.results.reading import Run, measurements


@dataclass(frozen=True)
class Evidence:
    """Holds the runs of one dossier, and what follows from their rows."""

    runs: Sequence[Run]
    root: Path
    """The folder that the runs were read below."""

    @cached_property
    def results(self) -> list[ResultRow]:
        """Scored attacks, one a trial."""
        return measurements(self.runs)

    @cached_property
    def confidence(self) -> float:
        """Of intervals."""
        return confidence_of(self.runs)

    @cached_property
    def lines(self) -> list[LeaderboardRow]:
        """The leaderboard."""
        return aggregate(self.results, confidence=self.confidence)

    @cached_property
    def controls(self) -> list[Control]:
        """One for each comparison."""
        return positive_controls(self.lines)

    @property
    def valid(self) -> list[Control]:
        """Of the comparisons from which something follows."""
        return [control for control in self.controls if control.status == "passed"]

    @cached_property
    def commands(self) -> list[Numbered]:
        """The commands that repeat one attack on one defense each."""
        return numbered(self.lines, self.runs, self.root)

    @property
    def ended(self) -> bool:
        """Whether all runs have come to their end."""
        return all(run.ended for run in self.runs)

    @property
    def summary(self) -> str:
        """Words in one sentence what was run."""
        return self.local(facts.sentence(self.runs, self.results))

    def local(self, text: str) -> str:
        """Returns `text` with runs named by their folders' names, wherever they lie."""
        for run in self.runs:
            text = text.replace(str(run.folder), run.folder.name)
        return text

    def of(self, control: Control) -> list[LeaderboardRow]:
        """Returns the lines of the comparison that `control` judges."""
        return [line for line in self.lines if line.comparison == control.comparison]

    def title(self, control: Control) -> str:
        """Names the comparison that `control` judges, beside the others here."""
        return describe_comparison(control.comparison, [each.comparison for each in self.controls])

    def answers(self, control: Control) -> list[Answer]:
        """Returns the answer for each defense of a comparison."""
        rows = self.of(control)
        return answers(rows, control, runs_of(rows, self.runs))
