"""A tap lets everything through, records what passed, and never stops an app."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedsim
from fedsim.federation.local import LocalGrid, identity
from fedsim.recording.exchanges import left_out, read_exchanges, run_folder
from fedsim.types import FedsimError


@pytest.fixture(autouse=True)
def server() -> Iterator[None]:
    with identity():
        yield


def client(answer: Any = None) -> ClientApp:
    """Adds its partition-id plus 1 to the weights."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if answer is not None:
            return Message(answer(message, context), reply_to=message)
        sent = message.content["arrays"].to_torch_state_dict()  # type: ignore[union-attr]
        moved = {
            name: value + int(context.node_config["partition-id"]) + 1
            for name, value in sent.items()
        }
        metrics = MetricRecord({"num-examples": 5, "train_loss": float("nan"), "other": [1, 2]})
        return Message(
            RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message
        )

    return app


def order(round: int | None = 1, **arrays: torch.Tensor) -> RecordDict:
    config = ConfigRecord({"lr": 0.5, "secret": b"bytes"})
    if round is not None:
        config["server-round"] = round
    tensors = arrays or {"a.weight": torch.arange(4.0)}
    return RecordDict({"arrays": ArrayRecord(tensors), "config": config})


def messages(grid: LocalGrid, content: RecordDict, kind: str = "train") -> list[Message]:
    return [Message(content, node, kind) for node in grid.get_node_ids()]


def test_what_was_sent_and_answered_is_recorded(tmp_path: Path) -> None:
    plain = LocalGrid(client(), 3, 60)
    grid = fedsim.tap(plain, out=tmp_path)
    replies = list(grid.send_and_receive(messages(plain, order(7))))
    found = read_exchanges(run_folder(tmp_path))
    assert [(each.round, each.node_id) for each in found] == [(7, 2), (7, 3), (7, 4)]
    for place, exchange in enumerate(found):
        assert torch.equal(exchange.sent()["a.weight"], torch.arange(4.0))
        assert torch.equal(exchange.reply()["a.weight"], torch.arange(4.0) + place + 1)
        told = replies[place].content["arrays"].to_torch_state_dict()  # type: ignore[union-attr]
        assert torch.equal(told["a.weight"], exchange.reply()["a.weight"])
        assert exchange.config["config"] == {"lr": 0.5, "server-round": 7}
        assert exchange.number("num-examples") == 5
        assert exchange.metrics["metrics"]["train_loss"] == "nan"
    assert len(list(tmp_path.rglob("broadcast-*"))) == 1


def test_orders_that_are_pushed_and_pulled_are_recorded_too(tmp_path: Path) -> None:
    plain = LocalGrid(client(), 2, 60)
    grid = fedsim.tap(plain, out=tmp_path)
    ids = list(grid.push_messages(messages(plain, order(None))))
    assert len(list(grid.pull_messages(ids))) == 2
    list(grid.send_and_receive(messages(plain, order(None))))
    assert [each.round for each in read_exchanges(run_folder(tmp_path))] == [1, 1, 2, 2]


def test_only_training_is_recorded(tmp_path: Path) -> None:
    plain = LocalGrid(client(), 2, 60)
    list(fedsim.tap(plain, out=tmp_path).send_and_receive(messages(plain, order(), "evaluate")))
    with pytest.raises(FedsimError, match="no recorded run in it"):
        run_folder(tmp_path)


def test_rounds_clients_and_the_disk_are_bounded(tmp_path: Path) -> None:
    plain = LocalGrid(client(), 4, 60)
    grid = fedsim.tap(plain, out=tmp_path / "some", rounds=[2, 3], clients=2)
    full = fedsim.tap(plain, out=tmp_path / "full", max_gib=3000 / 2**30)
    for round in (1, 2, 3):
        content = order(round, w=torch.full((250,), float(round)))
        for tapped in (grid, full):
            assert len(list(tapped.send_and_receive(messages(plain, content)))) == 4
    found = read_exchanges(run_folder(tmp_path / "some"))
    assert [(each.round, each.node_id) for each in found] == [(2, 2), (2, 3), (3, 2), (3, 3)]
    folder = run_folder(tmp_path / "full")
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) <= 3000 + 1000
    assert any(line.startswith("no room below max_gib: ") for line in left_out(folder))


