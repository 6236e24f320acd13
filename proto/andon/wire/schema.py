"""Schemas: what the protocol refuses in a message of the bulk, and generated code lets pass.

Generated code skips a known field of the wrong wire type, truncates a number that is too large for
its field, keeps an enum value that it does not know, and reads as many fields as fit into a
message. A schema is made from a descriptor, and walks over the bytes of a message before generated
code parses them. Nothing is copied, so that a hostile message costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto

from andon.protocol.limits import MAX_FIELDS, MAX_NUMBERS
from andon.wire.fields import FIXED32, FIXED64, LENGTH, VARINT, FrameError, Raw, read_fields

__all__ = ["Schema"]

_WIRE_TYPES = {
    FieldDescriptor.TYPE_BOOL: VARINT,
    FieldDescriptor.TYPE_ENUM: VARINT,
    FieldDescriptor.TYPE_UINT32: VARINT,
    FieldDescriptor.TYPE_UINT64: VARINT,
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
    FieldDescriptor.TYPE_FIXED64: FIXED64,
    FieldDescriptor.TYPE_FIXED32: FIXED32,
    FieldDescriptor.TYPE_BYTES: LENGTH,
    FieldDescriptor.TYPE_MESSAGE: LENGTH,
    FieldDescriptor.TYPE_STRING: LENGTH,
}

_CONTINUED = bytes(range(0x80, 0x100))
"""The bytes of a varint that are not its last."""


@dataclass(slots=True)
class _Counts:
    """What a walk has counted so far, in all parts of a message together."""

    inside: int = 0
    """Fields of the messages inside the message."""
    numbers: int = 0
    """Numbers in packed fields."""


_Check = Callable[[Any, _Counts], None]
"""Raises ValueError if the content of a field is illegal: a varint's value, or bytes."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    """With the message's, for errors."""
    wire_type: int
    check: _Check | None


class Schema:
    """The fields of one kind of message, and of the messages inside it."""

    def __init__(self, descriptor: Descriptor) -> None:
        """Reads the descriptor."""
        proto = DescriptorProto()
        descriptor.CopyToProto(proto)
        # Of a descriptor itself, versions of protobuf say this in different ways.
        repeated = {each.name for each in proto.field if each.label == each.LABEL_REPEATED}
        self._fields = {
            each.number: _field_of(each, repeated=each.name in repeated)
            for each in descriptor.fields
        }

    def check(self, parts: Sequence[memoryview]) -> tuple[int, Raw]:
        """Walks over a message that came in one part, or in several that are to be merged.

        Returns:
            Number and content of the last field; 0 and 0 if there is none.

        Raises:
            FrameError: the bytes are no such message, or break a rule of the protocol.
        """
        counts, fields = _Counts(), 0
        number = 0
        raw: Raw = 0
        for part in parts:
            count, number, raw = self._walk(part, counts)
            fields += count
            _require_few(fields)
        return number, raw

    def check_inside(self, raw: memoryview, counts: _Counts) -> None:
        """Walks over a message inside another, whose walk counts its fields, too."""
        counts.inside += self._walk(raw, counts)[0]
        _require_few(counts.inside)

    def _walk(self, data: memoryview, counts: _Counts) -> tuple[int, int, Raw]:
        """How many fields a message has, and number and content of the last."""
        count, number = 0, 0
        raw: Raw = 0
        for number, wire_type, raw in read_fields(data):
            count += 1
            field = self._fields.get(number)
            if field is None:
                continue
            if wire_type != field.wire_type:
                raise FrameError(f"{field.name} has wire type {wire_type}")
            if field.check is not None:
                try:
                    field.check(raw, counts)
                except FrameError:  # from a message inside, which has named its field
                    raise
                except ValueError as error:
                    raise FrameError(f"{field.name}: {error}") from None
        return count, number, raw


def _require_few(fields: int) -> None:
    if fields > MAX_FIELDS:
        raise FrameError(f"a message has more than {MAX_FIELDS} fields")


def _field_of(descriptor: Any, *, repeated: bool) -> _Field:
    name = f"{descriptor.containing_type.name}.{descriptor.name}"
    wire_type = _WIRE_TYPES[descriptor.type]
    if repeated and wire_type != LENGTH:
        return _Field(name, LENGTH, _check_packed)
    check: _Check | None = None
    if descriptor.message_type is not None:
        check = Schema(descriptor.message_type).check_inside
    elif descriptor.enum_type is not None:
        check = _one_of(frozenset(descriptor.enum_type.values_by_number))
    elif descriptor.type == FieldDescriptor.TYPE_STRING:
        check = _check_text
    elif descriptor.type == FieldDescriptor.TYPE_UINT32:
        check = _check_uint32
    return _Field(name, wire_type, check)


def _one_of(known: frozenset[int]) -> _Check:
    """For an enum. 0, unspecified, is among the known: whether it may be is not decided here."""

    def check(raw: int, _: _Counts) -> None:
        if raw not in known:
            raise ValueError(f"{raw} is no known value")

    return check


def _check_uint32(raw: int, _: _Counts) -> None:
    if raw >= 2**32:
        raise ValueError(f"{raw} does not fit 32 bits")


def _check_text(raw: memoryview, _: _Counts) -> None:
    str(raw, "utf-8")


def _check_packed(raw: memoryview, counts: _Counts) -> None:
    # Each varint has one last byte: what is left once all others are taken away are the numbers.
    counts.numbers += len(bytes(raw).translate(None, delete=_CONTINUED))
    if counts.numbers > MAX_NUMBERS:
        raise ValueError(f"more than {MAX_NUMBERS} numbers")
