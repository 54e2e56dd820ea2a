"""Replayed operations: the same bits, or none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim_attacks.fast_autograd._tape import Tape


def _count(function: Any) -> tuple[Any, list[int]]:
    calls = [0]

    def counted(*inputs: Tensor) -> tuple[Tensor, ...]:
        calls[0] += 1
        return function(*inputs)  # type: ignore[no-any-return]

    return counted, calls


def test_a_replay_computes_without_the_function() -> None:
    """It runs for the first result, for the recording and for the check, and never again."""
    function, calls = _count(lambda x, y: (x @ y, (x * 2).sum()))
    tape = Tape(function)
    for _ in range(6):
        x, y = torch.randn(3, 4), torch.randn(4, 2)
        product, doubled = tape(x, y)
        assert torch.equal(product, x @ y)
        assert torch.equal(doubled, (x * 2).sum())
    assert calls == [3]


def test_derivatives_are_recorded() -> None:
    """Autograd inside the function is part of what is replayed."""

    def slope(x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.sin().square().sum(), x)

    tape = Tape(slope)
    for _ in range(4):
        x = torch.randn(5)
        assert torch.equal(tape(x)[0], slope(x)[0])


def test_a_function_that_branches_on_values_is_called() -> None:
    """Recorded, it would take the branch of the first inputs."""
    tape = Tape(lambda x: (x if x.sum() > 0 else -x,))
    for value in (1.0, -1.0, 1.0, -1.0):
        assert float(tape(torch.tensor([value]))[0]) == 1.0


def test_a_function_that_does_not_repeat_itself_is_called() -> None:
    """What is random or has a memory is no list of operations."""
    memory = iter(range(100))
    tape = Tape(lambda x: (x + next(memory),))
    values = [float(tape(torch.zeros(()))[0]) for _ in range(6)]
    assert values == sorted(set(values))


def test_a_caller_may_write_into_results() -> None:
    """Each call has memory of its own."""
    tape = Tape(lambda x: (x * 2,))
    for _ in range(5):
        (result,) = tape(torch.ones(3))
        assert torch.equal(result, torch.full((3,), 2.0))
        result.zero_()
