"""Announcements of calls in shared memory."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.peer_calls import Call, CallKind
from andon_trainer.core.announcement import ANNOUNCEMENT_BYTES, MAX_NEIGHBOURS, Announcement
from unit.andon.strategies import BOUNDED

CALL = Call(kind=CallKind.REDUCE, dtype="float8_e4m3fn", count=7, reduction="avg", root=3)


@BOUNDED
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.none() | st.integers(0, 4095),
    st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=MAX_NEIGHBOURS),
)
def test_what_is_announced_is_read(
    sequence: int, stage: int, count: int, root: int | None, gives: list[int]
) -> None:
    kind, reduction = (CallKind.ALL_REDUCE, "sum") if root is None else (CallKind.BROADCAST, "")
    call = Call(kind=kind, dtype="bfloat16", count=count, reduction=reduction, root=root, tensors=9)
    announced = Announcement(sequence, stage, call, tuple(gives))

    data = announced.packed()

    assert len(data) <= ANNOUNCEMENT_BYTES
    assert data.startswith(announced.compared())
    assert Announcement.unpack(data, len(gives)) == announced


@BOUNDED
@given(st.binary(min_size=ANNOUNCEMENT_BYTES, max_size=ANNOUNCEMENT_BYTES), st.integers(0, 64))
def test_any_bytes_are_an_announcement_or_are_refused(noise: bytes, kept: int) -> None:
    data = Announcement(1, 0, CALL, (4, 5)).packed()[:kept] + noise

    # Nothing else is raised.
    with suppress(ValueError):
        assert isinstance(Announcement.unpack(data[:ANNOUNCEMENT_BYTES], 2).call, Call)


@pytest.mark.parametrize("names", [{"dtype": "x" * 300}, {"reduction": "y" * 300}])
def test_names_that_have_no_room_are_refused(names: dict[str, str]) -> None:
    call = Call(**{"kind": CallKind.ALL_REDUCE, "dtype": "a", "reduction": "b", **names})  # type: ignore[arg-type]  # fields of Call

    with pytest.raises(ValueError, match="too long"):
        Announcement(0, 0, call).packed()
