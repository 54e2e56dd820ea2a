"""What a recorder writes is what it was handed, however its memory is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.recording import exchanges
from fedsim.recording.exchanges import NO_ROOM, Recorder, left_out
from fedsim.recording.files import read_tensors


def test_arrays_of_any_order_are_recorded_as_they_are(tmp_path: Path) -> None:
    rows = np.arange(6.0).reshape(2, 3)
    arrays = {
        "fortran": np.asfortranarray(rows),
        "every second": np.arange(9)[::2],
        "repeated": np.broadcast_to(np.float32(3), (2, 2)),
        "scalar": np.array(3.0),
    }
    recorder = Recorder(tmp_path, 7, "server", rounds=None, clients=None, max_bytes=10**6)
    recorder.save_broadcast(1, arrays)
    (path,) = tmp_path.rglob("*.safetensors")
    found = read_tensors(path)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert torch.equal(found[name], torch.from_numpy(array.copy())), name


def test_an_answer_without_room_leaves_nothing_and_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, 7, "server", rounds=None, clients=None, max_bytes=2000)
    digest = recorder.save_broadcast(1, {"w": np.zeros(1)})
    assert digest is not None
    order: dict[str, Any] = {"round": 1, "node_id": 3, "message_id": "a", "broadcast": digest}
    monkeypatch.setattr(exchanges, "save", lambda _: pytest.fail("copied"))
    recorder.save_reply({"w": np.zeros(1000)}, **order, config={}, metrics={})
    assert not list(tmp_path.rglob("node-*"))
    assert left_out(recorder.folder) == [f"{NO_ROOM}: 1 message"]
