"""What crosses the wire in a secure sum: each stage's order and answer as Flower records.

keys     order: the round                              answer: public keys
shares   order: everybody's public keys                answer: a sealed box for each neighbour
masked   order: the model, the neighbours' boxes       answer: the masked vector, a signature
agree    order: who is in the sum, all signatures      answer: a signature of that
unmask   order: these signatures                       answer: shares
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedsim.federation import wire
from fedsim.federation.secure_aggregation.terms import Ring
from fedsim.types import Tensors
from fedsim.words import number_of

PLANTED = "planted"
"""Name of the record with the weights at which probes are computed, if not the model's own."""
_CLIENTS = "clients"
_CONTENTS = "contents"
LOST = "lost"
"""Name of the list of clients that shared secrets and are not in the sum."""
_SIGNATURE = "signature"
_VECTOR = "vector"
# Entries of a list, and bytes of one of them.
_MOST = 1_000_000


def table(round: int, entries: Mapping[int, bytes], **lists: Collection[int]) -> RecordDict:
    """Returns the content of a message of `round`: `entries`, bytes by client, and further lists.

    Each of `lists` has clients' numbers; its keyword is the name by which `read_list` finds it.
    """
    record = ConfigRecord({wire.ROUND: round})
    ordered = sorted(entries)
    record[_CLIENTS] = ordered
    record[_CONTENTS] = [entries[client] for client in ordered]
    for name, members in lists.items():
        record[name] = sorted(members)
    return RecordDict({wire.CONFIG: record})


def read_table(content: RecordDict) -> dict[int, bytes]:
    """Reads the bytes of each client, by client, from what `table` made; else a MalformedError."""
    clients, contents = read_list(content, _CLIENTS), wire.config_of(content).get(_CONTENTS)
    if (
        not isinstance(contents, list)
        or len(contents) != len(clients)
        or not all(isinstance(one, bytes) and len(one) <= _MOST for one in contents)
    ):
        raise wire.MalformedError(
            f"{_CONTENTS}: expected bytes for each of {number_of(len(clients), 'client')}"
        )
    if len(set(clients)) < len(clients):
        raise wire.MalformedError(f"{_CLIENTS}: one stands twice")
    return dict(zip(clients, (bytes(one) for one in contents), strict=True))  # type: ignore[arg-type]


def read_list(content: RecordDict, name: str) -> list[int]:
    """Reads the list of clients `name`, in the order as written; else a MalformedError."""
    members = wire.config_of(content).get(name)
    if (
        not isinstance(members, list)
        or len(members) > _MOST
        or not all(isinstance(one, int) and 0 <= one < _MOST for one in members)
    ):
        raise wire.MalformedError(f"{name}: expected a list of clients")
    return [int(one) for one in members]


def model_order(
    boxes: RecordDict, parameters: ArrayRecord, buffers: ArrayRecord, planted: ArrayRecord | None
) -> RecordDict:
    """Returns the content of an order for a masked vector.

    Args:
        boxes: The `table` of the boxes that are sealed for the client, by sender.
        parameters: Parameters of the global model.
        buffers: Its floating-point buffers.
        planted: Weights at which probes are computed; None if these are `parameters`.
    """
    content = RecordDict({wire.ARRAYS: parameters, wire.BUFFERS: buffers, **boxes})
    if planted is not None:
        content[PLANTED] = planted
    return content


def read_planted(content: RecordDict, parameters: Tensors) -> dict[str, Any] | None:
    """Reads the weights, by name, at which probes are computed; None if they are `parameters`.

    Weights of other names, shapes or types than these are a MalformedError.
    """
    if PLANTED not in content:
        return None
    return wire.decode_like(wire.arrays_of(content, PLANTED), parameters)


def masked_answer(vector: Ring, signature: bytes) -> RecordDict:
    """Returns an answer with what `SumClient.mask` returned, the vector as signed integers."""
    signed = vector.view(np.int32 if vector.itemsize == 4 else np.int64)
    return RecordDict(
        {
            wire.ARRAYS: wire.encode({_VECTOR: torch.from_numpy(signed)}),
            wire.CONFIG: ConfigRecord({_SIGNATURE: signature}),
        }
    )


def read_masked(content: RecordDict, length: int, ring_bits: int) -> tuple[Ring, bytes]:
    """Reads from an answer what `SumClient.mask` returned; its signature is not verified.

    The vector is (`length`,), `ring_bits` is 32 or 64; another form is a MalformedError.
    """
    if set(content) != {wire.ARRAYS, wire.CONFIG}:
        raise wire.MalformedError("the answer is no masked vector")
    dtype = torch.int32 if ring_bits == 32 else torch.int64
    # Type and shape alone are compared.
    like: Tensors = {_VECTOR: torch.empty(length, dtype=dtype, device="meta")}
    signed = wire.decode_like(wire.arrays_of(content, wire.ARRAYS), like)[_VECTOR].numpy()
    signature = wire.config_of(content).get(_SIGNATURE)
    if not isinstance(signature, bytes):
        raise wire.MalformedError("the answer has no signature")
    ring: Ring = signed.view(np.uint32 if ring_bits == 32 else np.uint64)
    return ring, signature
