"""How large the pieces of a state are."""

from __future__ import annotations

from andon.protocol.limits import STATE_PIECE_BYTES
from andon.protocol.pieces import LEAST_PIECE_BYTES, next_piece_bytes


def test_pieces_grow_on_a_fast_link_and_never_beyond_a_message() -> None:
    size, sent, sizes = LEAST_PIECE_BYTES, 0, []
    while sent < 40 * 2**20:
        sizes.append(size)
        sent += size
        size = next_piece_bytes(size, 0.001, sent)

    assert sizes == sorted(sizes)
    assert sizes[-1] == STATE_PIECE_BYTES
    assert len(sizes) < 150


def test_what_buffers_take_at_first_makes_no_piece_large() -> None:
    size, sent = LEAST_PIECE_BYTES, 0
    for _ in range(8):
        sent += size
        size = next_piece_bytes(size, 0.0, sent)

    assert size == LEAST_PIECE_BYTES


def test_pieces_shrink_on_a_link_that_becomes_slow() -> None:
    assert next_piece_bytes(2**20, 5.0, 2**30) == 2**19
    assert next_piece_bytes(2**20, 0.3, 2**30) == 2**20
    assert next_piece_bytes(LEAST_PIECE_BYTES, 5.0, 2**30) == LEAST_PIECE_BYTES
