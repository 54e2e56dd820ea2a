"""What crosses the wire: tensors and a few numbers in Flower records, nothing else.

    server -> client   arrays: parameters    buffers: float buffers    config: round, probe
    client -> server   arrays: the update    buffers: new statistics   metrics: examples, loss

The update is what the defense stack released, and not the new weights: float32 weights cannot carry
an update that is 1e-8 of their size.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM, KEY_NORM_BIT
from torch import Tensor

from fedsim.training.schedule import Probe
from fedsim.types import FedsimError, Tensors, Update

VERSION = "2"
"""Version of a run's messages and settings; server and nodes must have the same. Since version 2,
answers are given once, and the keys of a secure sum's masks name both clients and their keys."""

PROBE = "probe"
"""Action of a training message whose answer is recorded and never aggregated."""
IDENTIFY = "identify"
"""Action of the query that asks which client is behind a node."""
LEFT_OUT = "left_out"
"""Action of the query that tells a client that its answer was left out of the recordings."""

KEYS, SHARES, MASKED, AGREE, UNMASK = "keys", "shares", "masked", "agree", "unmask"
"""Actions of training messages: the stages of a secure sum."""

ARRAYS = "arrays"
BUFFERS = "buffers"
CONFIG = "config"
METRICS = "metrics"
ROUND = "server-round"
PROBE_SIZE = "probe-batch-size"
PROBE_TRIAL = "probe-trial"
PROBE_RELEASE = "probe-release"
EXAMPLES = "num-examples"
LOSS = "train_loss"
CLIENT = "client"

_MAX_EXAMPLES = 2**40


class MalformedError(FedsimError):
    """Raised for a message with missing or wrong content; its text says what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A server's order in `round`, from 1, at a global model's parameters and float buffers."""

    round: int
    parameters: Tensors
    buffers: Tensors
    probe: Probe | None
    """Probe that is asked for; None asks for training."""
    clipping_norm: float | None = None
    """L2 norm to which Flower's adaptive clipping has the client clip; None without it."""


@dataclass(frozen=True, kw_only=True)
class WireAnswer:
    """A client's answer: its update, and its loss, which is None where it reports none."""

    update: Update
    loss: float | None
    is_clipped: bool | None = None
    """Whether adaptive clipping shortened the update; None without it."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Required form of an answer."""

    update: Tensors
    """Tensors of the names, shapes and types that the update must have; values do not matter."""
    buffers: Tensors
    """Tensors like the float buffers that must come with it; empty for none."""
    loss: bool
    """Whether the client reports its loss; if not, it must not."""
    clips: bool = False
    """Whether the client says if it was clipped; if not, it must not."""
    most_examples: int = 2**40
    """Maximum number of examples that an answer may claim; strategies weigh updates by it."""


def floating(tensors: Tensors) -> dict[str, Tensor]:
    """Returns the floating-point tensors among `tensors`, in their order."""
    return {name: value for name, value in tensors.items() if value.is_floating_point()}


def form_of(tensors: Tensors) -> dict[str, Tensor]:
    """Returns empty tensors on the meta device, with the names, shapes and types of `tensors`."""
    return {name: torch.empty_like(value, device="meta") for name, value in tensors.items()}


def encode(tensors: Tensors) -> ArrayRecord:
    """Converts tensors to Flower arrays (NumPy's file format, never pickled), in the same order.

    A dtype that NumPy lacks, such as bfloat16, is a TypeError.
    """
    record = ArrayRecord()
    for name, value in tensors.items():
        record[name] = Array.from_numpy_ndarray(value.detach().cpu().numpy())
    return record


def decode(record: ArrayRecord) -> dict[str, Tensor]:
    """Converts Flower arrays to new tensors on the CPU, in the same order.

    A damaged or non-numeric one is a MalformedError.
    """
    return {name: _tensor(name, array) for name, array in record.items()}


def views(record: Mapping[str, Array]) -> dict[str, np.ndarray[Any, Any]]:
    """Converts Flower arrays to contiguous NumPy arrays, maybe read-only.

    A damaged or non-numeric one is a MalformedError.
    """
    return {name: np.asarray(_values(name, array), order="C") for name, array in record.items()}


