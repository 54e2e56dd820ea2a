"""What becomes of a federation of real processes when parts of it die, stop, lie or run full.

In every round, the answers that are aggregated and the failures add up to the participants.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import soak
import yaml
from network_support import ending, until, write_node_key

from fedsim import deploying, pipeline
from fedsim.federation.network import flower
from fedsim.federation.network.link import SCENARIO
from fedsim.federation.network.node import _JOIN_SECONDS
from fedsim.federation.network.up import RunningFederation, federation
from fedsim.types import FedsimError, RunFailed

by_hand = pytest.mark.by_hand
FEDSIM = [sys.executable, "-m", "fedsim"]
MARK = "FEDSIM_FAULTS"
PATIENCE = 240.0
"""Seconds for what takes ten on a machine that is not busy."""


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


def is_accounted(row: dict[str, Any]) -> bool:
    return row["aggregated"] + sum(row["failures"].values()) == len(row["participants"])


def checkpoint(out: Path) -> str:
    return hashlib.sha256((out / "checkpoints" / "none.safetensors").read_bytes()).hexdigest()


def without_network(written: Mapping[str, Any], out: Path) -> str:
    """The checkpoint's hash of the same scenario on the local engine."""
    plain = {**written, "federation": {**written["federation"], "engine": "local"}}
    pipeline.run(plain, out=out, workers=1)
    return checkpoint(out)


@by_hand
def test_a_killed_superlink_costs_no_answer(tmp_path: Path) -> None:
    """The database has all that the SuperLink knew; the model is that of a run without a fault."""
    written = soak.scenario(rounds=3, nodes=2, timeout=120)
    report = soak.soak(written, tmp_path / "out", {1: soak.kill_superlink})
    assert [row["aggregated"] for row in report.rounds] == [2] * 3
    assert checkpoint(tmp_path / "out") == without_network(written, tmp_path / "local")
    assert not report.processes and not report.temporary


def forget(there: RunningFederation) -> None:
    """Kill the SuperLink and remove its database."""
    assert there.link.roots
    for path in there.link.roots.parent.glob("superlink.db*"):
        path.unlink()
    soak.kill_superlink(there)


@by_hand
def test_a_superlink_that_forgets_ends_the_run_and_it_can_be_resumed(tmp_path: Path) -> None:
    out, timeout = tmp_path / "out", 30.0
    written = soak.scenario(rounds=6, nodes=2, timeout=timeout)
    with pytest.raises(RunFailed, match=r"has forgotten this run.*continue with --resume"):
        soak.soak(written, out, {2: forget})
    done = len(rows(out))
    assert 2 <= done < 6

    began = time.monotonic()
    with (
        bare_federation(tmp_path) as there,
        pytest.raises(FedsimError, match=r"0 nodes of 2 came in 3\d s.*its database"),
    ):
        began = time.monotonic()
        pipeline.run(written, out=out, link=there.link, resume=True)
    assert time.monotonic() - began < timeout + 20

    finished = deploying.up(out / "soak.yaml", out=out, shared_seed=True, resume=True, workers=1)
    assert finished and [row["round"] for row in rows(out)] == list(range(1, 7))
    assert checkpoint(out) == without_network(written, tmp_path / "local")


