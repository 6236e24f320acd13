"""Layouts as the client sends them, whether or not their digest is right."""

from __future__ import annotations

from andon.protocol.layout import Block, BlockKind, Component, DType, Layout
from andon.v1 import layout_pb2

__all__ = ["layout_of"]


def layout_of(message: layout_pb2.Layout) -> Layout:
    """The layout of the blocks.

    Raises:
        ValueError: there are none, a name is empty, doubled or no line of text, or a kind or a
            type is none.
    """
    if not message.blocks:
        raise ValueError("it has no blocks")
    return Layout(
        tuple(
            Block(
                BlockKind(block.kind),
                block.name,
                tuple(
                    Component(part.name, tuple(part.shape), DType(part.dtype))
                    for part in block.components
                ),
            )
            for block in message.blocks
        )
    )
