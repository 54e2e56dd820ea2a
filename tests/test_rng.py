"""Streams depend on their path alone."""

from __future__ import annotations

import pytest
import torch

from fedsim import rng


def test_streams_are_fixed_across_processes_and_versions() -> None:
    assert rng.derive(7, "batch", 1, 0) == 6937260939950972246
    assert rng.derive(7, "batch", 1, 0) != rng.derive(7, "batch", 10)
    assert rng.derive(7, "a", "b") != rng.derive(7, "ab")
    assert rng.derive(7, 1) != rng.derive(7, "1")


def test_streams_of_neighbours_are_unrelated() -> None:
    draws = torch.stack([torch.randn(4096, generator=rng.generator(7, "x", i)) for i in range(8)])
    correlation = torch.corrcoef(draws) - torch.eye(8)
    assert correlation.abs().max() < 0.08  # 5 standard deviations of 1 / sqrt(4096)


@pytest.mark.parametrize("byte", [0, 255])
def test_the_ends_of_the_interval_are_never_drawn(
    byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be an infinite noise."""
    monkeypatch.setattr(rng.Stream, "keystream", lambda self, count: bytes([byte]) * count)
    stream = rng.generator(7, "x")
    assert 0 < float(rng.uniform((1,), stream)) < 1
    assert rng.normal((1,), stream, torch.float64).isfinite().all()


def test_the_global_stream_is_restored() -> None:
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    with rng.global_stream(5):
        first = torch.randn(3)
    assert torch.equal(torch.randn(3), expected)
    with rng.global_stream(5):
        assert torch.equal(torch.randn(3), first)
