"""Limits: a text from a peer is cut to its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.limits import MAX_TEXT_BYTES, clipped


@pytest.mark.parametrize("text", ["", "loss is NaN", "é" * (MAX_TEXT_BYTES // 2)])
def test_a_text_within_the_limit_stays_as_it_is(text: str) -> None:
    assert clipped(text) == text


def test_an_ellipsis_shows_that_a_text_was_cut() -> None:
    assert clipped("abcdefgh", 6) == "abc…"


def test_half_a_surrogate_pair_can_still_be_sent() -> None:
    assert clipped("no file \udcff") == "no file ?"


@given(st.text(st.characters(exclude_categories=[])), st.integers(3, 40))
def test_a_text_is_never_longer_than_its_limit(text: str, max_bytes: int) -> None:
    assert len(clipped(text, max_bytes).encode()) <= max_bytes
