"""A browser and a page, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from board_runs import write_runs
from browser import Browser
from browser import browser as opened_browser

from fedsim.board import write_board


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from opened_browser(tmp_path_factory.mktemp("downloads"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the page over all runs."""
    return write_board([runs], tmp_path_factory.mktemp("page") / "board.html").as_uri()
