"""What crosses the wire in a secure sum: each stage's order and answer as Flower records.

keys     order: the round                              answer: public keys
shares   order: everybody's public keys                answer: a sealed box for each neighbour
masked   order: the model, the neighbours' boxes       answer: the masked vector, a signature
agree    order: who is in the sum, all signatures      answer: a signature of that
unmask   order: these signatures                       answer: shares

What reads a record raises a `MalformedError` if it holds anything else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedsim.federation import wire
from fedsim.federation.secure_aggregation.layout import Ring
from fedsim.types import Tensors
from fedsim.words import number_of

PLANTED = "planted"
"""Arrays of the weights at which probes are computed, where these are not the model's."""
_CLIENTS = "clients"
_CONTENTS = "contents"
_LOST = "lost"
_SIGNATURE = "signature"
_VECTOR = "vector"
# Entries of a list, and bytes of one of them.
_MOST = 1_000_000


def table(round: int, entries: Mapping[int, bytes], **lists: Collection[int]) -> ConfigRecord:
    """A record of bytes by client, and of further lists of clients."""
    record = ConfigRecord({wire.ROUND: round})
    ordered = sorted(entries)
    record[_CLIENTS] = ordered
    record[_CONTENTS] = [entries[client] for client in ordered]
    for name, members in lists.items():
        record[name] = sorted(members)
    return record


def read_table(record: ConfigRecord) -> dict[int, bytes]:
    """Bytes by client."""
    clients, contents = read_list(record, _CLIENTS), record.get(_CONTENTS)
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


def read_list(record: ConfigRecord, name: str) -> list[int]:
    """Clients, as they stand there."""
    members = record.get(name)
    if (
        not isinstance(members, list)
        or len(members) > _MOST
        or not all(isinstance(one, int) and 0 <= one < _MOST for one in members)
    ):
        raise wire.MalformedError(f"{name}: expected a list of clients")
    return [int(one) for one in members]


def read_round(record: ConfigRecord) -> int:
    """Reads the round of an order."""
    return wire.integer(record, wire.ROUND, 1)


def order(record: ConfigRecord) -> RecordDict:
    """An order or answer that is one table."""
    return RecordDict({wire.CONFIG: record})


def model_order(
    record: ConfigRecord, parameters: ArrayRecord, buffers: ArrayRecord, planted: ArrayRecord | None
) -> RecordDict:
    """An order that asks for a masked vector."""
    content = RecordDict({wire.ARRAYS: parameters, wire.BUFFERS: buffers, wire.CONFIG: record})
    if planted is not None:
        content[PLANTED] = planted
    return content


def read_planted(content: RecordDict, parameters: Tensors) -> dict[str, Any] | None:
    """The weights at which probes are computed; None if they are the model's `parameters`."""
    if PLANTED not in content:
        return None
    return wire.decode_like(wire.arrays_of(content, PLANTED), parameters)


def masked_answer(vector: Ring, signature: bytes) -> RecordDict:
    """The answer that carries a masked vector: as signed integers, the ring's other reading."""
    signed = vector.view(np.int32 if vector.itemsize == 4 else np.int64)
    return RecordDict(
        {
            wire.ARRAYS: wire.encode({_VECTOR: torch.from_numpy(signed)}),
            wire.CONFIG: ConfigRecord({_SIGNATURE: signature}),
        }
    )


def read_masked(content: RecordDict, length: int, ring_bits: int) -> tuple[Ring, bytes]:
    """A masked vector of `length` numbers, and its sender's signature."""
    if set(content) != {wire.ARRAYS, wire.CONFIG}:
        raise wire.MalformedError("the answer is no masked vector")
    dtype = torch.int32 if ring_bits == 32 else torch.int64
    like: Tensors = {_VECTOR: torch.empty(length, dtype=dtype, device="meta")}
    signed = wire.decode_like(wire.arrays_of(content, wire.ARRAYS), like)[_VECTOR].numpy()
    signature = wire.config_of(content).get(_SIGNATURE)
    if not isinstance(signature, bytes):
        raise wire.MalformedError("the answer has no signature")
    ring: Ring = signed.view(np.uint32 if ring_bits == 32 else np.uint64)
    return ring, signature


def agree_order(round: int, signatures: Mapping[int, bytes], lost: Collection[int]) -> RecordDict:
    """An order that asks for consent: who has signed the model is in the sum."""
    return order(table(round, signatures, **{_LOST: lost}))


def read_agree(record: ConfigRecord) -> tuple[dict[int, bytes], list[int]]:
    """The signatures of those in the sum, and who is lost."""
    return read_table(record), read_list(record, _LOST)
