"""Tap and witness record what passed and what was trained on, and never stop an app."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation import secaggplus_constants
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedsim
from fedsim.federation.local import LocalGrid, identity
from fedsim.recording import behind
from fedsim.recording.exchanges import left_out, read_exchanges, run_folder
from fedsim.recording.witnessed import read_witnessed
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


def tapped(
    out: Path, answer: Any = None, clients: int = 1, content: Any = None, **options: Any
) -> list[Message]:
    """What clients answer to an order, through a tap."""
    plain = LocalGrid(client(answer), clients, 60)
    grid = fedsim.tap(plain, out=out, **options)
    return list(grid.send_and_receive(messages(plain, content or order())))


def test_what_was_sent_and_answered_is_recorded(tmp_path: Path) -> None:
    plain = LocalGrid(client(), 3, 60)
    grid = fedsim.tap(plain, out=tmp_path)
    replies = list(grid.send_and_receive(messages(plain, order(7))))
    found = read_exchanges(run_folder(tmp_path))
    assert [(each.round, each.node_id) for each in found] == [(7, 2), (7, 3), (7, 4)]
    for place, exchange in enumerate(found):
        assert torch.equal(exchange.read_broadcast()["a.weight"], torch.arange(4.0))
        assert torch.equal(exchange.read_reply()["a.weight"], torch.arange(4.0) + place + 1)
        told = replies[place].content["arrays"].to_torch_state_dict()  # type: ignore[union-attr]
        assert torch.equal(told["a.weight"], exchange.read_reply()["a.weight"])
        assert exchange.config["config"] == {"lr": 0.5, "server-round": 7}
        assert exchange.number("num-examples") == 5
        assert exchange.metrics["metrics"]["train_loss"] == "nan"
    assert len(list(tmp_path.rglob("broadcast-*"))) == 1


def test_only_training_is_recorded(tmp_path: Path) -> None:
    plain = LocalGrid(client(), 2, 60)
    list(fedsim.tap(plain, out=tmp_path).send_and_receive(messages(plain, order(), "evaluate")))
    with pytest.raises(FedsimError, match="no recorded run in it"):
        run_folder(tmp_path)


def test_orders_that_are_pushed_and_pulled_are_recorded_too(tmp_path: Path) -> None:
    plain = LocalGrid(client(), 2, 60)
    grid = fedsim.tap(plain, out=tmp_path)
    ids = list(grid.push_messages(messages(plain, order(None))))
    assert len(list(grid.pull_messages(ids))) == 2
    list(grid.send_and_receive(messages(plain, order(None))))
    list(grid.send_and_receive(messages(plain, order(None), "evaluate")))
    assert [each.round for each in read_exchanges(run_folder(tmp_path))] == [1, 1, 2, 2]


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

    tapped(tmp_path / "in", answer, content=order(1, **{evil: torch.zeros(2)}))
    (exchange,) = read_exchanges(run_folder(tmp_path / "in"))
    assert list(exchange.read_reply()) == [evil]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert all(len(key) <= 200 for key in exchange.metrics["m"])


@pytest.mark.parametrize("fault", ["nothing", "two", "pickled", "unnameable", "type", "error"])
def test_an_answer_that_cannot_be_recorded_reaches_the_app(fault: str, tmp_path: Path) -> None:
    def answer(message: Message, _: Context) -> RecordDict:
        arrays = ArrayRecord({"w": Array(np.ones(2))})
        if fault == "error":
            raise RuntimeError("broken")
        if fault == "pickled":
            data = b"\x93NUMPY\x01\x00\x04\x00no!\n"
            arrays = ArrayRecord({"w": Array("object", (1,), "numpy.ndarray", data)})
        if fault == "unnameable":  # of which no file of tensors has an entry
            arrays = ArrayRecord({"__metadata__": Array(np.ones(1, dtype=np.float32))})
        if fault == "type":  # that not every version of PyTorch has
            arrays = ArrayRecord({"w": Array(np.ones(1, dtype=np.uint16))})
        return RecordDict(
            {"nothing": {}, "two": {"x": arrays, "y": arrays}}.get(fault, {"x": arrays})
        )

    (reply,) = tapped(tmp_path, answer)
    assert reply.has_error() == (fault == "error")
    assert left_out(run_folder(tmp_path)) and not list(tmp_path.rglob("node-*"))
    with pytest.raises(FedsimError, match="no exchange in it"):
        read_exchanges(run_folder(tmp_path))


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
    assert all(float(each.read_reply()["a.weight"].abs().sum()) == 0 for each in found)


def _move(message: Message, _: Context) -> Message:
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    tapped(tmp_path)
    folder = run_folder(tmp_path)
    (exchange,) = read_exchanges(folder)
    file = exchange.path.with_suffix(".safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(FedsimError, match="does not match the checksum"):
        exchange.read_reply()
    file.unlink()
    with pytest.raises(FedsimError, match="cannot be read"):
        exchange.read_reply()
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
    with pytest.raises(FedsimError, match="expected a Grid or a Strategy"):
        fedsim.tap("grid", out=tmp_path)  # type: ignore[type-var]


def test_a_record_that_is_filled_anew_is_another_broadcast(tmp_path: Path) -> None:
    """Strategies that send each client its own model may use one record for all of them."""
    plain = LocalGrid(client(), 2, 60)
    grid = fedsim.tap(plain, out=tmp_path)
    content = order(1, w=torch.zeros(2))
    for place, node in enumerate(grid.get_node_ids()):
        own = Array(np.full(2, float(place), dtype=np.float32))
        content["arrays"]["w"] = own  # type: ignore[index, assignment]
        list(grid.send_and_receive([Message(content, node, "train")]))
    found = read_exchanges(run_folder(tmp_path))
    assert [float(each.read_broadcast()["w"][0]) for each in found] == [0.0, 1.0]


def test_another_nodes_answer_is_not_recorded_as_that_of_the_one_asked(tmp_path: Path) -> None:
    class Confused(LocalGrid):
        def send_and_receive(self, *arguments: Any, **named: Any) -> list[Message]:
            replies = super().send_and_receive(*arguments, **named)
            for reply in replies:
                reply.metadata.__dict__["_src_node_id"] = 99
            return replies

    plain = Confused(client(), 1, 60)
    grid = fedsim.tap(plain, out=tmp_path)
    assert len(list(grid.send_and_receive(messages(plain, order())))) == 1
    assert left_out(run_folder(tmp_path)) == ["another node answered than was asked: 1 message"]


def test_what_a_client_left_out_is_counted_over_all_its_messages(tmp_path: Path) -> None:
    app = ClientApp(mods=[fedsim.client_tap(tmp_path)])

    @app.train()
    def train(message: Message, _: Context) -> Message:
        return Message(RecordDict({}), reply_to=message)

    plain = LocalGrid(app, 2, 60)
    for round in (1, 2):
        list(plain.send_and_receive(messages(plain, order(round))))
    assert left_out(run_folder(tmp_path)) == [
        "a message holds 0 records of arrays, expected one: 4 messages"
    ]


def test_reasons_that_senders_make_up_are_bounded(tmp_path: Path) -> None:
    def answer(_: Message, context: Context) -> RecordDict:
        name = f"made up {context.node_id}"
        data = b"\x93NUMPY\x01\x00\x04\x00no!\n"
        return RecordDict({"x": ArrayRecord({name: Array("object", (1,), "numpy.ndarray", data)})})

    tapped(tmp_path, answer, 150)
    lines = left_out(run_folder(tmp_path))
    assert len(lines) == 101 and lines[-1] == "other reasons: 50 messages"


@pytest.mark.parametrize("flood", ["names", "metrics"])
def test_names_and_metrics_have_no_more_room_than_numbers(flood: str, tmp_path: Path) -> None:
    def answer(_: Message, __: Context) -> RecordDict:
        if flood == "names":
            empty = Array(np.ones(0, dtype=np.float32))
            return RecordDict({"x": ArrayRecord({f"{i}{'n' * 1000}": empty for i in range(90)})})
        words = {f"{i}{'k' * 190}": "v" * 190 for i in range(190)}
        arrays = ArrayRecord({"w": Array(np.ones(1, dtype=np.float32))})
        return RecordDict({"x": arrays, "c": ConfigRecord(dict(words))})

    most = 60_000
    tapped(tmp_path, answer, 3, max_gib=most / 2**30)
    folder = run_folder(tmp_path)
    assert sum(path.stat().st_size for path in folder.glob("round-*/*")) <= most
    assert any(line.startswith("no room below max_gib: ") for line in left_out(folder))


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_folder_that_cannot_be_looked_at_stops_no_app(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("fedsim.recording.exchanges._count_bytes", refuse)
    app = client()
    if side == "client":
        app = ClientApp(mods=[fedsim.client_tap(tmp_path)])
        app.train()(_move)
    plain = LocalGrid(app, 2, 60)
    grid = fedsim.tap(plain, out=tmp_path) if side == "server" else plain
    replies = list(grid.send_and_receive(messages(plain, order())))
    assert len(replies) == 2 and not any(reply.has_error() for reply in replies)


@pytest.mark.parametrize("round", [0, -1, 1_000_000, 2**62])
def test_a_round_that_no_folder_is_for_is_counted_instead(round: int, tmp_path: Path) -> None:
    tapped(tmp_path, content=order(round))
    assert [each.round for each in read_exchanges(run_folder(tmp_path))] == [1]


def test_texts_and_pushed_orders_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.federation.tapping._PENDING", 2)

    def answer(message: Message, _: Context) -> RecordDict:
        return RecordDict(
            {"x": message.content["arrays"], "c": ConfigRecord({"text": "t" * 1_000_000})}
        )

    plain = LocalGrid(client(answer), 4, 60)
    grid = fedsim.tap(plain, out=tmp_path)
    ids = list(grid.push_messages(messages(plain, order())))
    assert len(list(grid.pull_messages(ids))) == 4
    found = read_exchanges(run_folder(tmp_path))
    assert [each.node_id for each in found] == [4, 5]  # the last two that were pushed
    assert [each.metrics["c"]["text"] for each in found] == ["t" * 200] * 2


def test_an_answer_that_lies_where_another_nodes_belongs_is_refused(tmp_path: Path) -> None:
    tapped(tmp_path)
    (exchange,) = read_exchanges(run_folder(tmp_path))
    for suffix in (".json", ".safetensors"):
        source = exchange.path.with_suffix(suffix)
        source.with_name(f"node-7{suffix}").write_bytes(source.read_bytes())
    with pytest.raises(FedsimError, match=r"node-7\.json: "):
        read_exchanges(run_folder(tmp_path))


@pytest.mark.parametrize(
    "text",
    ['{"left_out": {"a": 1e999}}', '{"left_out": {"a": null}}', '{"left_out": ' + "[" * 100_000],
    ids=["infinite", "none", "deep"],
)
def test_a_note_of_what_was_left_out_that_is_damaged_is_refused(text: str, tmp_path: Path) -> None:
    tapped(tmp_path)
    folder = run_folder(tmp_path)
    (folder / "tap.json").write_text(text)
    with pytest.raises(FedsimError, match=r"tap\.json: not what a tap writes"):
        left_out(folder)
    # The app goes on: its next run counts anew.
    assert len(tapped(tmp_path, content=order(2))) == 1
    assert len(read_exchanges(folder)) == 2


def test_a_full_disk_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where not even the note of what was left out can be written."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedsim.recording.exchanges.write_bytes", full)
    grid = LocalGrid(client(), 1, 60)
    tapped = fedsim.tap(grid, tmp_path)
    for round in range(1, 6):
        assert len(list(tapped.send_and_receive(messages(grid, order(round))))) == 1
    behind.finish()
    assert len([each for each in caplog.records if each.name == "fedsim.tap"]) <= 2


@pytest.mark.parametrize("values", [0, 1, 16, 16384, 262144, 262145])
def test_odd_sizes_are_recorded_as_they_were(values: int, tmp_path: Path) -> None:
    sent = torch.rand(values)
    tapped(tmp_path, content=order(a=sent))
    (exchange,) = read_exchanges(run_folder(tmp_path))
    assert torch.equal(exchange.read_broadcast()["a"], sent)
    assert torch.equal(exchange.read_reply()["a"], sent + 1)


def test_secagg_is_named_and_records_nothing(tmp_path: Path) -> None:
    """As Flower's mod answers: the vector in a record of its own, that of arrays emptied."""
    key = secaggplus_constants.RECORD_KEY_CONFIGS

    def masked(message: Message, context: Context) -> RecordDict:
        vector = ConfigRecord({"masked_params": [b"x"]})
        return RecordDict({"arrays": ArrayRecord(), key: vector})

    plain = LocalGrid(client(masked), 2, 60)
    grid = fedsim.tap(plain, out=tmp_path)
    for stage in ("setup", "collect_masked_vectors"):
        content = order(1) if stage != "setup" else RecordDict()
        content[key] = ConfigRecord({"stage": stage})
        assert len(list(grid.send_and_receive(messages(plain, content)))) == 2
    with pytest.raises(FedsimError, match=r"no exchange in it.*SecAgg\+ masks.*4 messages"):
        read_exchanges(run_folder(tmp_path))


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
    (testimony,) = read_witnessed(tmp_path, 1).values()
    assert torch.equal(testimony.images()[0], images())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    assert [path.stat().st_mode & 0o077 for path in files] == [0, 0]


