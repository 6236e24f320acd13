"""Fields: the protobuf wire format, as far as the data plane's messages need it.

A message is described by a table of `Field`, which one reader and one writer follow. The reader
takes fields in any order, skips unknown ones, lets the last of a repeated scalar win and merges
repeated messages, as protobuf does; unlike it, it refuses groups, a wrong wire type and numbers
beyond their field's range. Bytes are views of what was read, never copies.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from andon.protocol.limits import MAX_FIELDS, MAX_NUMBERS
from andon.protocol.records import Key

__all__ = [
    "BOOL",
    "BYTES",
    "DOUBLE",
    "FIXED32",
    "KEY",
    "OPTIONAL_UINT32",
    "TEXT",
    "TEXTS",
    "UINT32",
    "UINT64",
    "UINT64S",
    "VIEW",
    "Field",
    "FrameError",
    "Kind",
    "Raw",
    "Table",
    "enum_kind",
    "joined",
    "length_prefixed",
    "message_kind",
    "optional_enum_kind",
    "read_fields",
    "varint",
    "write_fields",
]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}

_U64, _F64 = struct.Struct("<Q"), struct.Struct("<d")

Raw = int | memoryview
"""What a field holds: a varint's value, or the bytes of any other wire type."""


class FrameError(ValueError):
    """What a peer sent can't be read."""


class _Required(enum.Enum):
    REQUIRED = 0


REQUIRED = _Required.REQUIRED
"""The `absent` of a kind whose field must be there."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of field is read and written."""

    wire_type: int
    write: Callable[[Any], bytes]
    """The value's bytes, after the tag."""
    read: Callable[[Any], Any]
    """The value of a raw field; of the list of all of them if `gathered`."""
    absent: Any = REQUIRED
    """The value of a field that is not there."""
    explicit: bool = False
    """Written though it is zero or empty, unless it is None."""
    gathered: bool = False
    """All occurrences count, not the last."""
    packed: bool = False
    """All values are in one occurrence, if there are any."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: its number, and the attribute of the plain value it fills."""

    number: int
    name: str
    kind: Kind
    tag: bytes = field(init=False)
    """The bytes before the field's own."""

    def __post_init__(self) -> None:
        """Makes the tag."""
        object.__setattr__(self, "tag", varint(self.number << 3 | self.kind.wire_type))


_SHORT = tuple(bytes([value]) for value in range(0x80))


def varint(value: int) -> bytes:
    """A number of up to 64 bits, seven bits a byte, least first."""
    if 0 <= value < 0x80:
        return _SHORT[value]
    if not 0 <= value < 2**64:
        raise ValueError(f"not an unsigned 64-bit number: {value}")
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def length_prefixed(data: bytes) -> bytes:
    """Bytes after their length."""
    return varint(len(data)) + data


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, at
        shift += 7
    if shift < 70 and value < 2**64:
        raise FrameError("a varint is cut short")
    raise FrameError("a varint is longer than 64 bits")


def read_fields(data: memoryview) -> Iterator[tuple[int, int, Raw]]:
    """Each field of a message, as (number, wire type, raw value).

    Raises:
        FrameError: the bytes are no message, or hold more than MAX_FIELDS fields.
    """
    at, end, left = 0, len(data), MAX_FIELDS
    while at < end:
        left -= 1
        if left < 0:
            raise FrameError(f"a message has more than {MAX_FIELDS} fields")
        # Most varints are one byte, which is not worth a call.
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _read_varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise FrameError(f"{number} is no field number")
        if wire_type in (VARINT, LENGTH):
            if at < end and data[at] < 0x80:
                value = data[at]
                at += 1
            else:
                value, at = _read_varint(data, at)
            if wire_type == VARINT:
                yield number, wire_type, value
                continue
            length = value
        elif wire_type in _FIXED:
            length = _FIXED[wire_type]
        else:
            raise FrameError(f"field {number} has wire type {wire_type}, which is not used")
        if length > end - at:
            raise FrameError(f"field {number} is cut short: {end - at} bytes of {length}")
        yield number, wire_type, data[at : at + length]
        at += length


def joined(parts: Sequence[memoryview], budget: int = MAX_FIELDS) -> memoryview:
    """The parts of one message as one, as protobuf merges them: each must be a message by itself.

    Raises:
        FrameError: one is none, or they hold more than `budget` fields together.
    """
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        for _ in read_fields(part):
            budget -= 1
            if budget < 0:
                raise FrameError(f"a message has more than {MAX_FIELDS} fields")
    return memoryview(b"".join(parts))


def write_fields(value: object, fields: Sequence[Field]) -> bytes:
    """The fields of a plain value, in the table's order, zeros and None left out.

    Raises:
        ValueError: a number that its field can't hold.
    """
    written: list[bytes] = []
    for entry in fields:
        kind, content = entry.kind, getattr(value, entry.name)
        if kind.packed:
            if content:
                written += (entry.tag, kind.write(content))
        elif kind.gathered and not kind.explicit:
            for each in content:
                written += (entry.tag, kind.write(each))
        elif content is not None:
            encoded = kind.write(content)
            if kind.explicit or any(encoded):
                written += (entry.tag, encoded)
    return b"".join(written)


