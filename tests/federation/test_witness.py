"""A witness keeps truth on its own disk, in bounds, and nothing of it reaches a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from torch import nn

import fedsim
from fedsim.federation.local import LocalGrid, identity
from fedsim.recording.witnessed import read_witnessed
from fedsim.types import FedsimError

RUN = 1


@pytest.fixture(autouse=True)
def server() -> Iterator[None]:
    with identity():
        yield


def images() -> torch.Tensor:
    return torch.arange(64.0).reshape(4, 1, 4, 4) / 64


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(images()), torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()
    return model


def answer(message: Message, training: Callable[[], nn.Module]) -> Message:
    model = training()
    arrays = ArrayRecord({name: value.clone() for name, value in model.state_dict().items()})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


def answered(*mods: Any, training: Callable[[], nn.Module] = trained) -> bytes:
    app = ClientApp(mods=list(mods))
    app.train()(lambda message, _: answer(message, training))
    grid = LocalGrid(app, 1, 60)
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    orders = [Message(content, node, "train") for node in grid.get_node_ids()]
    (reply,) = grid.send_and_receive(orders)
    return recorddict_to_proto(reply.content).SerializeToString()


def test_truth_is_the_owners_alone_and_no_message_tells_of_it(tmp_path: Path) -> None:
    assert answered(fedsim.witness(tmp_path)) == answered()
    (testimony,) = read_witnessed(tmp_path, RUN).values()
    assert torch.equal(testimony.images()[0], images())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    assert [path.stat().st_mode & 0o077 for path in files] == [0, 0]


def test_a_full_witness_keeps_nothing_and_stops_no_app(tmp_path: Path) -> None:
    assert answered(fedsim.witness(tmp_path, max_gib=100 / 2**30)) == answered()
    with pytest.raises(FedsimError, match="nothing was witnessed"):
        read_witnessed(tmp_path, RUN)


def stepped(model: nn.Module, inputs: torch.Tensor, loss: Callable[..., torch.Tensor]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model(inputs)).backward()
    optimizer.step()
    return model


def text() -> nn.Module:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, 3))
    words = torch.randint(9, (4, 6))
    return stepped(model, words, lambda out: nn.CrossEntropyLoss()(out, torch.tensor([0, 1, 2, 0])))


def table() -> nn.Module:
    labels = torch.tensor([0, 1, 2, 0])
    return stepped(nn.Linear(5, 3), torch.rand(4, 5), lambda out: F.cross_entropy(out, labels))


def segmentation() -> nn.Module:
    labels = torch.randint(2, (4, 4, 4))
    return stepped(nn.Conv2d(1, 2, 1), images(), lambda out: F.cross_entropy(out, labels))


def several_labels() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    return stepped(model, images(), lambda out: nn.BCEWithLogitsLoss()(out, torch.rand(4, 3)))


def per_sample() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(model, weights, (image[None],))
        return F.cross_entropy(outputs, torch.tensor([0]))

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, images())
    return model


def without_gradients() -> nn.Module:
    with torch.no_grad():
        model = nn.Linear(5, 3)
        model(torch.rand(4, 5))
    return model


def test_an_app_that_cannot_be_attacked_is_told_why(tmp_path: Path) -> None:
    """It has the witness: that it should add one, or run again, is no remedy."""
    cases = (text, table, segmentation, several_labels, without_gradients, per_sample)
    told = []
    for case in cases:
        out = tmp_path / case.__name__
        answered(fedsim.witness(out), training=case)
        with pytest.raises(FedsimError) as refused:
            read_witnessed(out, RUN)
        told.append(str(refused.value).removeprefix(str(out)))
        assert "mods=" not in told[-1]
        (path,) = out.rglob("*.json")
        assert path.stat().st_mode & 0o077 == 0
    assert "torch.int64 of shape (4, 6)" in told[0]
    assert "torch.float32 of shape (4, 5)" in told[1]
    assert len(set(told)) == 5, "text, tables, no single class, nothing at all, and a fault"
    with pytest.raises(FedsimError, match="mods="):
        read_witnessed(tmp_path / "elsewhere", RUN)


def test_a_reason_drives_no_terminal(tmp_path: Path) -> None:
    answered(fedsim.witness(tmp_path), training=text)
    (path,) = tmp_path.rglob("unseen-*.json")
    path.write_text('{"reason": "\\u001b[2J' + "x" * 9000 + '"}')
    with pytest.raises(FedsimError) as refused:
        read_witnessed(tmp_path, RUN)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000
    path.write_text("[1]")
    with pytest.raises(FedsimError, match="not what a witness writes"):
        read_witnessed(tmp_path, RUN)