def order(
    round: int,
    parameters: ArrayRecord,
    buffers: ArrayRecord,
    probe: Probe | None,
    clipping_norm: float | None = None,
) -> RecordDict:
    """Returns the content of a message that asks for an update at the global model.

    Args:
        round: Number of the round, from 1.
        parameters: Parameters of the global model.
        buffers: Its floating-point buffers.
        probe: Probe that is asked for; None asks for training.
        clipping_norm: L2 norm to which the client is to clip; None if the strategy sends none.
    """
    asked = ConfigRecord({ROUND: round})
    if clipping_norm is not None:
        asked[KEY_CLIPPING_NORM] = clipping_norm
    if probe:
        asked[PROBE_SIZE], asked[PROBE_TRIAL] = probe.batch_size, probe.trial
        asked[PROBE_RELEASE] = probe.release
    return RecordDict({ARRAYS: parameters, BUFFERS: buffers, CONFIG: asked})


def read_order(content: RecordDict, form: tuple[Tensors, Tensors] | None = None) -> Order:
    """Reads a server's order; a MalformedError says what is missing or wrong in it.

    Parameters and buffers must have the names, shapes and types of `form`, a pair of both. They are
    returned in its order, in which noise is drawn. None takes any form.
    """
    parameters, buffers = arrays_of(content, ARRAYS), arrays_of(content, BUFFERS)
    config = config_of(content)
    probe = None
    if PROBE_SIZE in config:
        probe = Probe(
            batch_size=integer(config, PROBE_SIZE, 1),
            trial=integer(config, PROBE_TRIAL, 0),
            release=integer(config, PROBE_RELEASE, 0),
        )
    norm = config.get(KEY_CLIPPING_NORM)
    if norm is not None and not (isinstance(norm, float) and 0 < norm < math.inf):
        raise MalformedError(f"{KEY_CLIPPING_NORM} is {str(norm)[:40]!r}, expected a number > 0")
    return Order(
        clipping_norm=norm,
        round=integer(config, ROUND, 1),
        parameters=decode_like(parameters, form[0]) if form else decode(parameters),
        buffers=decode_like(buffers, form[1]) if form else decode(buffers),
        probe=probe,
    )


def answer(update: Update, loss: float | None, is_clipped: bool | None = None) -> RecordDict:
    """Returns the content of a message with an update, and with loss and clipping if not None."""
    metrics = metrics_of(update.num_examples, loss, is_clipped)
    return RecordDict(
        {ARRAYS: encode(update.tensors), BUFFERS: encode(update.buffers), METRICS: metrics}
    )


def metrics_of(examples: int, loss: float | None, is_clipped: bool | None) -> MetricRecord:
    """Returns a record of an answer's number of examples, and of loss and clipping if not None."""
    metrics = MetricRecord({EXAMPLES: examples})
    if loss is not None:
        metrics[LOSS] = loss
    if is_clipped is not None:
        metrics[KEY_NORM_BIT] = int(is_clipped)
    return metrics


def read_answer(content: RecordDict, expected: Shape) -> WireAnswer:
    """Reads an answer, which may hold NaN and infinity.

    A MalformedError says what is not as `expected`.
    """
    if set(content) != {ARRAYS, BUFFERS, METRICS}:
        raise MalformedError(f"the answer holds {_list_names(content)}")
    metrics = content[METRICS]
    wanted = {EXAMPLES} | ({LOSS} if expected.loss else set())
    wanted |= {KEY_NORM_BIT} if expected.clips else set()
    if not isinstance(metrics, MetricRecord) or set(metrics) != wanted:
        raise MalformedError(
            f"the metrics are {_list_names(metrics)}, expected {_list_names(wanted)}"
        )
    examples = integer(metrics, EXAMPLES, 1)
    # Results are weighted by this number, and a client would gain by a larger one.
    if examples > expected.most_examples:
        raise MalformedError(
            f"{EXAMPLES} is {examples}, and a client answers of {expected.most_examples} at most"
        )
    loss = metrics[LOSS] if expected.loss else None
    if loss is not None and not isinstance(loss, float):
        raise MalformedError(f"the loss is of type {type(loss).__name__}, expected a number")
    # Flower's adaptive clipping takes the mean of these bits for a share.
    bit = metrics[KEY_NORM_BIT] if expected.clips else None
    if bit not in (None, 0, 1):
        raise MalformedError(f"{KEY_NORM_BIT} is {str(bit)[:40]!r}, expected 0 or 1")
    return WireAnswer(
        update=Update(
            tensors=decode_like(arrays_of(content, ARRAYS), expected.update),
            num_examples=examples,
            buffers=decode_like(arrays_of(content, BUFFERS), expected.buffers),
        ),
        loss=loss,
        is_clipped=None if bit is None else bool(bit),
    )


def greeting(done: int) -> RecordDict:
    """Returns the content of a message that asks a node who it is, once `done` rounds are done."""
    return RecordDict({CONFIG: ConfigRecord({ROUND: done})})


