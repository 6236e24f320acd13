"""Layouts that fill a message, as hand-written bytes: generated code would take seconds."""

from __future__ import annotations

from functools import cache

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.limits import MAX_COMPONENTS
from andon.wire import layouts
from andon.wire.fields import length_prefixed, varint

__all__ = ["hostile_layouts", "length_delimited"]

_ROOM = 4_000_000


def length_delimited(number: int, data: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + length_prefixed(data)


@cache
def hostile_layouts() -> tuple[bytes, ...]:
    """Layouts full of blocks, components, one shape or one name; and the largest allowed one.

    Each of the first four is refused; the last one differs from any line's layout.
    """
    block = b"\x08\x05\x12\x01b"
    component = b"\x0a\x01w\x18\x01"
    shape = length_delimited(2, varint(2**63 - 1) * (_ROOM // 9))
    return (
        b"\x0a\x00" * (_ROOM // 2),
        length_delimited(1, block + length_delimited(3, component) * (_ROOM // 7)),
        length_delimited(1, block + length_delimited(3, component + shape)),
        length_delimited(1, block + length_delimited(3, length_delimited(1, b"w" * _ROOM))),
        layouts.layout_to_proto(_most()).SerializeToString(),
    )


def _most() -> Layout:
    names = (f"{number:x}" for number in range(MAX_COMPONENTS))
    return Layout((Block(BlockKind.OTHER, "b", tuple(Component(name, (1,)) for name in names)),))
