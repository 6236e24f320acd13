"""Proof: a preamble opens what it was made for, and nothing else.

Its bytes are in `conformance/tcp.json`, and tested with it (`test_conformance_lanes`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.tcp.proof import (
    PREAMBLE_BYTES,
    LaneDirection,
    LaneSession,
    NotAPreamble,
    answer_of,
    is_answer,
    is_claim,
    preamble,
    read_preamble,
)
from unit.andon.strategies import BOUNDED

SESSION = LaneSession(b"k" * 48, "7f3a", 3)
NONCE = bytes(range(32))
SENDS, RECEIVES = LaneDirection


@pytest.mark.parametrize(
    ("session", "nonce"),
    [
        (replace(SESSION, key=b"K" * 48), NONCE),
        (replace(SESSION, run_id="7f3b"), NONCE),
        (replace(SESSION, worker=4), NONCE),
        # The shown half is the same.
        (SESSION, NONCE[:16] + bytes(16)),
    ],
)
def test_a_claim_of_another_session_proves_nothing(session: LaneSession, nonce: bytes) -> None:
    claim = read_preamble(preamble(SESSION, NONCE, SENDS))

    assert is_claim(SESSION, NONCE, claim)
    assert not is_claim(session, nonce, claim)
    assert not is_answer(session, nonce, SENDS, answer_of(SESSION, NONCE, SENDS))


def test_a_claim_is_of_one_direction() -> None:
    claim = read_preamble(preamble(SESSION, NONCE, SENDS))

    assert not is_claim(SESSION, NONCE, replace(claim, direction=RECEIVES))
    assert not is_answer(SESSION, NONCE, RECEIVES, answer_of(SESSION, NONCE, SENDS))


def test_a_claim_is_of_one_connection() -> None:
    first, further = (read_preamble(preamble(SESSION, NONCE, SENDS, index)) for index in (0, 1))

    assert is_claim(SESSION, NONCE, further)
    for claim, index in ((first, 1), (further, 0), (further, 2)):
        assert not is_claim(SESSION, NONCE, replace(claim, index=index))
        assert not is_answer(
            SESSION, NONCE, SENDS, answer_of(SESSION, NONCE, SENDS, claim.index), index
        )


def test_a_preamble_sent_back_is_no_answer() -> None:
    claim = read_preamble(preamble(SESSION, NONCE, SENDS))

    assert not is_answer(SESSION, NONCE, SENDS, claim.proof)


def test_a_number_can_not_move_between_the_run_and_the_worker() -> None:
    claim = read_preamble(preamble(LaneSession(b"k", "a\1\0\0\0", 2), NONCE, SENDS))

    assert not is_claim(LaneSession(b"k", "a", 1), NONCE, claim)


@pytest.mark.parametrize(
    ("at", "byte", "why"),
    [(0, b"a", "does not begin"), (24, b"\3", "no direction"), (31, b"\1", "not zero")],
)
def test_other_bytes_are_no_preamble(at: int, byte: bytes, why: str) -> None:
    data = bytearray(preamble(SESSION, NONCE, SENDS))
    data[at : at + 1] = byte

    with pytest.raises(NotAPreamble, match=why):
        read_preamble(bytes(data))


@BOUNDED
@given(st.binary(min_size=PREAMBLE_BYTES, max_size=PREAMBLE_BYTES))
def test_any_bytes_are_refused_or_prove_nothing(data: bytes) -> None:
    try:
        claim = read_preamble(data)
    except NotAPreamble:
        return

    assert not is_claim(SESSION, NONCE, claim)