class Table:
    """The fields of one kind of message, by number."""

    def __init__(self, *fields: Field) -> None:
        """Cases of a oneof share a name."""
        self.fields = fields
        self._by_number = {entry.number: entry for entry in fields}
        self._absent = {
            entry.name: entry.kind.absent for entry in fields if entry.kind.absent is not REQUIRED
        }
        self._required = [entry.name for entry in fields if entry.kind.absent is REQUIRED]

    def read(self, data: memoryview, what: str, *, whole: bool = True) -> dict[str, Any]:
        """The values of a message's fields by attribute; `what` names the message in errors.

        Unless it is to be `whole`, fields that it must have may be missing.

        Raises:
            FrameError: the bytes are no such message.
        """
        raws: dict[str, tuple[Kind, Any]] = {}
        replaced: list[tuple[str, Kind, Any]] = []
        for number, wire_type, raw in read_fields(data):
            entry = self._by_number.get(number)
            if entry is None:
                continue
            name, kind = entry.name, entry.kind
            if wire_type != kind.wire_type:
                raise FrameError(f"{what}.{name} has wire type {wire_type}")
            before = raws.get(name)
            if kind.gathered and before is not None and before[0] is kind:
                before[1].append(raw)
                continue
            if before is not None:
                # The last one counts, of a scalar and of a oneof's cases, which share a name.
                replaced.append((name, *before))
            raws[name] = kind, [raw] if kind.gathered else raw
        values = self._absent.copy()
        for name, (kind, raw) in raws.items():
            values[name] = _read(kind, raw, f"{what}.{name}")
        _look_at(replaced, what)
        for name in self._required if whole else ():
            if name not in raws:
                raise FrameError(f"{what} lacks {name}")
        return values


def _read(kind: Kind, raw: Any, where: str) -> Any:
    try:
        return kind.read(raw)
    except ValueError as error:
        raise FrameError(f"{where}: {error}") from None


def _look_at(replaced: Sequence[tuple[str, Kind, Any]], what: str) -> None:
    """Refuses what can't be though it does not count: whoever sent that is not to be trusted."""
    parts: list[memoryview] = []
    for name, kind, raw in replaced:
        if kind.gathered:
            parts += raw
        else:
            _read(kind, raw, f"{what}.{name}")
    joined([memoryview(b""), *parts])


def _uint(bits: int) -> tuple[Callable[[int], bytes], Callable[[int], int]]:
    def check(value: int) -> int:
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{value} does not fit {bits} bits")
        return value

    return lambda value: varint(check(value)), check


def _write_key(key: Key) -> bytes:
    body = b"\x09" + _U64.pack(key.term)
    if key.round:
        body += b"\x11" + _U64.pack(key.round)
    return length_prefixed(body)


def _read_key(parts: list[memoryview]) -> Key:
    halves = {1: 0, 2: 0}
    for number, wire_type, raw in read_fields(joined(parts)):
        if number in halves:
            if wire_type != FIXED64:
                raise FrameError(f"field {number} of a key has wire type {wire_type}")
            (halves[number],) = _U64.unpack(raw)  # type: ignore[arg-type] # FIXED64 is a view
    return Key(halves[1], halves[2])


def enum_kind(members: type[enum.Enum]) -> Kind:
    """A member of an enum by its number; zero and unknown numbers are refused."""
    return Kind(VARINT, lambda member: varint(member.value), members)


def optional_enum_kind(members: type[enum.Enum]) -> Kind:
    """A member of an enum by its number; zero is None."""
    return Kind(
        VARINT,
        lambda member: varint(member.value),
        lambda number: members(number) if number else None,
        absent=None,
    )


def message_kind(make: Callable[..., Any], *fields: Field) -> Kind:
    """A message inside another, as the plain value that `make` makes of its fields; else None."""
    table = Table(*fields)

    def read(parts: list[memoryview]) -> Any:
        return make(**table.read(joined(parts), "the message"))

    def write(value: object) -> bytes:
        return length_prefixed(write_fields(value, fields))

    return Kind(LENGTH, write, read, absent=None, explicit=True, gathered=True)


def _write_packed(values: Sequence[int]) -> bytes:
    return length_prefixed(b"".join(map(varint, values)))


def _read_packed(parts: list[memoryview]) -> tuple[int, ...]:
    values: list[int] = []
    for part in parts:
        at = 0
        while at < len(part):
            value, at = _read_varint(part, at)
            values.append(value)
            if len(values) > MAX_NUMBERS:
                raise FrameError(f"more than {MAX_NUMBERS} numbers")
    return tuple(values)


BOOL = Kind(VARINT, lambda value: varint(int(value)), bool, absent=False)
"""A truth; False if absent, True for any number but 0."""

UINT32 = Kind(VARINT, *_uint(32), absent=0)
"""An unsigned 32-bit number; 0 if absent."""

UINT64 = Kind(VARINT, *_uint(64), absent=0)
"""An unsigned 64-bit number; 0 if absent."""

UINT64S = Kind(LENGTH, _write_packed, _read_packed, absent=(), gathered=True, packed=True)
"""Any number of unsigned 64-bit numbers, packed; not read if they are not."""

OPTIONAL_UINT32 = Kind(VARINT, *_uint(32), absent=None, explicit=True)
"""An unsigned 32-bit number; None if absent."""

DOUBLE = Kind(
    FIXED64,
    _F64.pack,
    lambda raw: _F64.unpack(raw)[0],
    absent=0.0,
)
"""A float64; 0 if absent."""

BYTES = Kind(LENGTH, length_prefixed, bytes, absent=b"")
"""Bytes, copied; empty if absent."""

TEXT = Kind(
    LENGTH,
    lambda text: length_prefixed(text.encode()),
    lambda raw: str(raw, "utf-8"),
    absent="",
)
"""UTF-8 text; empty if absent."""

TEXTS = Kind(
    LENGTH,
    lambda text: length_prefixed(text.encode()),
    lambda raws: tuple(str(raw, "utf-8") for raw in raws),
    absent=(),
    gathered=True,
)
"""Any number of texts."""

KEY = Kind(LENGTH, _write_key, _read_key, explicit=True, gathered=True)
"""The key of a round; must be there."""

VIEW = Kind(LENGTH, length_prefixed, lambda raw: raw, explicit=True)
"""Bytes as a view of the message; must be there."""
