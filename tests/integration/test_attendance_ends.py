"""A rank's Attend call that gRPC ends while the coordinator writes to it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from andon.v1 import session_pb2 as pb
from andon_coordinator.core.session_events import SendReportAnswer
from andon_coordinator.transport.access_control import AccessControl
from andon_coordinator.transport.attending import RankAttendance
from andon_coordinator.transport.session_messages import SessionTokens
from andon_coordinator.transport.session_task import RankStream

pytestmark = pytest.mark.integration


@dataclass
class Task:
    """Opens one stream."""

    stream: RankStream = field(default_factory=lambda: RankStream(1, flush_s=30.0))
    ended: bool = False

    def open_attendance(self) -> RankStream:
        return self.stream

    def attendance_ended(self, stream: RankStream) -> None:
        self.ended = True


class Broken:
    """A call whose connection is gone: as gRPC's, its write fails when it is cancelled."""

    def __init__(self) -> None:
        self.writes = asyncio.Event()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def cancelled(self) -> bool:
        return True

    async def write(self, message: Any) -> None:
        self.writes.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("the batch failed") from None


async def nothing() -> AsyncIterator[pb.AttendRequest]:
    await asyncio.Event().wait()
    yield pb.AttendRequest()


def test_a_write_that_fails_with_its_call_leaves_no_error_behind() -> None:
    unseen: list[str] = []

    async def story() -> bool:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context["message"]))
        task, context = Task(), Broken()
        attendance = RankAttendance(
            task,  # type: ignore[arg-type]  # all that it uses of one
            access=AccessControl(run_id="7f3a"),
            tokens=SessionTokens("7f3a", b"a secret of the tests"),
            attend_s=30.0,
        )
        call = asyncio.create_task(attendance.serve(nothing(), context))
        await asyncio.sleep(0)
        task.stream.send(SendReportAnswer(1, 1))
        await context.writes.wait()
        call.cancel()
        await asyncio.wait({call})
        await asyncio.sleep(0)
        return task.ended

    ended = asyncio.run(story())
    gc.collect()

    assert ended
    assert unseen == []
