"""Messages to the bytes that Flower makes of them, with one copy of the arrays instead of six.

Flower's `recorddict_to_proto` builds each message inside the next, and protobuf copies what it is
given every time: 0.8 to 2 s for ResNet-18 with a two-layer head (80 MB) here, against 0.05 s in
place. The bytes are the same, which a test checks.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.common.serde_utils import error_to_proto, metadata_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict


def content_to_bytes(content: RecordDict) -> bytes:
    """Returns `recorddict_to_proto(content).SerializeToString()`, without its copies."""
    proto = ProtoRecordDict()
    _fill(proto, content)
    data: bytes = proto.SerializeToString()
    return data


def size_of(content: RecordDict) -> int:
    """Counts the bytes of `content_to_bytes`; the envelope of a message adds about 150."""
    proto = ProtoRecordDict()
    _fill(proto, content)
    return int(proto.ByteSize())


def message_to_bytes(message: Message) -> bytes:
    """Returns `message_to_proto(message).SerializeToString()`, without its copies."""
    proto = ProtoMessage(metadata=metadata_to_proto(message.metadata))
    if message.has_content():
        proto.content.SetInParent()
        _fill(proto.content, message.content)
    if message.has_error():
        proto.error.CopyFrom(error_to_proto(message.error))
    data: bytes = proto.SerializeToString()
    return data


def _fill(proto: ProtoRecordDict, content: RecordDict) -> None:
    for name, record in content.items():
        if not isinstance(record, ArrayRecord):
            # Copies of small records cost little: Flower's own way will do.
            proto.MergeFrom(recorddict_to_proto(RecordDict({name: record})))
            continue
        arrays = proto.items.add(key=name).array_record
        # Marks the record as present even if no array follows.
        arrays.SetInParent()
        for key, array in record.items():
            value = arrays.items.add(key=key).value
            value.dtype, value.stype, value.data = array.dtype, array.stype, array.data
            value.shape.extend(array.shape)
