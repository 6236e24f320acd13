"""Layouts: digests that every language computes, chunks, places and differences by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.layout import (
    Block,
    BlockKind,
    Chunk,
    Component,
    DType,
    Layout,
    Place,
    first_difference,
)
from unit.andon.golden import by_name, golden
from unit.andon.strategies import BOUNDED, layouts

HEAD = Block(BlockKind.LM_HEAD, "head", (Component("head.weight", (65, 8)),))
LAYER = Block(
    BlockKind.TRANSFORMER_BLOCK,
    "blocks.0",
    (Component("blocks.0.bias", (3,)), Component("blocks.0.weight", (2, 3, 4))),
)
LAYOUT = Layout((HEAD, LAYER))


def layout_of(vector: dict[str, Any]) -> Layout:
    return Layout(
        tuple(
            Block(
                BlockKind[block["kind"]],
                block["name"],
                tuple(
                    Component(part["name"], tuple(part["shape"]), DType[part["dtype"]])
                    for part in block["components"]
                ),
            )
            for block in vector["blocks"]
        )
    )


@pytest.mark.parametrize("vector", golden("layout", "layouts"), ids=by_name)
def test_the_digest_is_that_of_the_conformance_vector(vector: dict[str, Any]) -> None:
    layout = layout_of(vector)

    assert layout.digest.hex() == vector["digest"]
    assert layout.elements == vector["elements"]


def test_any_change_changes_the_digest() -> None:
    part = Component("weight", (2, 3))
    digests = {
        Layout((Block(kind, block, (Component(name, shape, dtype),)),)).digest
        for kind, block, name, shape, dtype in (
            (BlockKind.OTHER, "all", part.name, part.shape, part.dtype),
            (BlockKind.EMBEDDING, "all", part.name, part.shape, part.dtype),
            (BlockKind.OTHER, "every", part.name, part.shape, part.dtype),
            (BlockKind.OTHER, "all", "bias", part.shape, part.dtype),
            (BlockKind.OTHER, "all", part.name, (3, 2), part.dtype),
            (BlockKind.OTHER, "all", part.name, part.shape, DType.FLOAT64),
        )
    }

    assert len(digests) == 6
    assert Layout((HEAD, LAYER)).digest != Layout((LAYER, HEAD)).digest


@BOUNDED
@given(layouts(), st.integers(1, 50))
def test_chunks_cover_every_element_once_in_order(layout: Layout, chunk_elements: int) -> None:
    chunks = list(layout.chunks(chunk_elements))

    covered = [
        (chunk.block, chunk.offset + element) for chunk in chunks for element in range(chunk.count)
    ]
    assert covered == [
        (index, element)
        for index, block in enumerate(layout.blocks)
        for element in range(block.elements)
    ]
    assert all(0 < chunk.count <= chunk_elements for chunk in chunks)
    assert chunks == sorted(chunks)


def test_only_the_last_chunk_of_a_block_is_shorter() -> None:
    assert list(LAYOUT.chunks_of(1, 10)) == [Chunk(1, 0, 10), Chunk(1, 10, 10), Chunk(1, 20, 7)]


def test_chunks_of_no_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        list(LAYOUT.chunks(0))


def test_a_place_names_the_component_and_its_index() -> None:
    assert LAYOUT.place(0, 0) == Place("head.weight", (0, 0))
    assert LAYOUT.place(0, 9) == Place("head.weight", (1, 1))
    assert LAYOUT.place(1, 2) == Place("blocks.0.bias", (2,))
    assert LAYOUT.place(1, 3) == Place("blocks.0.weight", (0, 0, 0))
    assert LAYOUT.place(1, 26) == Place("blocks.0.weight", (1, 2, 3))


def test_a_place_in_a_scalar_has_no_index() -> None:
    layout = Layout((Block(BlockKind.OTHER, "all", (Component("scale", ()),)),))

    assert layout.place(0, 0) == Place("scale", ())


@BOUNDED
@given(layouts())
def test_places_name_every_element_once(layout: Layout) -> None:
    places = [
        layout.place(index, element)
        for index, block in enumerate(layout.blocks)
        for element in range(block.elements)
    ]

    assert len(set(places)) == len(places) == layout.elements


@pytest.mark.parametrize(("block", "element"), [(2, 0), (-1, 0), (0, 520), (1, 27), (0, -1)])
def test_an_element_outside_the_layout_has_no_place(block: int, element: int) -> None:
    with pytest.raises(IndexError):
        LAYOUT.place(block, element)


@BOUNDED
@given(layouts())
def test_equal_layouts_do_not_differ(layout: Layout) -> None:
    again = Layout(tuple(layout.blocks))

    assert first_difference(layout, again) is None


@BOUNDED
@given(layouts(), layouts())
def test_layouts_differ_exactly_if_their_digests_do(mine: Layout, theirs: Layout) -> None:
    assert (first_difference(mine, theirs) is None) == (mine.digest == theirs.digest)


def test_a_difference_names_the_component_and_both_shapes() -> None:
    wider = Block(BlockKind.LM_HEAD, "head", (Component("head.weight", (128, 8)),))

    found = first_difference(LAYOUT, Layout((wider, LAYER)))

    assert found is not None
    assert str(found) == "head.weight is float32[65, 8] here and float32[128, 8] there"


def test_a_difference_names_a_type() -> None:
    half = Block(BlockKind.LM_HEAD, "head", (Component("head.weight", (65, 8), DType.BFLOAT16),))

    assert str(first_difference(LAYOUT, Layout((half, LAYER)))) == (
        "head.weight is float32[65, 8] here and bfloat16[65, 8] there"
    )


def test_a_difference_names_a_component_that_one_side_lacks() -> None:
    assert str(first_difference(LAYOUT, Layout((HEAD,)))) == (
        "blocks.0.bias is float32[3] here and missing there"
    )
    assert str(first_difference(Layout((HEAD,)), LAYOUT)) == (
        "blocks.0.bias is missing here and float32[3] there"
    )


def test_a_difference_in_order_or_kind_names_the_block() -> None:
    swapped = first_difference(LAYOUT, Layout((LAYER, HEAD)))
    renamed = first_difference(
        LAYOUT, Layout((Block(BlockKind.OTHER, "head", HEAD.components), LAYER))
    )

    assert swapped is not None
    assert swapped.component == "block 0"
    assert str(renamed) == (
        "block 0 is lm_head head (head.weight) here and other head (head.weight) there"
    )


def test_names_that_occur_twice_are_refused() -> None:
    again = Block(BlockKind.OTHER, "again", HEAD.components)

    with pytest.raises(ValueError, match=r"component 'head\.weight' occurs twice"):
        Layout((HEAD, again))
    with pytest.raises(ValueError, match="block 'head' occurs twice"):
        Layout((HEAD, Block(BlockKind.OTHER, "head", ())))


@pytest.mark.parametrize("name", ["", "a\nb", "a\tb"])
def test_a_name_that_the_digest_can_not_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="one line of text"):
        Component(name, ())
    with pytest.raises(ValueError, match="one line of text"):
        Block(BlockKind.OTHER, name, ())


def test_a_negative_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Component("weight", (2, -1))
