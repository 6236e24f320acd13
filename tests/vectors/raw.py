"""Raw fields of the wire format, for messages that no library writes."""

from __future__ import annotations

__all__ = ["FIXED32", "FIXED64", "LENGTH", "VARINT", "delimited", "field", "tag", "varint"]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def varint(value: int, *, size: int = 1) -> bytes:
    """A number in seven bits a byte, in `size` bytes or more."""
    written = bytearray()
    while value > 0x7F or len(written) < size - 1:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def tag(number: int, wire_type: int) -> bytes:
    """What comes before a field."""
    return varint(number << 3 | wire_type)


def delimited(data: bytes) -> bytes:
    """Bytes after their length."""
    return varint(len(data)) + data


def field(number: int, content: int | bytes) -> bytes:
    """A field: a varint of a number, or bytes after their length."""
    if isinstance(content, int):
        return tag(number, VARINT) + varint(content)
    return tag(number, LENGTH) + delimited(content)
