"""What a run leaves for people: the leaderboard as table and page, pictures, and the dossier."""

from fedsim.report.facts import (
    attacks_nothing,
    awaited,
    describe,
    standing_still,
    undeclared,
    unfinished,
    unseen,
    utility,
)
from fedsim.report.judge import positive_controls
from fedsim.report.leaderboard import aggregate, leaderboard_rows
from fedsim.report.messages import invalid_reasons
from fedsim.report.page import write_page, write_report
from fedsim.report.pictures import save_grid, save_grids, save_overview
from fedsim.report.render import render
from fedsim.report.row import LeaderboardRow
from fedsim.results.reading import ReportError, load_runs
from fedsim.words import describe_variant

__all__ = [
    "LeaderboardRow",
    "ReportError",
    "aggregate",
    "attacks_nothing",
    "awaited",
    "describe",
    "describe_variant",
    "invalid_reasons",
    "leaderboard_rows",
    "load_runs",
    "positive_controls",
    "render",
    "save_grid",
    "save_grids",
    "save_overview",
    "standing_still",
    "undeclared",
    "unfinished",
    "unseen",
    "utility",
    "write_page",
    "write_report",
]
