"""The memory of a group's calls is kept for the next one, and never has two users."""

from __future__ import annotations

import pytest

from andon.protocol.peer_calls import Call, CallKind
from andon_trainer.core.group_calls import GroupCalls
from andon_trainer.core.peer_plan import Buffer, Places, Span
from andon_trainer.core.peer_work import Part, Work
from andon_trainer.peers.call_room import KEPT_BYTES, CallRoom
from andon_trainer.peers.open_call import GroupSession, OpenCall

ELEMENTS = 2**18
SUM = Call(kind=CallKind.ALL_REDUCE, dtype="float32", count=ELEMENTS, reduction="sum")


class Owner:
    """A group of two hosts, in which rank 0 makes calls."""

    def __init__(self, session: GroupSession) -> None:
        self.session = session
        self.room = CallRoom()
        self._core = GroupCalls(group=7, places=Places(((0,), (1,))), rank=0)

    def late(self, _call: OpenCall, _timeout_s: float) -> str:
        return ""

    def begin(self) -> OpenCall:
        values = memoryview(bytearray(4 * ELEMENTS))
        work = Work(
            call=SUM,
            itemsize=4,
            parts=(Part((values,), (values,)),),
            reduce=lambda *_, **__: None,  # nothing comes that could be reduced
        )
        call = OpenCall(self, work, ranks=2)
        call.opening, _ = self._core.begin(call.work)
        return call


class Session:
    """One that nothing happens to."""

    rank = 0
    checksums = False
    over = None


def test_memory_that_was_given_back_is_taken_again_by_one_alone() -> None:
    room = CallRoom()
    first = room.take(2**20)
    room.give_back(first)

    again, other = room.take(2**19), room.take(2**19)

    assert again is first
    assert other is not first


def test_long_memory_is_let_go() -> None:
    room = CallRoom()
    long = room.take(KEPT_BYTES + 1)

    room.give_back(long)

    assert room.take(1) is not long


@pytest.mark.parametrize("error", [None, RuntimeError("the session ended")])
def test_memory_of_a_call_that_failed_is_not_used_again(error: Exception | None) -> None:
    owner = Owner(Session())  # type: ignore[arg-type]  # nothing is asked of it
    call = owner.begin()
    scratch = call.view(Span(Buffer.SCRATCH, 0, 0, 0, 4)).obj

    call.end(error)

    taken = owner.room.take(2 * ELEMENTS).obj
    assert (taken is scratch) == (error is None)
