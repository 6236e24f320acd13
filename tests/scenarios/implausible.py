"""Implausible messages: valid ones, with some fields changed to the most harmful values.

Fields are found by protobuf's descriptors, so that new fields are covered by themselves.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

__all__ = ["INTEGERS", "changed"]

INTEGERS = tuple(
    sorted(
        {0, 1, 2, 3, 7, 1000, 64 * 4096}
        | {2**bits + more for bits in (31, 32, 52, 53, 62, 63) for more in (-2, -1, 0, 1)}
        | {2**64 - 2, 2**64 - 1, (2**32 - 2) * 2**32 + 5}
    )
)
_DOUBLES = (
    *(0.0, -0.0, 1.0, -1.0, 2.0, 4.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf")),
)
_TEXTS = ("", "x", "\0", "é" * 2000, "[::1]:80", "drained")
_BYTES = (b"", b"\0", bytes(32), bytes(5000))
_MOST_REPEATED = 3
_SIZES = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_UINT64: 64,
    FieldDescriptor.TYPE_FIXED64: 64,
}


def changed(data: st.DataObject, message: Message, most: int = 3) -> None:
    """Changes up to `most` fields of a message, at any depth, in place."""
    for _ in range(data.draw(st.integers(0, most))):
        _change(data, message)


def _change(data: st.DataObject, message: Message) -> None:
    field: Any = data.draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    if data.draw(st.integers(0, 5)) == 0:
        message.ClearField(field.name)
    elif hasattr(getattr(message, field.name), "extend"):
        _change_repeated(data, message, field)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if inner.DESCRIPTOR.fields:
            _change(data, inner)
    else:
        setattr(message, field.name, _value(data, field))


def _change_repeated(data: st.DataObject, message: Message, field: Any) -> None:
    values = getattr(message, field.name)
    if field.message_type is None:
        count = data.draw(st.integers(0, _MOST_REPEATED))
        message.ClearField(field.name)
        getattr(message, field.name).extend(_value(data, field) for _ in range(count))
    elif values and data.draw(st.booleans()):
        _change(data, data.draw(st.sampled_from(list(values))))
    else:
        values.add()


def _value(data: st.DataObject, field: Any) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_DOUBLE:
            return data.draw(st.sampled_from(_DOUBLES))
        case FieldDescriptor.TYPE_BOOL:
            return data.draw(st.booleans())
        case FieldDescriptor.TYPE_STRING:
            return data.draw(st.sampled_from(_TEXTS))
        case FieldDescriptor.TYPE_BYTES:
            return data.draw(st.sampled_from(_BYTES))
        case FieldDescriptor.TYPE_ENUM:
            numbers = [value.number for value in field.enum_type.values]
            return data.draw(st.sampled_from([*numbers, 999]))
        case _:
            most = 2 ** _SIZES[field.type]
            return data.draw(st.sampled_from([each for each in INTEGERS if each < most]))
