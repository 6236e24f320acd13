"""What a layout may not have more of is refused before anything of it is read."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.limits import (
    MAX_COMPONENTS,
    MAX_DIMENSIONS,
    MAX_NAME_BYTES,
    MAX_NUMBERS,
    LimitExceeded,
)
from andon.v1 import halt_pb2, layout_pb2
from andon.wire import conversion, layouts
from andon.wire.layouts import count_layout_parts
from unit.andon.strategies import BOUNDED


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
def test_c_wire_002_a_layout_beyond_a_limit_is_refused_by_which(message: bytes, what: str) -> None:
    with pytest.raises(LimitExceeded, match=f"{what} are more than"):
        layouts.layout_from_proto(layout_pb2.Layout.FromString(message))


def test_c_wire_002_a_huge_shape_is_refused_without_its_product() -> None:
    message = layout_pb2.Layout.FromString(layout(shape=400_000))
    began_at = time.process_time()

    with pytest.raises(LimitExceeded):
        layouts.layout_from_proto(message)

    assert time.process_time() - began_at < 5  # the product takes a quarter of an hour


def test_c_wire_002_what_is_as_large_as_may_be_is_read() -> None:
    message = layout_pb2.Layout.FromString(layout(shape=MAX_DIMENSIONS))

    with pytest.raises(conversion.WireError, match="elements are more than"):
        layouts.layout_from_proto(message)


def test_c_wire_002_an_element_of_too_many_dimensions_is_refused() -> None:
    evidence = halt_pb2.HaltEvidence(id=1, reason=1, element=[0] * (MAX_DIMENSIONS + 1))  # type: ignore[arg-type]  # a number

    with pytest.raises(LimitExceeded, match="dimensions of an element"):
        conversion.evidence_from_proto(evidence)


@BOUNDED
@given(st.lists(st.integers(0, 5), max_size=5))
def test_parts_are_blocks_and_components(counts: list[int]) -> None:
    message = layout_pb2.Layout()
    for count in counts:
        message.blocks.add().components.extend([layout_pb2.Component()] * count)

    assert count_layout_parts(message) == len(counts) + sum(counts)
