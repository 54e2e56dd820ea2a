"""Copies of a run in MLflow and TensorBoard, read again with the tools themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import STACKS, write_run
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.report import leaderboard_rows, load_runs
from fedsim.report.loggers import STORES, _collect, _TensorBoard, chosen, log_run
from fedsim.results.record import read_lines, write_lines
from fedsim.types import FedsimError

LINE = "attacks/clip+dp/inverting_gradients/b1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stacks = {"none": STACKS["none"], "clip+dp": STACKS["dp"]}
    return write_run(tmp_path_factory.mktemp("logged"), stacks=stacks, trials=3, rounds=3)


def rounds(folder: Path, defense: str, name: str) -> dict[int, float]:
    lines = read_lines(folder / "rounds.jsonl")
    return {row["round"]: row[name] for row in lines if row["defense"] == defense}


def expected(folder: Path) -> dict[str, float]:
    """Figures of one line, by the last part of their names."""
    line = next(
        row
        for row in leaderboard_rows([folder])
        if (row.defense, row.attack) == ("clip+dp", "inverting_gradients")
    )
    gain, ssim = line.gain, line.metrics["ssim"]
    assert gain and ssim and gain.low is not None and gain.high is not None
    return {
        "gain": gain.mean,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "ssim": ssim.mean,
        "n": 3,
    }


@pytest.mark.slow
def test_mlflow_holds_rounds_gains_with_intervals_and_pictures(
    folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from mlflow.tracking import MlflowClient

    assert log_run(folder, chosen([f"mlflow={tmp_path}/store"])) == []
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/store/mlflow.db")
    experiment = client.get_experiment_by_name("photos-demo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    loss = client.get_metric_history(run.info.run_id, "rounds/clip dp/train_loss")
    assert {m.step: m.value for m in loss} == pytest.approx(rounds(folder, "clip+dp", "train_loss"))
    for name, value in expected(folder).items():
        assert run.data.metrics[LINE.replace("+", " ") + f"/{name}"] == pytest.approx(value)
    assert "epsilon" not in str([m for m in run.data.metrics if m.startswith("rounds/none")])
    assert run.data.params["epsilon/none"].startswith("∞")
    where = "reconstructions/clip dp/inverting_gradients"
    (picture,) = client.list_artifacts(run.info.run_id, where)
    assert picture.path == f"{where}/b1-round-3.png"
    png = tmp_path / "store" / "artifacts" / run.info.run_id / "artifacts" / picture.path
    assert png.read_bytes().startswith(b"\x89PNG")


def test_tensorboard_holds_the_same(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert log_run(folder, chosen([f"tensorboard={tmp_path}"])) == []
    found = EventAccumulator(str(tmp_path / "photos-demo"))
    found.Reload()
    accuracy = {e.step: e.value for e in found.Scalars("rounds/none/test_accuracy")}
    assert accuracy == pytest.approx(rounds(folder, "none", "test_accuracy"))
    for name, value in expected(folder).items():
        (event,) = found.Scalars(f"{LINE}/{name}")
        assert (event.step, event.value) == (3, pytest.approx(value, rel=1e-6))
    (image,) = found.Images("reconstructions/clip+dp/inverting_gradients/b1")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.height == 2 * image.width + 2


def test_a_tool_that_fails_loses_nothing_and_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def fail(self: _TensorBoard, run: Any) -> None:
        raise OSError(28, "No space left on device")

    class Good(_TensorBoard.__mro__[1]):  # type: ignore[misc]
        package = "json"

        def write(self, run: Any) -> None:
            done.append(run.scenario)

    monkeypatch.setattr(_TensorBoard, "write", fail)
    (line,) = log_run(folder, [_TensorBoard(tmp_path), Good(tmp_path)])
    assert "No space left" in line and "the run itself is whole" in line
    assert done == ["photos-demo"]


@pytest.mark.parametrize("tool", sorted(STORES))
def test_a_missing_extra_is_refused_before_any_work(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, STORES[tool].package, None)
    (tmp_path / "s.yaml").write_text("name: s\n")
    out = tmp_path / "out"
    refused = CliRunner().invoke(
        app, ["run", f"{tmp_path}/s.yaml", "--out", str(out), "--log", tool]
    )
    assert refused.exit_code == 2, refused.output
    assert f"pip install '.[{tool}]'" in refused.output
    assert not out.exists()


def test_an_unknown_tool_and_a_folder_that_cannot_be_written_to_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(FedsimError, match="expected one of mlflow, tensorboard, got 'mflow'"):
        chosen(["mflow"])
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    (tmp_path / "file").touch()
    with pytest.raises(FedsimError, match="a file and no folder"):
        chosen([f"tensorboard={tmp_path}/file"])


@pytest.mark.slow
def test_mlflow_is_told_to_report_nothing_before_it_is_imported(tmp_path: Path) -> None:
    """In a process that does not look like a test to MLflow, which is silent in those."""
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    script = (
        "from fedsim.report.loggers import chosen\n"
        f"chosen(['mlflow={tmp_path}/store'])\n"
        "from mlflow.telemetry import get_telemetry_client\n"
        "assert get_telemetry_client() is None\n"
    )
    hidden = ("CI", "PYTEST_CURRENT_TEST", "MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*mlflow*"))  # as an id of this machine


def test_no_figure_of_a_vantage_takes_the_place_of_anothers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", stacks=["none"])
    rows = read_lines(run / "results.jsonl")
    write_lines(run / "results.jsonl", rows + [{**row, "vantage": "eavesdropper"} for row in rows])
    (loaded,) = load_runs([run])
    places = [(name, round) for name, _, round in _collect(loaded).numbers]
    assert len(places) == len(set(places))
    assert any("/eavesdropper/" in name for name, _ in places)
