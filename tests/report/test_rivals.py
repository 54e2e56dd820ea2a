"""The benchmark of other suites: every suite gets the recording, and is scored as fedsim scores."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import rivals
import torch

from fedsim.attacking.replay import attack
from fedsim.contracts.grant import Grant
from fedsim.recording.files import load_observation


def lines(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> list[dict[str, Any]]:
    arguments = ["rivals.py", *words, "--iterations", "2", "--json", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr("logging.disable", lambda _: None)
    rivals.main()
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def test_fedsims_line_is_the_mean_of_what_fedsim_itself_scores(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "fedsim inverting_gradients"
    (line,) = lines(monkeypatch, tmp_path / "out.json", str(small), "--only", name)
    assert line["n"] == 2 and line["gain"]["low"] is None, "two trials have no interval"
    paths = rivals.recordings(small, "none", 1, 1)
    scored = []
    for path in paths:
        knows = Grant(labels="known")
        _, row = attack(path, "inverting_gradients", {"iterations": 2}, grant=knows, seed=0)
        scored.append(row["metrics"]["psnr"])
    assert line["psnr"]["mean"] == pytest.approx(sum(scored) / 2, abs=0.006)


def test_a_suite_that_is_not_there_is_left_out_and_said(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "LeakPro InvertingGradients"
    monkeypatch.setitem(rivals.SUITES, name, ("no_such_package", rivals.SUITES[name][1]))
    (line,) = lines(monkeypatch, tmp_path / "out.json", str(small), "--only", name)
    assert line["left_out"] == "no_such_package cannot be imported here" and "gain" not in line


@pytest.mark.skipif(importlib.util.find_spec("leakpro") is None, reason="LeakPro is not installed")
def test_leakpro_gets_the_recorded_gradient_and_no_image(small: Path) -> None:
    observation = load_observation(rivals.recordings(small, "none", 1, 1)[0])
    truth = rivals.load_truth(small, observation.id, observation.num_clients)
    first = rivals.leakpro_runner(observation, truth)(2, 2)
    truth.images.zero_()
    assert torch.equal(rivals.leakpro_runner(observation, truth)(2, 2), first)