def test_a_full_witness_keeps_nothing_and_stops_no_app(tmp_path: Path) -> None:
    assert answered(fedsim.witness(tmp_path, max_gib=100 / 2**30)) == answered()
    with pytest.raises(FedsimError, match="nothing was witnessed"):
        read_witnessed(tmp_path, 1)


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
            read_witnessed(out, 1)
        told.append(str(refused.value).removeprefix(str(out)))
        assert "mods=" not in told[-1]
        (path,) = out.rglob("*.json")
        assert path.stat().st_mode & 0o077 == 0
    assert "torch.int64 of shape (4, 6)" in told[0]
    assert "torch.float32 of shape (4, 5)" in told[1]
    assert len(set(told)) == 5, "text, tables, no single class, nothing at all, and a fault"
    with pytest.raises(FedsimError, match="mods="):
        read_witnessed(tmp_path / "elsewhere", 1)


def test_a_reason_drives_no_terminal(tmp_path: Path) -> None:
    answered(fedsim.witness(tmp_path), training=text)
    (path,) = tmp_path.rglob("unseen-*.json")
    path.write_text('{"reason": "\\u001b[2J' + "x" * 9000 + '"}')
    with pytest.raises(FedsimError) as refused:
        read_witnessed(tmp_path, 1)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000
    path.write_text("[1]")
    with pytest.raises(FedsimError, match="not what a witness writes"):
        read_witnessed(tmp_path, 1)
