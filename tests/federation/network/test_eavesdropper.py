"""A plaintext SuperLink: the wire shows updates bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message, RecordDict
from network_support import Node, SuperLink, superlink, until
from torch import Tensor
from wire_support import eavesdropper, updates

from fedsim.federation import wire
from fedsim.types import Update


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    with superlink(tmp_path_factory.mktemp("plain")) as link:
        yield link


def parameters() -> dict[str, Tensor]:
    return {
        "conv.weight": torch.randn(16, 3, 3, 3),
        "scale": torch.tensor(2.0),
        "half": torch.randn(7).half(),
        "large": torch.randn(60, 100),
    }


def like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """An update, some of its values as odd as floats can be."""
    update = {name: torch.randn_like(value) for name, value in tensors.items()}
    update["large"][0, :4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    update["large"].view(torch.int32)[0, 4] = 0x7FA12345  # a NaN with a payload
    return update


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes())
        for name, value in tensors.items()
    }


def exchange(link: SuperLink, node: Node, orders: list[RecordDict], answers: list[object]) -> None:
    """Sends orders to a node, which answers each."""
    with link.run() as grid:
        for order, answer in zip(orders, answers, strict=True):
            (sent,) = grid.push_messages([Message(order, node.identifier, "train", group_id="1")])
            pulled = node.pull()
            assert isinstance(answer, RecordDict | Error)
            node.push(Message(answer, reply_to=pulled))
            until(lambda sent=sent: list(grid.pull_messages([sent])), "a reply")


@pytest.mark.slow
def test_plaintext_gives_the_update_bit_for_bit(plain: SuperLink, tmp_path: Path) -> None:
    torch.manual_seed(0)
    capture = tmp_path / "capture"
    model, buffers = parameters(), {"mean": torch.zeros(3)}
    probe = wire.Probe(batch_size=2, trial=1, release=0)
    released = [
        Update(tensors=like(model), num_examples=3, buffers=buffers),
        Update(tensors=like(model), num_examples=4),  # its statistics stay with the client
    ]
    order = [wire.encode(model), wire.encode(buffers)]
    orders = [
        wire.order(1, *order, None),
        wire.order(2, *order, probe),
        *[wire.order(3, *order, None)] * 2,
    ]
    answers: list[object] = [
        wire.answer(released[0], 0.5),
        wire.answer(released[1], None),
        Error(code=2, reason="broken"),
        wire.answer(Update(tensors={"other": torch.ones(2)}, num_examples=1), None),
    ]
    with eavesdropper(plain.address, capture) as address, plain.node(None, address) as node:
        exchange(plain, node, orders, answers)
    first, second = updates(capture)
    assert {first.node, second.node} == {node.identifier}
    for overheard, update in zip((first, second), released, strict=True):
        assert bits(dict(overheard.answer.update.tensors)) == bits(dict(update.tensors))
        assert bits(dict(overheard.answer.update.buffers)) == bits(dict(update.buffers))
        assert overheard.answer.update.num_examples == update.num_examples
        assert bits(dict(overheard.order.parameters)) == bits(model)
    assert (first.answer.loss, second.answer.loss) == (0.5, None)
    assert (first.order.round, second.order.round) == (1, 2)
    assert (first.order.probe, second.order.probe) == (None, probe)
