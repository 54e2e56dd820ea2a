"""The leaderboard as a page: one HTML file to read offline, or served while runs go on."""

from fedsim.board.page import write_board
from fedsim.board.server import BoardServer, is_loopback, serve

__all__ = ["BoardServer", "is_loopback", "serve", "write_board"]