def test_no_name_in_a_message_is_part_of_a_path(tmp_path: Path) -> None:
    evil = "../../../evil\0/x"

    def answer(message: Message, _: Context) -> RecordDict:
        return RecordDict(
            {evil: ArrayRecord({evil: Array(np.ones(2))}), "m": MetricRecord({evil * 99: 1})}
        )

    plain = LocalGrid(client(answer), 1, 60)
    grid = fedsim.tap(plain, out=tmp_path / "in")
    list(grid.send_and_receive(messages(plain, order(1, **{evil: torch.zeros(2)}))))
    (exchange,) = read_exchanges(run_folder(tmp_path / "in"))
    assert list(exchange.reply()) == [evil]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert all(len(key) <= 200 for key in exchange.metrics["m"])


@pytest.mark.parametrize("fault", ["nothing", "two", "pickled", "error"])
def test_an_answer_that_cannot_be_recorded_reaches_the_app(fault: str, tmp_path: Path) -> None:
    def answer(message: Message, _: Context) -> RecordDict:
        arrays = ArrayRecord({"w": Array(np.ones(2))})
        if fault == "error":
            raise RuntimeError("broken")
        if fault == "pickled":
            data = b"\x93NUMPY\x01\x00\x04\x00no!\n"
            arrays = ArrayRecord({"w": Array("object", (1,), "numpy.ndarray", data)})
        return RecordDict(
            {"nothing": {}, "two": {"x": arrays, "y": arrays}}.get(fault, {"x": arrays})
        )

    plain = LocalGrid(client(answer), 1, 60)
    (reply,) = fedsim.tap(plain, out=tmp_path).send_and_receive(messages(plain, order()))
    assert reply.has_error() == (fault == "error")
    assert left_out(run_folder(tmp_path))
    with pytest.raises(FedsimError, match="no exchange in it"):
        read_exchanges(run_folder(tmp_path))


def test_a_full_disk_stops_no_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedsim.recording.streaming.write", refuse)
    plain = LocalGrid(client(), 2, 60)
    assert (
        len(list(fedsim.tap(plain, out=tmp_path).send_and_receive(messages(plain, order())))) == 2
    )


def test_a_tapped_strategy_taps_its_grid(tmp_path: Path) -> None:
    plain = LocalGrid(client(), 2, 60)
    strategy = FedAvg(fraction_evaluate=0.0)
    assert fedsim.tap(strategy, out=tmp_path) is strategy
    result = strategy.start(plain, order()["arrays"], num_rounds=2)  # type: ignore[arg-type]
    weights = result.arrays.to_torch_state_dict()["a.weight"]
    assert torch.equal(weights, torch.arange(4.0) + 3.0)  # the mean of 1 and 2, twice
    assert len(read_exchanges(run_folder(tmp_path))) == 4


def test_a_client_records_what_it_lets_out(tmp_path: Path) -> None:
    def later(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        arrays = reply.content["arrays"].to_torch_state_dict()
        reply.content["arrays"] = ArrayRecord({name: value * 0 for name, value in arrays.items()})
        return reply

    app = ClientApp(mods=[fedsim.client_tap(tmp_path), later])
    app.train()(_move)
    plain = LocalGrid(app, 2, 60)
    for _ in range(2):
        list(plain.send_and_receive(messages(plain, order(None))))
    found = read_exchanges(run_folder(tmp_path))
    assert [(each.round, each.node_id) for each in found] == [(1, 2), (1, 3), (2, 2), (2, 3)]
    assert all(float(each.reply()["a.weight"].abs().sum()) == 0 for each in found)


def _move(message: Message, _: Context) -> Message:
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    plain = LocalGrid(client(), 1, 60)
    list(fedsim.tap(plain, out=tmp_path).send_and_receive(messages(plain, order())))
    folder = run_folder(tmp_path)
    (exchange,) = read_exchanges(folder)
    file = exchange.path.with_suffix(".safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(FedsimError, match="does not match the checksum"):
        exchange.reply()
    document = json.loads(exchange.path.read_text())
    exchange.path.write_text(json.dumps({**document, "broadcast": "../../etc/passwd"}))
    with pytest.raises(FedsimError, match="not what a tap records"):
        read_exchanges(folder)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rounds": [0]}, "rounds: expected 1 to"),
        ({"clients": 0}, "clients: expected at least 1"),
        ({"max_gib": 0}, "max_gib: expected a finite number above 0"),
    ],
)
def test_a_tap_out_of_range_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match=said):
        fedsim.tap(FedAvg(), out=tmp_path, **options)


def test_nothing_else_is_tapped(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="expected a Grid or a Strategy"):
        fedsim.tap("grid", out=tmp_path)  # type: ignore[call-overload]