@contextmanager
def program(command: list[str], log: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a test, its output in `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        running = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env={**os.environ, **more}
        )
    with ending(running):
        yield running


@contextmanager
def joined(
    command: list[str], folder: Path, name: str, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A node that has been let in."""
    log = log or folder / f"{name}.log"
    with program(command, log) as running:
        end = time.monotonic() + PATIENCE
        while "joined" not in log.read_text():
            assert running.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield running


@contextmanager
def bare_federation(folder: Path, nodes: int = 0) -> Iterator[RunningFederation]:
    """SuperLink and gate; what nodes there are beside `nodes` is the test's."""
    with federation(folder / "link", nodes, paths=[], shared_seed=True) as there:
        yield there


def keyed(there: RunningFederation, folder: Path, name: str, *, registered: bool = True) -> Path:
    """The key of a node, made when it is first asked for."""
    key = folder / "keys" / name
    if not key.exists():
        public = write_node_key(key)
        if registered:
            flower.register(there.link, public.read_bytes())
    return key


def node_command(
    there: RunningFederation, folder: Path, name: str, client: int, home: Path | None = None
) -> list[str]:
    return [
        *(*FEDSIM, "node", "--superlink", there.gate),
        *("--root-certificates", str(there.link.roots)),
        *("--key", str(keyed(there, folder, name)), "--home", str(home or folder / name)),
        *("--client", str(client), "--data", SCENARIO, "--shared-seed"),
    ]


@by_hand
def test_a_second_run_does_not_disturb_the_first(tmp_path: Path) -> None:
    first = soak.scenario(rounds=8, nodes=2, timeout=60)
    second = {**soak.scenario(rounds=3, nodes=2, timeout=60), "seed": 4}
    with bare_federation(tmp_path, 2) as there:
        (tmp_path / "second.yaml").write_text(yaml.safe_dump(second))
        assert there.link.roots and there.link.secret
        command = [
            *(*FEDSIM, "run", str(tmp_path / "second.yaml"), "--superlink", there.link.superlink),
            *("--root-certificates", str(there.link.roots), "--shared-seed", "--quiet"),
            *("--superexec-secret", str(there.link.secret), "--out", str(tmp_path / "second")),
        ]
        with program(command, tmp_path / "second.log") as other:
            pipeline.run(first, out=tmp_path / "first", link=there.link, workers=1)
            assert other.wait(PATIENCE) == 0, (tmp_path / "second.log").read_text()
    for name, written in (("first", first), ("second", second)):
        assert all(row["aggregated"] == 2 for row in rows(tmp_path / name))
        assert checkpoint(tmp_path / name) == without_network(written, tmp_path / f"l-{name}")


def begin(folder: Path, mark: str, *more: str) -> subprocess.Popen[bytes]:
    """`fedsim up` in a session, with a temporary folder and a mark of its own."""
    (folder / "tmp").mkdir()
    (folder / "up.yaml").write_text(yaml.safe_dump(soak.scenario(rounds=4, nodes=2, timeout=60)))
    with (folder / "up.log").open("wb") as log:
        return subprocess.Popen(
            [
                *FEDSIM,
                "up",
                str(folder / "up.yaml"),
                "--out",
                str(folder / "out"),
                "--quiet",
                *more,
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, MARK: mark, "TMPDIR": str(folder / "tmp")},
        )


@by_hand
@pytest.mark.parametrize("when", ["starting", "training"])
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_whatever_ends_it_nothing_is_left(
    tmp_path: Path, number: int, status: int, when: str
) -> None:
    mark = uuid.uuid4().hex
    running = begin(tmp_path, mark)
    path = tmp_path / "out" / ("network" if when == "starting" else "rounds.jsonl")
    until(path.exists, "a file of the run")
    running.send_signal(number)
    began = time.monotonic()
    assert running.wait(30) == status, (tmp_path / "up.log").read_text()
    assert time.monotonic() - began < 25
    nothing_left(tmp_path, mark)
    if status == 130:
        assert "--resume" in (tmp_path / "up.log").read_text()


@by_hand
@pytest.mark.parametrize(
    ("more", "status"), [([], 0), (["--set", "data.source=csv"], 2)], ids=["success", "error"]
)
def test_nothing_is_left_when_it_ends_by_itself(
    tmp_path: Path, more: list[str], status: int
) -> None:
    mark = uuid.uuid4().hex
    running = begin(tmp_path, mark, *more)
    assert running.wait(PATIENCE) == status, (tmp_path / "up.log").read_text()
    nothing_left(tmp_path, mark)


def nothing_left(folder: Path, mark: str) -> None:
    assert soak.marked(mark, MARK) == []
    assert soak.left_in(folder / "tmp") == []


@by_hand
def test_a_key_that_is_refused_gives_up(tmp_path: Path) -> None:
    """One that nobody registered, and that of a node that is there, which is not disturbed."""
    with bare_federation(tmp_path) as there:
        own = node_command(there, tmp_path, "own", 0)
        twin = node_command(there, tmp_path, "own", 1, tmp_path / "twin")
        keyed(there, tmp_path, "stranger", registered=False)
        stranger = node_command(there, tmp_path, "stranger", 1)
        with (
            joined(own, tmp_path, "own") as first,
            program(twin, tmp_path / "twin.log") as second,
            program(stranger, tmp_path / "stranger.log") as third,
            program(own, tmp_path / "again.log") as again,
        ):
            assert again.wait(PATIENCE) == 2
            assert "in use by another run" in (tmp_path / "again.log").read_text()
            assert second.wait(_JOIN_SECONDS + PATIENCE) == 1
            assert third.wait(PATIENCE) == 1
            for name in ("twin", "stranger"):
                said = (tmp_path / f"{name}.log").read_text()
                assert "refuses its key" in said and len(said.splitlines()) < 10
            assert first.poll() is None
            assert (tmp_path / "own.log").read_text().count("joined") == 1
