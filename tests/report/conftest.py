"""Small run folders, each made once: one as if it had run, and one that has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import one_process
import pytest
from answer_rows import WORKS
from synthetic_run import QUICK, write_run
from typer.testing import CliRunner

from fedsim.cli.commands import app

SMALL = """
name: small
seed: 3
data: {source: faces, clients: 2}
model: lenet
training: {rounds: 1, local: {steps: 1, batch_size: 4, lr: 0.1}}
defenses:
  none: []
  noise: [{name: clip, norm: 1.0}, {name: gaussian_noise, multiplier: 1.0}]
attacks:
  - label_inference
  - {name: idlg, label: deep-1, iterations: 1}
observe: {rounds: [1], clients: [0], batch_sizes: [1], trials: 2}
"""


@pytest.fixture(autouse=True)
def _shared_rows_stay_as_they_are() -> Iterator[None]:
    """Fails the test that changes rows which other tests share."""
    before = copy.deepcopy(WORKS)
    yield
    assert before == WORKS


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case: dict[str, Any] = {"trials": 3, "batch_sizes": (1, 3), "rounds": 3}
    return write_run(tmp_path_factory.mktemp("run"), stacks=("none", "pruning", "dp"), **case)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, of seconds."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "small.yaml").write_text(SMALL)
    words = ["run", f"{folder}/small.yaml", "--out", f"{folder}/small", *QUICK]
    with one_process.attacks_here():
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return folder / "small"