def read_done(content: RecordDict) -> int:
    """Reads the number of rounds that are done from a greeting; a MalformedError without it."""
    return integer(config_of(content), ROUND, 0)


def identity(client: int) -> RecordDict:
    """Returns the content of a message by which a node says that it is `client`."""
    return RecordDict({CONFIG: ConfigRecord({CLIENT: client})})


def read_client(content: RecordDict) -> int:
    """Reads the number of the client that a node says it is; a MalformedError without it."""
    return integer(config_of(content), CLIENT, 0)


def decode_like(record: ArrayRecord, like: Tensors) -> dict[str, Tensor]:
    """Decodes arrays of `like`'s names, types and shapes, in its order; else a MalformedError."""
    if set(record) != set(like):
        odd = sorted(set(record) ^ set(like))
        raise MalformedError(f"wrong names: {_list_names(odd)} (missing, or not of the model)")
    # In the order of `like`, not of the message: noise is drawn and sums are formed in it.
    return {name: _tensor(name, record[name], tensor) for name, tensor in like.items()}


def _tensor(name: str, array: Array, like: Tensor | None = None) -> Tensor:
    values = _values(name, array)
    try:
        # A copy: the bytes of a message are read-only, and gone with it.
        tensor = torch.from_numpy(values.copy(order="C"))
    except (TypeError, ValueError) as error:
        told = f"{values.dtype} of shape {values.shape} is no tensor: {error}"
        raise MalformedError(f"{name}: {told}") from error
    if like is not None and (tensor.dtype != like.dtype or tensor.shape != like.shape):
        raise MalformedError(
            f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)}, "
            f"expected {like.dtype} of shape {tuple(like.shape)}"
        )
    return tensor


def _values(name: str, array: Array) -> np.ndarray[Any, Any]:
    if array.stype != "numpy.ndarray":
        raise MalformedError(f"{name}: serialized as {array.stype[:40]!r}, expected numpy.ndarray")
    shape, fortran, dtype, start = _header(name, array.data)
    payload = len(array.data) - start
    # Before anything of that size is made: a header may claim any shape.
    if math.prod(shape) * dtype.itemsize != payload:
        raise MalformedError(f"{name}: {payload} bytes do not make an array of shape {shape}")
    flat = np.frombuffer(array.data, dtype, offset=start)
    try:
        return flat.reshape(shape, order="F" if fortran else "C")
    except (TypeError, ValueError) as error:
        raise MalformedError(f"{name}: {dtype} of shape {shape} is no tensor: {error}") from error


def _header(name: str, data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Reads (shape, whether in Fortran's order, dtype, where the values start) of a NumPy file."""
    # Version 1.0: 6 bytes of magic, 2 of version, 2 that say how long the header is.
    start = 10 + int.from_bytes(data[8:10], "little")
    try:
        shape, fortran, dtype = _parse_header(data[:start])
    except Exception as error:  # parsing hostile text can raise anything, RecursionError too
        raise MalformedError(f"{name}: no NumPy array of version 1.0: {error}") from error
    if dtype.hasobject or dtype.kind not in "fiub":
        raise MalformedError(f"{name}: dtype {dtype} is not numeric")
    return shape, fortran, dtype, start


@lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    # It takes longer than reading a small array.
    buffer = io.BytesIO(header)
    if np.lib.format.read_magic(buffer) != (1, 0):
        raise ValueError("another version")
    return np.lib.format.read_array_header_1_0(buffer)


def arrays_of(content: RecordDict, key: str) -> ArrayRecord:
    """Returns the arrays of a message under `key`; a MalformedError if there are none."""
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise MalformedError(f"{key!r} is not an array record")
    return record


def config_of(content: RecordDict) -> ConfigRecord:
    """Returns a message's record of numbers and texts; a MalformedError if it has none."""
    record = content.get(CONFIG)
    if not isinstance(record, ConfigRecord):
        raise MalformedError(f"the message has no {CONFIG!r}")
    return record


def integer(record: Mapping[str, object], key: str, least: int) -> int:
    """Returns the integer under `key`, from `least` and below 2^40; else a MalformedError."""
    value = record.get(key)
    # Python counts booleans among its integers.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MAX_EXAMPLES:
        raise MalformedError(f"{key} is {str(value)[:40]!r}, expected an integer from {least}")
    return value


def _list_names(names: object) -> str:
    return ", ".join(str(name)[:60] for name in list(names)[:5]) or "nothing"  # type: ignore[call-overload]


def size_of(content: RecordDict) -> int:
    """Counts the bytes of `content` on the wire; the envelope of a message adds about 150."""
    return int(recorddict_to_proto(content).ByteSize())
