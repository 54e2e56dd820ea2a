"""A run's processes: signals end all of them, say how to go on, and one run has a folder to itself.

Every test waits for what happens. Deadlines are for what never does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedsim
from fedsim.cli.commands import app
from fedsim.results.record import read_lines
from fedsim.system.lock import NAME, is_locked, lock_folder
from fedsim.types import FedsimError

pytestmark = pytest.mark.usefixtures("attacks_here")

NEVER = 600.0
"""Seconds after which a test gives up."""

SCENARIO = """\
name: tiny
seed: 5
data: {source: {name: faces, size: 16}, clients: 2}
model: {name: mlp, hidden: [12]}
training: {rounds: 2, local: {batch_size: 2}}
defenses: {none: []}
attacks:
  - {name: label_inference}
  - {name: inverting_gradients, iterations: 1000000}
observe: {rounds: [1], clients: [0, 1], batch_sizes: [1]}
"""

ROWS = 2
"""That come at once: those of label_inference."""


def until(happened: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + NEVER
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def children(pid: int) -> set[int]:
    pids = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            pids.add(int(entry.parent.name))
    return pids


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def start(command: list[str], cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=cwd,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, as these tests may be, starts with signals ignored.
        preexec_fn=lambda: [  # type: ignore[arg-type, return-value]
            signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)
        ],
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


@pytest.fixture
def begin(path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def begin(workers: int) -> subprocess.Popen[str]:
        begun.append(start([sys.executable, "-m", "fedsim", *words(path, workers)]))
        return begun[0]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def words(path: Path, workers: int) -> list[str]:
    return ["run", str(path), "--out", str(path.parent / "out"), "--workers", str(workers)]


def attacking(path: Path) -> bool:
    """Whether the quick attacks are done, so that the long one is under way."""
    return len(read_lines(path.parent / "out" / "results.jsonl")) == ROWS


def brief(path: Path, more: str = "") -> None:
    text = path.read_text().replace("iterations: 1000000", "iterations: 1")
    path.write_text(text + more)


Begin = Callable[[int], "subprocess.Popen[str]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGINT, 2), (signal.SIGTERM, 1)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_says_how_to_go_on(
    path: Path, begin: Begin, number: signal.Signals, workers: int
) -> None:
    """In the middle of an attack, while which a second run of the folder is refused."""
    process = begin(workers)
    until(lambda: attacking(path), process)
    second = CliRunner().invoke(app, [*words(path, workers), "--resume"])
    assert second.exit_code == 2
    assert f"in use by another run (process {process.pid} on " in second.stderr
    there = children(process.pid)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=NEVER)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert stderr.rstrip().endswith(f"--out {path.parent / 'out'} --workers {workers} --resume")
    until(lambda: not any(map(runs, there)))
    assert not (path.parent / "out" / NAME).exists()
    third = CliRunner().invoke(app, words(path, workers))
    assert third.exit_code == 2, "another run must not mix with it"
    assert "holds a run already" in third.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_die_with_their_parent(path: Path, begin: Begin) -> None:
    """SIGKILL, of which the parent cannot tell them; and the lock is nobody's then."""
    process = begin(2)
    until(lambda: attacking(path), process)
    assert len(children(process.pid)) >= 3, "the resource tracker and both workers"
    there = children(process.pid)
    process.kill()
    until(lambda: not any(map(runs, there)))
    with lock_folder(path.parent / "out"):
        pass


WHILE_IMPORTING = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            try:
                # As text, as classes of fields are made while importing: Python then remembers that
                # a plain KeyboardInterrupt left it, and dies of the signal although it was caught.
                exec(f"os.kill(os.getpid(), {number})\\nwhile True: pass")
            except KeyboardInterrupt:
                if twice: os.kill(os.getpid(), number)
                while twice: pass  # in vain: the first was lost
                raise

module, twice, number = sys.argv.pop(1), sys.argv.pop(1) == "twice", int(sys.argv.pop(1))
sys.meta_path.insert(0, Finder())
from fedsim.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("number", "module", "times"),
    [(signal.SIGINT, "typer", "twice"), (signal.SIGHUP, "torch", "once")],
    ids=lambda value: getattr(value, "name", value),
)
def test_an_interrupt_that_comes_early_or_twice(
    path: Path, number: signal.Signals, module: str, times: str
) -> None:
    (path.parent / "early.py").write_text(WHILE_IMPORTING)
    given = [module, times, str(int(number))]
    command = [sys.executable, "-m", "early", *given, *words(path, 1)]
    process = start(command, cwd=path.parent)  # -m, since Python ends other programs elsewhere
    _, stderr = process.communicate(timeout=NEVER)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert stderr.rstrip().endswith("--workers 1 --resume")
    assert not (path.parent / "out").exists()


def test_a_folder_in_use_is_refused(path: Path, tmp_path: Path) -> None:
    brief(path)
    with lock_folder(tmp_path / "out"), pytest.raises(FedsimError, match="in use by another run"):
        fedsim.run(path, out=tmp_path / "out", workers=1)
    assert not list((tmp_path / "out").iterdir()), "nothing was written, and no lock is left"


def test_a_sweep_leaves_alone_the_variant_that_another_runs(path: Path, tmp_path: Path) -> None:
    brief(path, "sweep: {seed: [1, 2]}\n")
    out = tmp_path / "out"
    with lock_folder(out / "seed=2"), pytest.raises(FedsimError, match=r"seed=2 is in use"):
        fedsim.run(path, out=out, workers=1)
    assert (out / "seed=1" / "record.json").exists()
    assert not list((out / "seed=2").iterdir())
    finished = fedsim.run(path, out=out, workers=1, resume=True)
    assert len(finished.rows()) == 2 * 2 * ROWS
    assert not list(out.rglob(NAME))


def test_a_folder_that_filled_up_in_the_meantime_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look at it and the lock."""
    brief(path)
    out = tmp_path / "out"
    patched = fedsim.pipeline.lock_folder  # type: ignore[attr-defined]

    def late(folder: Path) -> object:
        folder.mkdir()
        (folder / "scenario.yaml").write_text("of another run")
        return patched(folder)

    monkeypatch.setattr("fedsim.pipeline.lock_folder", late)
    with pytest.raises(FedsimError, match="holds a run already"):
        fedsim.run(path, out=out, workers=1)
    assert (out / "scenario.yaml").read_text() == "of another run"


def test_a_lock_whose_file_was_removed_is_not_taken_for_one(tmp_path: Path) -> None:
    """Whoever opened the file before its holder removed it must look again."""
    with lock_folder(tmp_path):
        (tmp_path / NAME).unlink()
        with (
            lock_folder(tmp_path),
            pytest.raises(FedsimError, match="in use"),
            lock_folder(tmp_path),
        ):
            pass


def test_resuming_removes_what_a_kill_left_half_written(path: Path, tmp_path: Path) -> None:
    brief(path)
    out = tmp_path / "out"
    fedsim.run(path, out=out, workers=1)
    torn = out / "reconstructions" / "none" / ".writing-abc"
    torn.touch()
    fedsim.run(path, out=out, workers=1, resume=True)
    assert not torn.exists()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(kind: str, tmp_path: Path) -> None:
    """What a link leads to would be overwritten."""
    precious = tmp_path / "precious"
    precious.write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    if kind == "link":
        (run / ".lock").symlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(run / ".lock")
    else:
        (run / ".lock").mkdir()
    with pytest.raises(FedsimError, match="remove it"), lock_folder(run):
        pass
    assert not is_locked(run), "nor is it waited for"
    assert precious.read_text() == "kept"
