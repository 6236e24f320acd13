"""The protobuf wire format: varints, and the fields of a message one after the other.

What generated code does not offer: a walk over a message that parses and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from andon.protocol.limits import MAX_FIELDS

__all__ = [
    "FIXED32",
    "FIXED64",
    "LENGTH",
    "VARINT",
    "FrameError",
    "Raw",
    "length_prefixed",
    "read_fields",
    "read_varint",
    "varint",
]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types; groups, 3 and 4, are not used."""
_FIXED = {FIXED64: 8, FIXED32: 4}

Raw = int | memoryview
"""The content of a field: a varint's value, or the bytes of any other wire type."""


class FrameError(ValueError):
    """A peer sent bytes that are not a message of the protocol."""


_SHORT = tuple(bytes([value]) for value in range(0x80))


def varint(value: int) -> bytes:
    """A number of up to 64 bits as a varint: seven bits a byte, the lowest first."""
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
    """Bytes with their length before them."""
    return varint(len(data)) + data


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The varint that begins at index `at`, and the index behind it.

    Raises:
        FrameError: it is cut short, or longer than 64 bits.
    """
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
    """Each field of a message as (number, wire type, content). Bytes are views of `data`.

    Raises:
        FrameError: the bytes are not a message, or have more than MAX_FIELDS fields.
    """
    at, end, left = 0, len(data), MAX_FIELDS
    while at < end:
        left -= 1
        if left < 0:
            raise FrameError(f"a message has more than {MAX_FIELDS} fields")
        # Most varints are one byte: reading them here saves a call for each.
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = read_varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise FrameError(f"{number} is no field number")
        if wire_type in (VARINT, LENGTH):
            if at < end and data[at] < 0x80:
                value = data[at]
                at += 1
            else:
                value, at = read_varint(data, at)
            if wire_type == VARINT:
                yield number, wire_type, value
                continue
            length = value
        elif wire_type in _FIXED:
            length = _FIXED[wire_type]
        else:
            raise FrameError(f"field {number} has wire type {wire_type}, which is not used")
        # Checked before slicing: a slice beyond the end would just be shorter.
        if length > end - at:
            raise FrameError(f"field {number} is cut short: {end - at} bytes of {length}")
        yield number, wire_type, data[at : at + length]
        at += length
