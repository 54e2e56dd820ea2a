"""One small run folder, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_run import STACKS, write_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stacks = {name: STACKS[name] for name in ("none", "pruning", "dp")}
    return write_run(
        tmp_path_factory.mktemp("run"), stacks=stacks, trials=3, batch_sizes=(1, 3), rounds=3
    )
