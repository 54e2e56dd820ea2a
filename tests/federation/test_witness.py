"""A witness keeps truth on its own disk, in bounds, and nothing of it reaches a message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedsim
from fedsim.federation.local import LocalGrid, identity
from fedsim.federation.serde import content_to_bytes
from fedsim.recording.witnessed import read_witnessed
from fedsim.types import FedsimError

RUN = 1


@pytest.fixture(autouse=True)
def server() -> Iterator[None]:
    with identity():
        yield


def images() -> torch.Tensor:
    return torch.arange(64.0).reshape(4, 1, 4, 4) / 64


def train(message: Message, _: Context) -> Message:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(images()), torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()
    arrays = ArrayRecord({name: value.clone() for name, value in model.state_dict().items()})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


def answered(*mods: Any) -> bytes:
    app = ClientApp(mods=list(mods))
    app.train()(train)
    grid = LocalGrid(app, 1, 60)
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    orders = [Message(content, node, "train") for node in grid.get_node_ids()]
    (reply,) = grid.send_and_receive(orders)
    return content_to_bytes(reply.content)


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
