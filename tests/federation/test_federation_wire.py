"""Nothing but well-formed numeric arrays gets through, and those get through bit for bit."""

from __future__ import annotations

import io
from contextlib import suppress

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedsim.federation import wire
from fedsim.types import Update

UPDATE = {"w": torch.arange(6.0).reshape(2, 3) * 1e-9, "b": torch.tensor([0.0, -0.0])}
BUFFERS = {"mean": torch.tensor([1.5])}
EXPECTED = wire.Shape(update=UPDATE, buffers=BUFFERS, loss=True)


def answer() -> RecordDict:
    return wire.answer(Update(tensors=UPDATE, num_examples=7, buffers=BUFFERS), loss=0.25)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.randn(2, dtype=torch.float64),
        torch.randn(2).half(),
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ],
    ids=lambda value: f"{value.dtype}-{tuple(value.shape)}",
)
def test_tensors_cross_bit_for_bit(value: Tensor) -> None:
    decoded = wire.decode(wire.encode({"x": value}))["x"]
    assert decoded.dtype == value.dtype and decoded.shape == value.shape
    assert decoded.numpy().tobytes() == value.contiguous().numpy().tobytes()


def test_decoded_tensors_own_their_memory() -> None:
    record = wire.encode({"x": torch.zeros(3)})
    wire.decode(record)["x"].add_(1)
    assert not wire.decode(record)["x"].any()


def _array(value: np.ndarray, **changes: object) -> Array:
    array = Array.from_numpy_ndarray(value)
    for name, change in changes.items():
        setattr(array, name, change)
    return array


def _objects() -> Array:
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], dtype=object), allow_pickle=True)
    return Array("object", (1,), "numpy.ndarray", buffer.getvalue())


def _lies(shape: tuple[int, ...], dtype: str = "<f4") -> Array:
    buffer = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return Array("float32", shape, "numpy.ndarray", buffer.getvalue() + bytes(8))


def _nested() -> bytes:
    header = b"(" * 9000
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    "array",
    [
        _array(np.zeros((2, 3), np.float64)),
        _array(np.zeros((3, 2), np.float32)),
        _array(np.zeros(6, np.float32)),
        _array(np.zeros((2, 3), np.float32), data=b""),
        _array(np.zeros((2, 3), np.float32), data=b"\x93NUMPY\x01\x00\xff\xff{"),
        _array(np.zeros((2, 3), np.float32), stype="pickle"),
        _array(np.zeros((2, 3), ">f4")),
        _array(np.zeros((2, 3), np.complex64)),
        _array(np.zeros((2, 3), np.float32), data=_array(np.zeros((2, 3), "f4")).data + b"x"),
        _lies((10**9, 10**9)),
        _lies((-1, -2)),
        _objects(),
        _lies((1,), "|O"),
        _array(np.zeros((2, 3), np.float32), data=_nested()),
    ],
    ids=[
        *("dtype", "shape", "rank", "empty", "garbage", "stype", "endian", "complex", "trailing"),
        *("huge", "negative", "object", "pointer", "nested"),
    ],
)
def test_malformed_arrays_are_refused(array: Array) -> None:
    content = answer()
    record = content[wire.ARRAYS]
    assert isinstance(record, ArrayRecord)
    record["w"] = array
    with pytest.raises(wire.MalformedError, match="w"):
        wire.read_answer(content, EXPECTED)


def test_no_damage_to_an_array_raises_anything_but_malformed() -> None:
    data = Array(np.zeros((2, 3), np.float32)).data
    stream = np.random.default_rng(0)
    for _ in range(500):
        damaged = bytearray(data[: stream.integers(0, len(data) + 1)])
        for _ in range(int(stream.integers(1, 4))):
            if damaged:
                damaged[stream.integers(0, len(damaged))] = stream.integers(0, 256)
        content = answer()
        content.array_records[wire.ARRAYS]["w"] = _array(np.zeros(1), data=bytes(damaged))
        with suppress(wire.MalformedError):
            wire.read_answer(content, EXPECTED)


def test_names_that_are_not_the_models_are_refused() -> None:
    extra, missing = answer(), answer()
    extra.array_records[wire.ARRAYS]["../x"] = _array(np.zeros(1))
    del missing.array_records[wire.BUFFERS]["mean"]
    for content in (extra, missing):
        with pytest.raises(wire.MalformedError, match="wrong names"):
            wire.read_answer(content, EXPECTED)


@pytest.mark.parametrize("count", [0, -1, 2.0, 2**60, [3]])
def test_a_wrong_number_of_examples_is_refused(count: object) -> None:
    content = answer()
    content[wire.METRICS] = MetricRecord({wire.EXAMPLES: count, wire.LOSS: 0.5})  # type: ignore[dict-item]
    with pytest.raises(wire.MalformedError, match="num-examples"):
        wire.read_answer(content, EXPECTED)


def test_what_was_not_asked_for_is_refused() -> None:
    more_records, more_metrics, no_loss = answer(), answer(), answer()
    more_records["more"] = ConfigRecord({"x": 1})
    more_metrics.metric_records[wire.METRICS]["accuracy"] = 1.0
    del no_loss.metric_records[wire.METRICS][wire.LOSS]
    for content in (more_records, more_metrics, no_loss, RecordDict()):
        with pytest.raises(wire.MalformedError):
            wire.read_answer(content, EXPECTED)
    silent = wire.Shape(update=UPDATE, buffers=BUFFERS, loss=False)
    with pytest.raises(wire.MalformedError, match="metrics"):
        wire.read_answer(answer(), silent)


@pytest.mark.parametrize("round", [0, -3, "1", 1.0, "../../x", True])
def test_a_round_that_is_no_number_is_refused(round: object) -> None:
    content = wire.order(1, wire.encode(UPDATE), wire.encode(BUFFERS), None)
    content[wire.CONFIG] = ConfigRecord({wire.ROUND: round})  # type: ignore[dict-item]
    with pytest.raises(wire.MalformedError, match="server-round"):
        wire.read_order(content)
