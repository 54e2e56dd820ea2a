"""Bad input of any kind is refused before work starts, with status 2, its cause and a remedy."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedsim
from fedsim.cli.commands import app
from fedsim.models.base import size_of
from fedsim.system import memory
from fedsim.types import ModelSpec, RunFailed

pytestmark = pytest.mark.usefixtures("attacks_here")

SCENARIO = """\
name: s
data: {source: digits, clients: 2}
model: {name: mlp, hidden: [8]}
training: {rounds: 1, local: {batch_size: 2}}
attacks: [{name: label_inference}]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "s.yaml").write_text(SCENARIO, encoding="utf-8")
    return fedsim.run(folder / "s.yaml", out=folder / "out", workers=1).out


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


def refused(*words: object, status: int = 2) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == status, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done.output.replace("\n", " ")


def run(scenario: Path, *words: object) -> str:
    out = scenario.parent / "out"
    said = refused("run", scenario, "--out", out, "-q", "--workers", 1, *words)
    assert not out.exists()
    return said


KEYS = {
    "data.source": "data.source={{name: image_folder, path: {}}}",
    "data.partition": "data.partition={{name: file, path: {}}}",
    "training.weights": "training.weights={}",
    "scoring.lpips_weights": "scoring.lpips_weights={}",
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_devices_and_pipes_are_not_read(key: str, kind: str, scenario: Path) -> None:
    path = Path("/dev/zero")
    if kind == "pipe":
        path = scenario.parent / "pipe"
        os.mkfifo(path)
    assert key in run(scenario, "--set", KEYS[key].format(path))


def test_a_pipe_among_the_files_of_an_image_folder_is_left_out(scenario: Path) -> None:
    images = scenario.parent / "images"
    (images / "train" / "cat").mkdir(parents=True)
    os.mkfifo(images / "train" / "cat" / "a.png")
    said = run(scenario, "--set", KEYS["data.source"].format(images))
    assert "has no image at train/<class>/<name>" in said


def test_a_model_that_no_machine_holds_is_not_built(scenario: Path) -> None:
    said = run(scenario, "--set", "model.hidden=[1048576, 1048576]")
    assert "model: the model's weights take about 16400.2 GiB" in said and "smaller model" in said


def test_what_a_model_takes_is_counted_and_draws_nothing() -> None:
    stats: Any = {"mean": (0.5,), "std": (0.5,)}
    shape: Any = {"parameters": {"hidden": [10]}, "input_shape": (1, 4, 4), "num_classes": 3}
    before = torch.get_rng_state()
    size = size_of(ModelSpec(name="mlp", **shape, **stats))
    assert size is not None and torch.equal(before, torch.get_rng_state())
    assert size.state == 4 * (16 * 10 + 10 + 10 * 3 + 3)
    assert size.image >= 4 * (10 + 3)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("observe.batch_sizes=[600]", "observe.batch_sizes"),
        ("training.local.batch_size=600", "training.local.batch_size"),
        ("training.local.steps=100000", "training.local.steps"),
    ],
)
def test_batches_that_do_not_fit_are_not_computed(
    setting: str, key: str, scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "limit", lambda: 200_000)
    assert key in run(scenario, "--set", setting)


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    listed = tmp_path / "cgroup"
    listed.write_text("0::/a/b\n", encoding="utf-8")
    for name, limit in (("", "max"), ("a", "5000"), ("a/b", "max")):
        folder = tmp_path / "root" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit, encoding="utf-8")
    assert memory._control_group_limits(listed, tmp_path / "root") == [5000]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ('"batch_size":2', "NaN"),
        ('"lr":0.1', "Infinity"),
        ('"lr":0.1', "-Infinity"),
        ('"lr":0.1', "1e999"),
        ('"batch_size":2', "nil"),
    ],
)
def test_a_line_with_what_is_no_number_is_refused(
    field: str, value: str, finished: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    path = out / "results.jsonl"
    text = path.read_text(encoding="utf-8")
    assert field in text
    key = field.partition(":")[0]
    path.write_text(text.replace(field, f"{key}:{value}"), encoding="utf-8")
    scenario = finished.parent / "s.yaml"
    said = refused("run", scenario, "--out", out, "--resume", "-q", "--workers", 1)
    assert "results.jsonl, line 1: damaged" in said
    assert "line 1" in refused("leaderboard", out)


@pytest.mark.parametrize(
    ("name", "lost"),
    [("results.jsonl", ("metrics", "baseline", "cost")), ("rounds.jsonl", ("bytes_up",))],
)
def test_a_line_that_lacks_what_later_stages_read_is_refused(
    name: str, lost: tuple[str, ...], finished: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    row = json.loads((out / name).read_text(encoding="utf-8").splitlines()[0])
    kept = {key: value for key, value in row.items() if key not in lost}
    (out / name).write_text(json.dumps(kept) + "\n", encoding="utf-8")
    scenario = finished.parent / "s.yaml"
    said = refused("run", scenario, "--out", out, "--resume", "-q")
    assert f"{name}, line 1: damaged" in said


def test_more_attacks_than_anybody_waits_for_are_refused(scenario: Path) -> None:
    sizes = f"observe.batch_sizes={list(range(1, 401))}"
    said = run(scenario, "--set", sizes, "--set", "observe.trials=10000")
    assert "observe: 4,000,000 attacks" in said and "fewer trials" in said


@pytest.mark.parametrize("out", [".", "scenario.yaml/x"])
def test_a_report_that_cannot_be_written_is_refused(out: str, finished: Path) -> None:
    assert "--out" in refused("report", finished, "--out", finished / out)


def test_a_plot_that_cannot_be_written_is_refused_before_it_is_computed(finished: Path) -> None:
    words = ("privacy", "delta", "gaussian", "sensitivity=1", "sigma=2", "--epsilon", 1, "--plot")
    assert "--plot" in refused(*words, finished / "scenario.yaml" / "x.png")


@pytest.mark.parametrize("kind", ["file", "loop", "lost"])
def test_a_folder_to_fill_that_is_none_is_refused(kind: str, scenario: Path) -> None:
    out = scenario.parent / "o"
    if kind == "file":
        out.write_text("", encoding="utf-8")
    else:
        out.symlink_to("o" if kind == "loop" else "nowhere")
    said = refused("run", scenario, "--out", out, "-q")
    assert "--out" in said and "Errno" not in said and "name another folder" in said


@pytest.mark.parametrize("after", [1, 8])
def test_a_full_disk_names_the_file_and_how_to_go_on(
    after: int, scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls, sync = scenario.parent / "out", [0], os.fsync

    def full(handle: int) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunFailed, match=r"out.*No space left on device.*--resume"):
            fedsim.run(scenario, out=out, workers=1)
    assert fedsim.run(scenario, out=out, workers=1, resume=True).rows()


@pytest.mark.parametrize(
    ("count", "value"),
    [("steps", 10**6), ("batch_size", 10**6), ("steps", 10**30), ("batch_size", -1)],
)
def test_forged_counts_of_a_recording_are_refused(
    count: str, value: int, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "limit", lambda: 1 << 30)
    out = shutil.copytree(finished, tmp_path / "out")
    (path,) = (out / "observations").rglob("client-*.json")
    sidecar: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    sidecar["training"][count] = value
    path.write_text(json.dumps(sidecar), encoding="utf-8")
    said = refused("attack", path, "--attack", "label_inference")
    assert f"training.{count}" in said


@pytest.mark.slow
def test_a_script_needs_no_guard(scenario: Path) -> None:
    """Worker processes do not run it again: one that attacks, and one that scores."""
    once = ["observe.clients=[0]", "observe.trials=1"]
    call = f'fedsim.run("s.yaml", out="out", workers=2, overrides={once})'
    folder = scenario.parent
    (folder / "script.py").write_text(f"import fedsim\n\n{call}\nprint('once')")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\n"


def cli(
    folder: Path, *words: str, redirected: str = "", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    command = f'"$0" -c "from fedsim.cli.main import main; main()" {" ".join(words)} {redirected}'
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command, sys.executable],
        cwd=folder,
        capture_output=True,
        timeout=600,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_of_few_characters_is_written_to(encoding: str, tmp_path: Path) -> None:
    done = cli(tmp_path, "privacy", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    # click writes UTF-8 where a terminal says that it has no more than ASCII
    assert encoding == "ascii" or rb"\u03b4" in done.stdout


def test_a_closed_terminal_is_not_written_to(tmp_path: Path) -> None:
    done = cli(tmp_path, "privacy", redirected=">&-")
    assert done.returncode == 0 and done.stderr == b""
