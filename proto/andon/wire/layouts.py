"""Layouts as protobuf messages, with their size checked before they are read.

A few megabytes can hold a million empty messages, or one shape whose product takes minutes to
compute. Counting costs nothing, and a layout within the counts is read in milliseconds.
"""

from __future__ import annotations

from andon.protocol.layout import Block, BlockKind, Component, DType, Layout
from andon.protocol.limits import (
    MAX_COMPONENTS,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_NAME_BYTES,
    MAX_NUMBERS,
    require_at_most,
)
from andon.v1 import layout_pb2
from andon.wire.conversion import WireError, enum_from_proto, enum_to_proto, reading

__all__ = ["count_layout_parts", "layout_from_proto", "layout_to_proto", "require_small_layout"]


def layout_to_proto(layout: Layout) -> layout_pb2.Layout:
    """A layout with its digest."""
    return layout_pb2.Layout(
        blocks=[
            layout_pb2.Block(
                kind=enum_to_proto(block.kind),
                name=block.name,
                components=[
                    layout_pb2.Component(
                        name=part.name,
                        shape=part.shape,
                        dtype=enum_to_proto(part.dtype),
                    )
                    for part in block.components
                ],
            )
            for block in layout.blocks
        ],
        digest=layout.digest,
    )


def layout_from_proto(message: layout_pb2.Layout) -> Layout:
    """A layout, if its digest is that of its blocks.

    Raises:
        WireError: an illegal or repeated name, an unknown kind or type, too many elements, or
            another digest than the blocks have.
        LimitExceeded: the layout is too large to be read.
    """
    # First, since counting is cheap and building the layout is not.
    require_small_layout(message)
    with reading(message):
        layout = Layout(
            tuple(
                Block(
                    enum_from_proto(BlockKind, block.kind),
                    block.name,
                    tuple(
                        Component(part.name, tuple(part.shape), enum_from_proto(DType, part.dtype))
                        for part in block.components
                    ),
                )
                for block in message.blocks
            )
        )
        if layout.elements > MAX_ELEMENTS:
            raise WireError(f"Layout: {layout.elements} elements are more than {MAX_ELEMENTS}")
        if layout.digest != message.digest:
            said = message.digest.hex() or "nothing"
            raise WireError(f"Layout: its digest is {layout.digest.hex()}, not {said}")
        return layout


def count_layout_parts(message: layout_pb2.Layout) -> int:
    """The number of blocks and components of a layout.

    Raises:
        LimitExceeded: there are too many.
    """
    require_at_most(len(message.blocks), MAX_NUMBERS, "blocks of a layout")
    components = sum(len(block.components) for block in message.blocks)
    require_at_most(components, MAX_COMPONENTS, "components of a layout")
    return len(message.blocks) + components


def require_small_layout(message: layout_pb2.Layout) -> None:
    """Refuses a layout that would take too long to read, before it is read.

    Raises:
        LimitExceeded: too many blocks, components or dimensions, or too long a name.
    """
    count_layout_parts(message)
    for block in message.blocks:
        _require_short(block.name)
        for component in block.components:
            require_at_most(len(component.shape), MAX_DIMENSIONS, "dimensions of a component")
            _require_short(component.name)


def _require_short(name: str) -> None:
    require_at_most(len(name.encode()), MAX_NAME_BYTES, "bytes of a name")
