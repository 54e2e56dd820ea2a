"""What is written piece by piece is a safetensors file like any other."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsim.recording import streaming
from fedsim.types import FedsimError


def test_it_reads_as_it_was_written(tmp_path: Path) -> None:
    tensors = {
        "flag": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "half": torch.randn(3).to(torch.bfloat16),
        '"quoted" ünï\0': torch.randn(2, 3),
        "none": torch.zeros(0, 4),
        "wide": torch.randn(2, dtype=torch.float64),
    }
    path = tmp_path / "deep" / "x.safetensors"
    digest = streaming.write(path, tensors)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest() == streaming.digest_of(tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    assert [each.name for each in path.parent.iterdir()] == ["x.safetensors"]


def test_a_type_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="complex64 cannot be recorded"):
        streaming.write(tmp_path / "x.safetensors", {"w": torch.zeros(2, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())
