"""CRC-32C, bit by bit, over the bytes that docs/protocol-data.md lists for each message."""

from __future__ import annotations

import struct
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from andon.v1 import reducer_pb2, ring_pb2

__all__ = ["crc32c", "with_checksums"]

_CASTAGNOLI = 0x82F63B78
_LEFT_OUT = {"padding", "slice", "payload"}
_WIDTHS = {
    FieldDescriptor.TYPE_BOOL: "<I",
    FieldDescriptor.TYPE_ENUM: "<I",
    FieldDescriptor.TYPE_UINT32: "<I",
    FieldDescriptor.TYPE_UINT64: "<Q",
    FieldDescriptor.TYPE_DOUBLE: "<d",
}

_Envelope = TypeVar(
    "_Envelope",
    bound=reducer_pb2.ReduceRequest | reducer_pb2.ReduceResponse | ring_pb2.PassRequest,
)


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def with_checksums(envelope: _Envelope) -> _Envelope:
    """The same message with its checksums."""
    case = envelope.WhichOneof("message")
    assert case is not None
    number = envelope.DESCRIPTOR.fields_by_name[case].number
    message = getattr(envelope, case)
    header = struct.pack("<I", number) + _fields(message)
    whole: Any = type(envelope).FromString(envelope.SerializeToString())
    whole.header_crc32c = crc32c(header)
    if "payload" in message.DESCRIPTOR.fields_by_name:
        whole.crc32c = crc32c(header + message.payload)
    return cast(_Envelope, whole)


def _fields(message: Message) -> bytes:
    """Numbers first, in the order of the fields' numbers; then bytes."""
    numbers = texts = b""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for field in sorted(fields, key=lambda each: each.number):
        value = getattr(message, field.name)
        if field.name in _LEFT_OUT:
            continue
        if field.name == "node":
            # The only field that leaves nothing where it is absent.
            numbers += _fields(value) if message.HasField("node") else b""
            continue
        if field.name == "key":
            numbers += struct.pack("<QQ", value.term, value.round)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            texts += value
        else:
            numbers += struct.pack(_WIDTHS[field.type], value)
    return numbers + texts
