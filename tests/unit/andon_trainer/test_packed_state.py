"""A state in parts is the same sequence of bytes as in one piece."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from andon_trainer.exchange.control.packed_state import PackedState


@given(st.lists(st.binary(max_size=5), max_size=6), st.data())
def test_any_stretch_of_a_state_in_parts_is_that_of_the_whole(
    parts: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(parts)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    state = PackedState(parts, len(whole) - begin)

    views = list(state.views(begin, end))

    assert b"".join(views) == whole[begin:end]
    assert all(views), "no empty ones"
    assert (len(state), bytes(state)) == (len(whole), whole)
    assert state.sha256() == hashlib.sha256(whole).digest()
    base = whole[begin:]
    assert state.base_sha256() == (hashlib.sha256(base).digest() if base else b"")
