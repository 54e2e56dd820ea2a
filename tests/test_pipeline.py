"""The main job: from a scenario to a leaderboard, twice the same, and after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from one_process import attacks_here
from test_imports import run_stripped

import fedsim
from fedsim.report import load_runs, unfinished
from fedsim.results.record import Row, Run
from fedsim.types import FedsimError, RunFailed

SCENARIO: dict[str, Any] = {
    "name": "tiny",
    "seed": 5,
    "data": {"source": "digits", "clients": 3},
    "model": {"name": "mlp", "hidden": [16], "activation": "sigmoid"},
    "training": {"rounds": 3, "local": {"batch_size": 4, "lr": 0.1}},
    "defenses": {
        "none": [],
        "noise": [{"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "multiplier": 2.0}],
        "sum": ["aggregate"],
    },
    "attacks": [{"name": "label_inference"}, {"name": "idlg", "iterations": 6}],
    "observe": {"rounds": [1, "last"], "clients": [1], "batch_sizes": [1, 2], "trials": 2},
    "knowledge": {"labels": "inferred"},
}


def without_cost(rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if key != "cost"} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with attacks_here():
        return fedsim.run(SCENARIO, out=tmp_path_factory.mktemp("run") / "out", workers=1)


def test_every_cell_has_its_row_in_canonical_order(finished: Run) -> None:
    rows = finished.rows()
    cells = [
        (
            row["defense"]["name"],
            row["attack"]["label"],
            row["batch_size"],
            row["round"],
            row["trial"],
        )
        for row in rows
    ]
    assert cells == [
        (stack, attack, size, round, trial)
        for stack in SCENARIO["defenses"]
        for attack in ("label_inference", "idlg")
        for size in (1, 2)
        for round in (1, 3)
        for trial in (0, 1)
    ]
    assert all(row["status"] == "ok" for row in rows), [row["reason"] for row in rows]


def test_the_undefended_control_succeeds_and_noise_does_not(finished: Run) -> None:
    def gain(stack: str) -> float:
        rows = [
            row
            for row in finished.rows()
            if (row["defense"]["name"], row["attack"]["label"]) == (stack, "idlg")
            and row["batch_size"] == 1
        ]
        return sum(row["metrics"]["psnr"] - row["baseline"]["psnr"] for row in rows) / len(rows)

    assert gain("none") > 6 > 2 > gain("noise")


def test_rows_state_the_threat_model_and_the_claim(finished: Run) -> None:
    for row in finished.rows():
        assert row["knowledge"] == {
            "labels": "inferred",
            "bn": "none",
            "features": "none",
            "rows": "none",
            "public": "none",
        }
        summed = row["defense"]["name"] == "sum"
        assert row["vantage"] == ("aggregate" if summed else "server")
        assert row["client"] == (-1 if summed else 1)
        claimed = row["privacy"]["epsilon"]
        assert (claimed == "inf") == (row["defense"]["name"] != "noise")
        assert bool(row["privacy"]["reason"]) == (claimed == "inf")
        assert row["control"]["other_update"]["label_accuracy"] is not None
        assert row["utility"]["test_accuracy"] is not None


def test_a_blind_and_a_knowing_attack_start_at_the_same_images(tmp_path: Path) -> None:
    """Where there is nothing to know their answers are the same, and differences are knowledge."""
    attacks = [
        {"name": "idlg", "label": "blind", "iterations": 2, "blind": True},
        {"name": "idlg", "label": "knowing", "iterations": 2},
    ]
    scenario = {**SCENARIO, "defenses": {"none": []}, "attacks": attacks}
    scenario["observe"] = {"rounds": [1], "clients": [1], "batch_sizes": [1], "trials": 1}
    with attacks_here():
        blind, knowing = fedsim.run(scenario, out=tmp_path / "out", workers=1).rows()
    assert blind["metrics"] == knowing["metrics"]


def test_what_a_run_leaves_behind(finished: Run) -> None:
    out = finished.out
    for name in ("scenario.yaml", "record.json", "rounds.jsonl", "results.jsonl", "report.html"):
        assert (out / name).stat().st_size > 100, name
    assert len(finished.rounds()) == 3 * 3
    assert len(finished.observations()) == 3 * 2 * 2 * 2
    record = json.loads((out / "record.json").read_text())
    assert record["environment"]["packages"]["torch"] and record["seed"] == 5
    resolved = fedsim.load(out / "scenario.yaml")
    assert resolved.attacks[1].parameters["iterations"] == 6


@pytest.mark.slow
def test_the_same_scenario_gives_the_same_bytes(finished: Run, tmp_path: Path) -> None:
    """Also where attacks are in a process of their own, as those of `finished` were not."""
    again = fedsim.run(fedsim.load(finished.out / "scenario.yaml"), out=tmp_path / "b", workers=1)
    assert without_cost(again.rows()) == without_cost(finished.rows())
    for path in finished.observations():
        twin = again.out / path.relative_to(finished.out)
        for suffix in (".json", ".safetensors"):
            assert path.with_suffix(suffix).read_bytes() == twin.with_suffix(suffix).read_bytes()


def test_a_folder_is_never_overwritten(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="holds a run already"):
        fedsim.run(SCENARIO, out=finished.out)
    with pytest.raises(FedsimError, match="another scenario"):
        fedsim.run({**SCENARIO, "seed": 6}, out=finished.out, resume=True)


def test_resuming_a_finished_run_changes_nothing(finished: Run) -> None:
    before = (finished.out / "results.jsonl").read_bytes()
    fedsim.run(SCENARIO, out=finished.out, resume=True, workers=1)
    assert (finished.out / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("results.jsonl", {"observation": "../../../outside"}),
        ("results.jsonl", {"defense": {"name": "zzz", "stack": []}}),
        ("rounds.jsonl", {"round": 99}),
    ],
)
def test_rows_that_the_run_never_had_are_refused_before_any_work(
    finished: Run, file: str, change: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    first, *others = (out / file).read_text().splitlines()
    changed = json.dumps({**json.loads(first), **change})
    (out / file).write_text("\n".join([*others, changed, ""]))
    with pytest.raises(FedsimError, match=f"{file}, line {len(others) + 1}: damaged"):
        fedsim.run(SCENARIO, out=out, resume=True)


def test_a_lost_round_is_not_passed_over(finished: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    (out / "rounds.jsonl").unlink()
    with pytest.raises(RunFailed, match=r"round 1 of none is lost; remove .*checkpoints/none"):
        fedsim.run(SCENARIO, out=out, resume=True)


def test_weights_of_a_metric_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    scoring = {"lpips_weights": str(tmp_path / "none.pth")}
    with pytest.raises(FedsimError, match=r"scoring\.lpips_weights: "):
        fedsim.run({**SCENARIO, "scoring": scoring}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_recording_is_replayed_from_python(finished: Run) -> None:
    path = next(p for p in finished.observations() if "none/round-0001/client-0001-b1-t0" in str(p))
    found, row = fedsim.attack(path, "idlg", {"iterations": 6})
    recorded = next(
        r
        for r in finished.rows()
        if r["observation"] == "none/round-0001/client-0001-b1-t0" and r["attack"]["name"] == "idlg"
    )
    assert found.images is not None and found.images.shape == (1, 1, *found.images.shape[2:])
    assert row["metrics"]["label_accuracy"] == recorded["metrics"]["label_accuracy"]
    assert row["metrics"]["psnr"] == pytest.approx(recorded["metrics"]["psnr"], abs=0.5)
    assert row["missing"] == 0


def test_a_recording_is_replayed_without_flower(finished: Run) -> None:
    path = finished.out / "observations/none/round-0001/client-0001-b1-t0.json"
    said = run_stripped(
        "import fedsim\n"
        "found, row = fedsim.attack(sys.argv[1], 'label_inference')\n"
        "print(row['metrics']['label_accuracy'])\n",
        str(path),
    )
    assert float(said) == 1.0


def test_known_labels_need_the_truth(finished: Run) -> None:
    observation = fedsim.load_observation(finished.observations()[0])
    grant = fedsim.Grant(labels="known")
    with pytest.raises(FedsimError, match="only the truth"):
        fedsim.attack(observation, "idlg", grant=grant)
    fedsim.attack(observation, "idlg", {"iterations": 1}, grant=grant, truth=finished.out)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0, 1, 2])
def test_killed_at_a_random_moment_and_resumed(finished: Run, tmp_path: Path, moment: int) -> None:
    """`kill -9`, then resumed by another process: the same rows."""
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "fedsim", "run", str(finished.out / "scenario.yaml"),
        "--out", str(out), "--workers", "1", "--quiet",
    ]  # fmt: skip
    victim = subprocess.Popen(command, start_new_session=True)
    # Wait for the first sign of the wanted phase, then a little longer.
    sign = ("checkpoints", "rounds.jsonl", "results.jsonl")[moment]
    while not (out / sign).exists() and victim.poll() is None:
        time.sleep(0.01)
    time.sleep(0.13 * (moment + 1))
    os.killpg(victim.pid, signal.SIGKILL)
    assert victim.wait() in (-signal.SIGKILL, 0), "on a fast machine it may have been done"
    if (out / "plan.json").exists():  # before anything else that a run leaves behind
        (left,) = load_runs([out])
        (line,) = unfinished([left]) or [f"{left.attack_runs} of {left.attack_runs} --resume"]
        assert f"{left.attack_runs} of " in line and "--resume" in line
    with attacks_here():
        fedsim.run(finished.out / "scenario.yaml", out=out, workers=1, resume=True)
    assert without_cost(Run(out).rows()) == without_cost(finished.rows())
    assert not unfinished(load_runs([out]))
