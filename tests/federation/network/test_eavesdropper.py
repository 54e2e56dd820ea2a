"""What somebody on the wire sees: of plaintext the update bit for bit, of TLS sizes and times."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message, RecordDict
from network_support import Node, SuperLink, superlink, until
from torch import Tensor
from wire_support import Eavesdropper, passages, stored, updates

from fedsim.federation import wire
from fedsim.federation.network.keys import make_authority, make_node_key
from fedsim.types import FedsimError, Update


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    with superlink(tmp_path_factory.mktemp("plain")) as link:
        yield link


def parameters() -> dict[str, Tensor]:
    return {
        "conv.weight": torch.randn(16, 3, 3, 3),
        "scale": torch.tensor(2.0),
        "half": torch.randn(7).half(),
        "double": torch.randn(2, 5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "large": torch.randn(600, 1000),
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
        *[wire.order(3, *order, None)] * 3,
    ]
    answers: list[object] = [
        wire.answer(released[0], 0.5),
        wire.answer(released[1], None),
        wire.identity(7),
        Error(code=2, reason="broken"),
        wire.answer(Update(tensors={"other": torch.ones(2)}, num_examples=1), None),
    ]
    with (
        Eavesdropper("127.0.0.1:0", plain.address, capture, keep_bytes=True) as eavesdropper,
        plain.node(None, eavesdropper.address) as node,
    ):
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
    assert {stat.S_IMODE(path.stat().st_mode) for path in capture.iterdir()} == {0o600}


def test_a_capture_that_was_cut_off_gives_what_is_whole(plain: SuperLink, tmp_path: Path) -> None:
    capture = tmp_path / "capture"
    model = {"w": torch.randn(100, 100)}
    update = Update(tensors={"w": torch.randn(100, 100)}, num_examples=1)
    order = wire.order(1, wire.encode(model), wire.encode({}), None)
    with (
        Eavesdropper("127.0.0.1:0", plain.address, capture, keep_bytes=True) as eavesdropper,
        plain.node(None, eavesdropper.address) as node,
    ):
        exchange(plain, node, [order] * 2, [wire.answer(update, None)] * 2)
    assert len(list(updates(capture))) == 2
    (longest,) = sorted(capture.glob("*.to_server"), key=lambda path: path.stat().st_size)[-1:]
    content = longest.read_bytes()
    for size in range(0, len(content), 1009):
        longest.write_bytes(content[:size])
        assert len(list(updates(capture))) <= 2


def test_tls_gives_sizes_and_times_alone(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "keys", ["127.0.0.1"])
    public = make_node_key(tmp_path / "keys" / "node")
    capture = tmp_path / "capture"
    model = {"w": torch.randn(300, 1000)}
    update = Update(tensors={"w": torch.randn(300, 1000)}, num_examples=1)
    with superlink(tmp_path, authority) as link:
        link.register(public)
        with (
            Eavesdropper("127.0.0.1:0", link.address, capture, keep_bytes=True) as eavesdropper,
            link.node(tmp_path / "keys" / "node", eavesdropper.address) as node,
        ):
            order = wire.order(1, wire.encode(model), wire.encode({}), None)
            exchange(link, node, [order], [wire.answer(update, None)])
    seen = passages(capture)
    assert all(passage.tls for passage in seen)
    sent = sum(passage.size for passage in seen if passage.direction == "to_server")
    assert 1_200_000 < sent < 1_300_000
    assert [passage.time for passage in seen] == sorted(passage.time for passage in seen)
    with pytest.raises(FedsimError, match="sizes and times alone"):
        updates(capture)
    some = update.tensors["w"].numpy().tobytes()[:16]
    assert not any(some in path.read_bytes() for path in capture.iterdir())


def test_bytes_are_kept_only_if_asked_for(tmp_path: Path) -> None:
    capture = tmp_path / "capture"
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        with Eavesdropper("127.0.0.1:0", target, capture) as eavesdropper:
            host, port = eavesdropper.address.split(":")
            with socket.create_connection((host, int(port))) as client:
                inside, _ = server.accept()
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
                client.shutdown(socket.SHUT_WR)
                with inside:
                    assert inside.makefile("rb").read() == b"GET / HTTP/1.1\r\n\r\n"
                    inside.sendall(b"answer")
                assert client.makefile("rb").read() == b"answer"
    assert [(p.connection, p.direction, p.size, p.tls) for p in passages(capture)] == [
        (1, "to_server", 18, False),
        (1, "to_client", 6, False),
    ]
    assert not stored(capture, 1, "to_server").exists()
    with pytest.raises(FedsimError, match="keep_bytes"):
        updates(capture)


def test_it_listens_on_loopback_alone_and_replaces_no_capture(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="loopback"), Eavesdropper("0.0.0.0:0", "a:1", tmp_path):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(FedsimError, match="not empty"),
        Eavesdropper("127.0.0.1:0", "a:1", tmp_path),
    ):
        pass
