"""Layouts as messages: illegal ones are refused, and large ones before they are read."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.limits import (
    MAX_COMPONENTS,
    MAX_DIMENSIONS,
    MAX_NAME_BYTES,
    MAX_NUMBERS,
    LimitExceeded,
)
from andon.v1 import layout_pb2
from andon.wire import layouts
from andon.wire.conversion import WireError
from andon.wire.layouts import count_layout_parts
from unit.andon.strategies import BOUNDED

LAYOUT = Layout((Block(BlockKind.OTHER, "all", (Component("weight", (2, 3)),)),))


def layout(blocks: int = 1, components: int = 1, name: str = "w", shape: int = 1) -> bytes:
    one = layout_pb2.Block(name="b", kind="BLOCK_KIND_OTHER")
    part = layout_pb2.Component(name=name, dtype="DTYPE_FLOAT32", shape=[2**62] * shape)
    one.components.extend([part] * components)
    return layout_pb2.Layout(blocks=[one] * blocks).SerializeToString()


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (layout(blocks=MAX_NUMBERS + 1, components=0), "blocks of a layout"),
        (layout(components=MAX_COMPONENTS + 1), "components of a layout"),
        (layout(blocks=2, components=MAX_COMPONENTS // 2 + 1), "components of a layout"),
        (layout(shape=MAX_DIMENSIONS + 1), "dimensions of a component"),
        (layout(shape=100_000), "dimensions of a component"),
        (layout(name="é" * (MAX_NAME_BYTES // 2 + 1)), "bytes of a name"),
    ],
    ids=["blocks", "components", "components of blocks", "dimensions", "a huge shape", "a name"],
)
def test_c_wire_002_a_layout_beyond_a_limit_is_refused_and_the_limit_is_named(
    message: bytes, what: str
) -> None:
    with pytest.raises(LimitExceeded, match=f"{what} are more than"):
        layouts.layout_from_proto(layout_pb2.Layout.FromString(message))


def test_c_wire_002_a_huge_shape_is_refused_without_its_product() -> None:
    message = layout_pb2.Layout.FromString(layout(shape=400_000))
    began_at = time.process_time()

    with pytest.raises(LimitExceeded):
        layouts.layout_from_proto(message)

    assert time.process_time() - began_at < 5  # the product takes a quarter of an hour


def test_c_wire_002_a_layout_at_its_limits_is_read() -> None:
    message = layout_pb2.Layout.FromString(layout(shape=MAX_DIMENSIONS))

    with pytest.raises(WireError, match="elements are more than"):
        layouts.layout_from_proto(message)


@BOUNDED
@given(st.lists(st.integers(0, 5), max_size=5))
def test_parts_are_blocks_and_components(counts: list[int]) -> None:
    message = layout_pb2.Layout()
    for count in counts:
        message.blocks.add().components.extend([layout_pb2.Component()] * count)

    assert count_layout_parts(message) == len(counts) + sum(counts)


def test_c_wire_002_a_layout_with_a_wrong_digest_is_refused() -> None:
    for digest in (b"", bytes(32), LAYOUT.digest[:-1]):
        message = layouts.layout_to_proto(LAYOUT)
        message.digest = digest

        with pytest.raises(WireError, match="its digest is"):
            layouts.layout_from_proto(message)


def test_c_wire_002_an_impossible_layout_is_refused() -> None:
    unknown_kind = layouts.layout_to_proto(LAYOUT)
    unknown_kind.blocks[0].kind = 99  # type: ignore[assignment] # what a peer may send
    unknown_type = layouts.layout_to_proto(LAYOUT)
    unknown_type.blocks[0].components[0].dtype = 0  # type: ignore[assignment] # likewise
    no_name = layouts.layout_to_proto(LAYOUT)
    no_name.blocks[0].components[0].name = ""
    doubled = layouts.layout_to_proto(LAYOUT)
    doubled.blocks.append(doubled.blocks[0])
    too_large = layouts.layout_to_proto(LAYOUT)
    too_large.blocks[0].components[0].shape[:] = [2**63, 2**63]

    for message, match in (
        (unknown_kind, "99 is no BlockKind"),
        (unknown_type, "0 is no DType"),
        (no_name, "one line of text"),
        (doubled, "occurs twice"),
        (too_large, "elements are more than"),
    ):
        with pytest.raises(WireError, match=match):
            layouts.layout_from_proto(message)
