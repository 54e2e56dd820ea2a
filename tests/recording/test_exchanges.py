"""What a recorder writes is what it was handed, however its memory is laid out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedsim.recording.exchanges import Recorder
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
