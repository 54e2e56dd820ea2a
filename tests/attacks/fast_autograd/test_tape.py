"""Replayed operations: the same bits, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretended_device import DEVICE, pretended
from torch import Tensor

from fedsim_attacks.fast_autograd._tape import Tape, _NoReading

over_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def _count(function: Any) -> tuple[Any, list[int]]:
    calls = [0]

    def counted(*inputs: Tensor) -> tuple[Tensor, ...]:
        calls[0] += 1
        return function(*inputs)  # type: ignore[no-any-return]

    return counted, calls


@over_devices
def test_a_replay_computes_without_the_function(device: str) -> None:
    """It runs for the first result, for the recording and for the check, and never again."""
    function, calls = _count(lambda x, y: (x @ y, (x * 2).sum()))
    tape = Tape(function)
    for _ in range(6):
        x, y = torch.randn(3, 4, device=device), torch.randn(4, 2, device=device)
        product, doubled = tape(x, y)
        torch.testing.assert_close(product, x @ y)
        torch.testing.assert_close(doubled, (x * 2).sum())
    # A graph is looked at, and warmed up twice, before it is captured.
    assert calls == [3 if device == "cpu" else 6]


@over_devices
def test_a_tensor_that_is_written_in_place_is_read_anew(device: str) -> None:
    """As the width of jumps is, that narrows over a descent; and methods are recorded, too."""

    class Scaled:
        factor = torch.ones((), device=device)
        calls = 0

        def times(self, x: Tensor) -> tuple[Tensor, ...]:
            self.calls += 1
            return (self.factor * x,)

    scaled = Scaled()
    tape = Tape(scaled.times)
    for step in range(1, 6):
        scaled.factor.fill_(step)
        x = torch.ones(3, device=device)
        assert torch.equal(tape(x)[0], torch.full((3,), float(step), device=device))
    assert scaled.calls == (3 if device == "cpu" else 6)


@over_devices
def test_a_function_that_branches_on_values_is_called(device: str) -> None:
    """Recorded, it would take the branch of the first inputs."""
    tape = Tape(lambda x: (x if x.sum() > 0 else -x,))
    for value in (1.0, -1.0, 1.0, -1.0):
        assert float(tape(torch.tensor([value], device=device))[0]) == 1.0


@over_devices
def test_a_function_that_does_not_repeat_itself_is_called(device: str) -> None:
    """What is random or has a memory is no list of operations."""
    memory = iter(range(100))
    tape = Tape(lambda x: (x + next(memory),))
    values = [float(tape(torch.zeros((), device=device))[0]) for _ in range(6)]
    assert values == sorted(set(values))


@over_devices
def test_a_caller_may_write_into_results(device: str) -> None:
    """Each call has memory of its own."""
    tape = Tape(lambda x: (x * 2,))
    for _ in range(5):
        (result,) = tape(torch.ones(3, device=device))
        assert torch.equal(result, torch.full((3,), 2.0, device=device))
        result.zero_()


def test_what_reads_a_value_or_another_device_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would keep what it read; and a capture that fails leaves its stream behind."""
    with pretended(monkeypatch):
        there, number = torch.ones(3).to(DEVICE), torch.ones(())
        with _NoReading():  # type: ignore[no-untyped-call]
            assert (2.0 * there).sum().ndim == 0
            for reading in (lambda: float(there.sum()), lambda: there * number, there.nonzero):
                with pytest.raises(RuntimeError, match="reads"):
                    reading()
