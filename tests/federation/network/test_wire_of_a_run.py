"""A deployed run on a plaintext loopback: the wire, the server and a participant side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from network_support import superlink, until
from wire_support import eavesdropper, updates

import fedsim
from fedsim import pipeline
from fedsim.federation.network.link import Link
from fedsim.recording.files import load_observation
from fedsim.types import FedsimError, Tensors

pytestmark = [pytest.mark.by_hand, pytest.mark.usefixtures("attacks_here")]

SCENARIO: dict[str, Any] = {
    "name": "wire",
    "data": {"source": {"name": "digits", "size": 8}, "clients": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 2, "local": {"batch_size": 2, "lr": 0.1}},
    "attacks": ["label_inference"],
    "observe": {
        "rounds": [1],
        "clients": "all",
        "vantages": ["server", "client", "eavesdropper"],
    },
    "federation": {"engine": "deployment", "tls": False, "timeout": 60},
}


@contextmanager
def node(client: int, superlink: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A node that draws from a secret of its own."""
    home.mkdir()
    command = [sys.executable, "-m", "fedsim", "node", "--superlink", superlink]
    command += ["--client", str(client), "--data", "scenario", "--home", str(home)]
    with (home / "said.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def joined(home: Path) -> bool:
    return b"joined" in (home / "said.log").read_bytes()


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_the_wire_carries_what_the_server_records_bit_for_bit(tmp_path: Path) -> None:
    out, capture = tmp_path / "out", tmp_path / "capture"
    homes = [tmp_path / f"node-{client}" for client in (0, 1)]
    with ExitStack() as stack:
        there = stack.enter_context(superlink(tmp_path))
        spy = stack.enter_context(eavesdropper(there.address, capture))
        for client, home in enumerate(homes):
            stack.enter_context(node(client, spy, home))
        until(lambda: all(map(joined, homes)), "both nodes join")
        link = Link(superlink=there.address)
        encrypted = {**SCENARIO, "federation": {"engine": "deployment"}}
        with pytest.raises(FedsimError, match=r"federation\.tls: true, and the link .* plaintext"):
            fedsim.run(encrypted, out=tmp_path / "refused", workers=1, link=link)
        finished = fedsim.run(SCENARIO, out=out, workers=1, link=link)
    assert {row["status"] for row in finished.rows()} == {"unscored"}
    heard = [seen for seen in updates(capture) if seen.order.round == 1]
    assert len(heard) == 2
    for client in (0, 1):
        recorded = load_observation(
            out / f"observations/none/round-0001/client-000{client}-training"
        )
        wire = load_observation(out / f"observations/none/round-0001/wire-000{client}-training")
        assert equal(wire.update, recorded.update)
        (same,) = [seen for seen in heard if equal(seen.answer.update.tensors, recorded.update)]
        assert equal(same.order.parameters, recorded.parameters)
    assert not list(out.rglob("participant-*"))

    collected = pipeline.collect(out, homes=homes, workers=1)
    rows = collected.rows()
    assert [(row["vantage"], row["client"], row["status"]) for row in rows] == [
        (vantage, client, "ok") for vantage in SCENARIO["observe"]["vantages"] for client in (0, 1)
    ]
    seen = load_observation(out / "observations/none/round-0001/participant-0000-training")
    sent = load_observation(out / "observations/none/round-0001/client-0001-training")
    for name, value in sent.update.items():
        assert torch.allclose(seen.update[name], value, rtol=0, atol=1e-4 * value.abs().max())
