"""The leaderboard as a page: one HTML file to read offline, or served while runs go on."""

from fedsim.board.page import write_board
from fedsim.board.serve import BoardServer, serve

__all__ = ["BoardServer", "serve", "write_board"]
