"""Calls between ranks after a fault: what peers sent before they heard of it accuses nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from andon.protocol.peer_calls import Call, CallKind
from andon.protocol.peer_frames import Begin, Piece
from andon_trainer.core.collectives import Places
from andon_trainer.core.group_calls import GroupCalls
from andon_trainer.core.peer_work import Part, Work
from andon_trainer.core.send_calls import SendCalls

GROUP, BYTES = 7, 16
APART = Places(((0,), (1,)))
GATHER = Call(kind=CallKind.ALL_GATHER, dtype="float32", count=BYTES // 4)
SEND = Call(kind=CallKind.SEND, dtype="float32", count=BYTES // 4)


def room() -> memoryview:
    return memoryview(bytearray(BYTES))


def gathering() -> tuple[GroupCalls | SendCalls, Work]:
    work = Work(call=GATHER, itemsize=4, parts=(Part((room(),), (room(), room())),))
    return GroupCalls(group=GROUP, places=APART, rank=1), work


def receiving() -> tuple[GroupCalls | SendCalls, Work]:
    work = Work(call=SEND, itemsize=4, parts=(Part((), (room(),)),), peer=0, receives=True)
    return SendCalls(group=GROUP, places=APART, rank=1), work


@pytest.mark.parametrize("made", [gathering, receiving], ids=["collective", "send"])
def test_a_peer_whose_frames_come_after_a_fault_has_broken_no_rule(
    made: Callable[[], tuple[GroupCalls | SendCalls, Work]],
) -> None:
    core, work = made()
    core.begin(work)
    core.failed = True  # This rank's own input was not finite, say.

    begin = Begin(
        group=GROUP, sequence=0, call=work.call, rank=0, receives=False, gives_bytes=BYTES
    )
    piece = Piece(GROUP, 0, 0, 0, BYTES)

    assert core.begun(0, begin) == []
    assert core.landing(0, piece) is None
    assert core.landed(0, piece, room()) == []
