"""Same bytes, whatever the machine's cores, the workers and the environment's threads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import attacks_here

import fedsim
from fedsim.results.record import Run

SCENARIO: dict[str, Any] = {
    "name": "threads",
    "seed": 1,
    "data": {"source": "digits", "clients": 2},
    "model": {"name": "convnet", "width": 8},
    "training": {"rounds": 2, "local": {"batch_size": 32}},
    "attacks": [
        {"name": "inverting_gradients", "iterations": 3},
        {"name": "idlg", "iterations": 2},
    ],
    "observe": {"clients": [0, 1], "batch_sizes": [4]},
}


def left_behind(run: Run) -> dict[str, Any]:
    """What must not depend on them: all but times and memory."""
    files = {
        str(path.relative_to(run.out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("observations", "truth", "checkpoints", "reconstructions")
        for path in sorted((run.out / folder).rglob("*"))
        if path.is_file()
    }
    rows = [
        json.dumps({key: value for key, value in row.items() if key not in ("cost", "seconds")})
        for row in (*run.rows(), *run.rounds())
    ]
    return {**files, "rows": rows}


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with attacks_here():
        return fedsim.run(SCENARIO, out=tmp_path_factory.mktemp("threads") / "one", workers=1)


@pytest.mark.slow
def test_bytes_depend_neither_on_workers_nor_on_cores(
    on_one: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "4")  # of the workers
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        other = fedsim.run(SCENARIO, out=tmp_path / "other", workers=2)
        assert torch.get_num_threads() == 4, "a caller's threads are as they were"
    finally:
        torch.set_num_threads(before)
    assert left_behind(other) == left_behind(on_one)


@pytest.mark.slow
def test_the_number_of_threads_is_the_scenarios(on_one: Run, tmp_path: Path) -> None:
    """Else the test above could not fail."""
    scenario = {**SCENARIO, "threads": 4}
    with attacks_here():
        other = fedsim.run(scenario, out=tmp_path / "four", workers=1)
    changed, same = left_behind(other), left_behind(on_one)
    assert changed.keys() == same.keys()
    assert changed != same


def test_a_recording_attacked_again_gives_the_same_reconstruction(on_one: Run) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for row in on_one.rows():
            found = fedsim.attack(
                on_one.out / "observations" / f"{row['observation']}.json",
                row["attack"]["name"],
                row["attack"]["parameters"],
                grant=fedsim.Grant(labels=row["knowledge"]["labels"]),
            )[1]
            assert found["metrics"]["attack_loss"] == row["metrics"]["attack_loss"]
    finally:
        torch.set_num_threads(before)
