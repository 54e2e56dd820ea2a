"""What is written piece by piece is a safetensors file like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from fedsim.recording import streaming
from fedsim.types import FedsimError


def test_it_reads_as_it_was_written(tmp_path: Path) -> None:
    tensors = {
        "flag": np.array([True, False, True]),
        "count": np.array(7),
        "half": np.array([0.5, -2.0, 1.0], dtype=np.float16),
        '"quoted" ünï\0': np.arange(6, dtype=np.float32).reshape(2, 3),
        "none": np.zeros((0, 4), dtype=np.float32),
        "wide": np.frombuffer(b"0123456789abcdef", dtype=np.float64),
    }
    path = tmp_path / "deep" / "x.safetensors"
    digest = streaming.write(path, tensors)
    assert digest == xxhash.xxh3_128(path.read_bytes()).hexdigest()
    assert digest == streaming.digest_of(tensors) == streaming.digest_of_file(path)
    streaming.write(path.with_name("known.safetensors"), tensors, digest)
    assert path.read_bytes() == path.with_name("known.safetensors").read_bytes()
    path.with_name("known.safetensors").unlink()
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert np.array_equal(found[name], value)
    assert [each.name for each in path.parent.iterdir()] == ["x.safetensors"]


def test_a_type_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="complex64 cannot be recorded"):
        streaming.write(tmp_path / "x.safetensors", {"w": np.zeros(2, dtype=np.complex64)})
    assert not list(tmp_path.iterdir())
