"""What a run leaves for people: the leaderboard as table and page, pictures, and the dossier."""

from fedsim.report.facts import attacks_nothing as attacks_nothing
from fedsim.report.facts import describe as describe
from fedsim.report.facts import unfinished as unfinished
from fedsim.report.facts import utility as utility
from fedsim.report.judge import positive_controls as positive_controls
from fedsim.report.leaderboard import leaderboard_rows as leaderboard_rows
from fedsim.report.messages import invalid_reasons as invalid_reasons
from fedsim.report.page import write_page as write_page
from fedsim.report.page import write_report as write_report
from fedsim.report.pictures import save_grid as save_grid
from fedsim.report.pictures import save_grids as save_grids
from fedsim.report.pictures import save_overview as save_overview
from fedsim.report.render import render as render
from fedsim.report.row import LeaderboardRow as LeaderboardRow
from fedsim.results.reading import ReportError as ReportError
from fedsim.results.reading import load_runs as load_runs
from fedsim.words import describe_variant as describe_variant
