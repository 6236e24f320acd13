"""The ring's geometry: segments, shares of the mean, addresses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.ring import is_address, normalize_weights, segments_of

BOUNDED = settings(max_examples=60, deadline=None)


@BOUNDED
@given(st.integers(1, 5000), st.integers(1, 9), st.integers(1, 300))
def test_c_ring_001_segments_are_disjoint_complete_and_of_one_message(
    elements: int, world_size: int, most: int
) -> None:
    segments = list(segments_of(4, elements, world_size, most))

    at = 0
    for segment in segments:
        assert segment.offset == at
        assert 0 < segment.count <= most
        at += segment.count
    assert at == elements


def test_a_bucket_is_divided_as_evenly_as_possible() -> None:
    segments = list(segments_of(0, 7, 3, 100))

    assert [(each.offset, each.count, each.start) for each in segments] == [
        (0, 3, 0),
        (3, 2, 1),
        (5, 2, 2),
    ]
    assert [each.owner(3) for each in segments] == [2, 0, 1]


def test_a_block_smaller_than_the_ring_leaves_ranks_without_a_segment() -> None:
    assert [(each.offset, each.start) for each in segments_of(0, 2, 5, 100)] == [(0, 0), (1, 1)]


def test_a_rank_that_abstains_has_no_share_and_is_never_first() -> None:
    shares = normalize_weights((0.0, 3.0, 0.0, 1.0))
    (segment,) = [each for each in segments_of(0, 4, 4, 1) if each.start == 2]

    assert shares.factors == (None, 0.75, None, 0.25)
    assert shares.first_contributor(segment) == 3
    assert shares.last_contributor_before(segment, 1) == 3


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("127.0.0.1:80", True),
        ("[::1]:7070", True),
        ("node-3.cluster:1", True),
        ("127.0.0.1:0", False),
        ("127.0.0.1:65536", False),
        ("unix:/tmp/x:1", False),
        ("dns:///host:1", False),
        ("host", False),
        ("", False),
        ("a b:1", False),
    ],
)
def test_an_address_is_a_host_and_a_port_and_nothing_else(text: str, *, right: bool) -> None:
    assert is_address(text) is right
