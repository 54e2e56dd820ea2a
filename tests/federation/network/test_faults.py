"""A federation on this machine that ends leaves nothing, and what a part of it cannot do is said.

`benchmarks/soak.py` kills nodes, SuperLink and gate while a federation trains.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soak
import yaml
from network_support import until
from nodes_support import LINK, nodes

from fedsim.federation.network import flower, link, node, up
from fedsim.federation.network.node import NodeMembership, serve
from fedsim.federation.network.superlink import Child
from fedsim.types import FedsimError, RunFailed

MARK = "FEDSIM_FAULTS"
LASTS = "import time; time.sleep(600)"


@pytest.mark.by_hand
@pytest.mark.parametrize("when", ["starting", "training"])
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_whatever_ends_it_nothing_is_left(
    tmp_path: Path, number: int, status: int, when: str
) -> None:
    """`fedsim up` runs in a session, with a temporary folder and a mark of its own."""
    mark, path, out = uuid.uuid4().hex, tmp_path / "up.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(soak.scenario(rounds=4, nodes=2, timeout=60)))
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "up.log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "fedsim", "up", str(path), "--out", str(out), "--quiet"],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path / "tmp")},
        )
    awaited = out / ("network" if when == "starting" else "rounds.jsonl")
    until(awaited.exists, "a file of the run")
    running.send_signal(number)
    assert running.wait(30) == status, (tmp_path / "up.log").read_text()
    assert soak.marked(mark, MARK) == []
    assert soak.left_in(tmp_path / "tmp") == []
    if status == 130:
        assert "--resume" in (tmp_path / "up.log").read_text()


def test_a_superlink_that_is_away_ends_the_run_which_can_be_resumed() -> None:
    config = dict.fromkeys(("version", "scenario", "stack", "run", "held"), "")
    with (
        pytest.raises(FedsimError, match=r"has forgotten this run.*continue with --resume"),
        flower.server_app(LINK, config, 0.1),
    ):
        pass


class Runtime:
    """Offers tasks of these runs, one after the other, and then none."""

    def __init__(self, *runs: int) -> None:
        self.runs = list(runs)

    def AcquireTask(self, _: Any) -> Any:  # noqa: N802 - Flower's name
        there = bool(self.runs)
        run = self.runs.pop(0) if there else 0
        return SimpleNamespace(
            HasField=lambda _: there, token=f"of {run}", task=SimpleNamespace(run_id=run)
        )


def test_a_run_takes_its_own_task_and_no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose task another executor has taken is started anew, and not for ever."""
    monkeypatch.setattr(flower, "_CLAIM_SECONDS", 0.1)
    started = iter(range(1, 99))
    control: Any = SimpleNamespace(
        StartRun=lambda _: SimpleNamespace(HasField=lambda _: True, run_id=next(started))
    )
    claimed = flower._start_run(control, Runtime(7, 1), {})  # type: ignore[arg-type]
    assert claimed == "of 1"
    with pytest.raises(FedsimError, match="gave the run to another executor"):
        flower._start_run(control, Runtime(7, 8), {})  # type: ignore[arg-type]
    assert next(started) == 5, "three tries"


def test_a_node_that_is_not_let_in_says_why_once_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose key nobody registered, or another node has."""
    tries = iter([600.0, 600.0, 0.0])

    def refused(member: NodeMembership) -> Any:
        monkeypatch.setattr(node, "_JOIN_SECONDS", next(tries))
        words = ["-c", f"print({flower.REFUSED!r})"]
        return Child([sys.executable, *words], tmp_path / "supernode.log"), "", b""

    monkeypatch.setattr(node, "_supernode", refused)
    monkeypatch.setattr(node, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(link, "check", lambda *_: None)
    (app,), said = nodes(tmp_path, 1), list[str]()
    member = NodeMembership(superlink="127.0.0.1:9", roots=None, key=None, home=tmp_path / "home")
    with pytest.raises(RunFailed, match="the SuperLink refuses its key"):
        serve(app, member, said.append, threading.Event())
    (line,) = said
    assert line.startswith("not joined: the SuperLink refuses its key")


def test_what_ends_is_started_anew_and_what_is_refused_but_the_gate_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate's address may be taken for a moment after its end; a node's input stays wrong."""
    monkeypatch.setattr(up, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(up, "_NODE_REST", 0.01)
    watched, started = up._Watched(), dict[str, int]()

    def start(name: str, *ends: int) -> Child:
        """A program that ends thus, try by try, and then runs."""
        started[name] = tries = started.get(name, 0) + 1
        code = f"raise SystemExit({ends[tries - 1]})" if tries <= len(ends) else LASTS
        return Child([sys.executable, "-c", code], tmp_path / f"{name}.log")

    try:
        node = watched.add(lambda: start("node", 2))
        until(lambda: node().status == 2, "a refused node")
        killed = watched.add(lambda: start("killed", 1))
        gate = watched.add(lambda: start("gate", -9, 2), gives_up=False)
        until(lambda: started == {"node": 1, "killed": 2, "gate": 3}, "what runs again")
        until(lambda: killed().status is None and gate().status is None, "both")
    finally:
        watched.stop()
    assert None not in (killed().status, gate().status), "nothing is left"
    assert started["node"] == 1, "it would be refused again"
