"""Messages become the bytes that Flower itself makes of them."""

from __future__ import annotations

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto

from fedsim.federation.local import identity
from fedsim.federation.wire import message_to_bytes

CONTENTS = {
    "all kinds": RecordDict(
        {
            "b": ArrayRecord({"w": torch.randn(3, 4), "s": torch.tensor(2), "e": torch.zeros(0)}),
            "a": ConfigRecord({"round": 3, "text": "x", "many": [1.5, 2.5], "raw": b"\x00"}),
            "m": MetricRecord({"loss": 0.5, "counts": [1, 2]}),
            "more": ArrayRecord({"v": torch.ones(2, dtype=torch.int64)}),
        }
    ),
    "no arrays": RecordDict({"a": ArrayRecord(), "c": ConfigRecord()}),
    "nothing": RecordDict(),
}
over_contents = pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())


@over_contents
def test_messages(content: RecordDict) -> None:
    with identity():
        message = Message(content, 7, "train", ttl=5.0)
    assert message_to_bytes(message) == message_to_proto(message).SerializeToString()


def test_errors() -> None:
    with identity():
        order = Message(RecordDict(), 7, "train")
    order.metadata.__dict__["_message_id"] = "1"
    with identity():
        failed = Message(Error(code=3, reason="it failed"), reply_to=order)
    assert message_to_bytes(failed) == message_to_proto(failed).SerializeToString()
