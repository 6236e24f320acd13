"""The socket of a control stream: what travels over it, in which order, and what may not."""

from __future__ import annotations

import asyncio
import socket
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from andon.host.arena import short_path
from andon.host.process import own_process
from andon.protocol.capabilities import CONTROL_SOCKET
from andon.testing import ScriptedWorker, small_layout
from andon.v1 import coordinator_pb2 as pb
from andon.wire.socket_frames import SocketFrames, socket_frame
from andon_coordinator.core.line_state import LineState
from andon_coordinator.transport.control_socket import ControlSocket
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.streams import WorkerStream
from andon_trainer.core.events import ControlLost, Halted
from andon_trainer.core.reports import Joining, LeaveReport
from andon_trainer.exchange.control.control import ControlStream
from andon_trainer.exchange.control.heartbeats import ScalarOutbox
from andon_trainer.exchange.path import Inbox
from integration.served import (
    PLAN,
    RUN,
    Served,
    code_of,
    config_in,
    end_of,
    refused,
    serving,
    until,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not own_process().host, reason="/proc is not Linux's, or hidden"),
]

HERE = pb.ProcessPlace(host=own_process().host, id=own_process().id)
ABLE: dict[str, Any] = {"capabilities": [CONTROL_SOCKET], "process": HERE}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shared"
    made.mkdir()
    return made


class Speaking:
    """A worker's end of the socket that it was offered, which it connects."""

    def __init__(self, folder: Path, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        with short_path(folder / name) as short:
            self._socket.connect(short)
        self._socket.settimeout(0)
        self._frames = SocketFrames()

    async def put(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def send(self, **case: Any) -> None:
        await self.put(socket_frame(pb.TrainRequest(**case).SerializeToString()))

    async def receive(self) -> pb.TrainResponse | None:
        """The next message; None: the socket has ended."""
        frame = await self.frame()
        return None if frame is None else pb.TrainResponse.FromString(frame)

    async def frame(self) -> bytes | None:
        """Its bytes."""
        while not self._frames.whole:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._socket, 2**16)
            except ConnectionResetError:  # It had not been accepted when the listener went.
                data = b""
            if not data:
                return None
            self._frames.put(data)
        return self._frames.take()

    async def cases(self, count: int) -> list[str | None]:
        came = [await self.receive() for _ in range(count)]
        return [None if each is None else each.WhichOneof("message") for each in came]

    def close(self) -> None:
        self._socket.close()


def names_in(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


def beat(sequence: int) -> dict[str, Any]:
    return {"heartbeat": pb.Heartbeat(sequence=sequence)}


async def sole(served: Served) -> ScriptedWorker:
    """A worker that is alone on its line, and was offered a socket."""
    worker = served.worker(0)
    await worker.join(**ABLE)
    return worker


@asynccontextmanager
async def offered(
    tmp_path: Path, folder: Path
) -> AsyncIterator[tuple[Served, ScriptedWorker, Speaking]]:
    """A line with a sole worker, which is connected to the socket that it was offered."""
    async with serving(config_in(tmp_path, expect_workers=1, shared_dir=folder)) as served:
        worker = await sole(served)
        with closing(Speaking(folder, worker.accepted.control_socket)) as speaking:
            yield served, worker, speaking


async def test_what_follows_the_answer_waits_for_the_choice_and_goes_its_way(
    tmp_path: Path, folder: Path
) -> None:
    async with serving(config_in(tmp_path, expect_workers=1, shared_dir=folder)) as served:
        worker = await sole(served)
        path = folder / worker.accepted.control_socket
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        speaking = Speaking(folder, worker.accepted.control_socket)
        # The worker's weights are the line's by now, which it will hear first.
        await until(lambda: served.coordinator.status().state is LineState.RUNNING)

        await speaking.send(**beat(1))
        assert await speaking.cases(2) == ["step_committed", "heartbeat_answer"]
        assert names_in(folder) == []
        await speaking.send(**beat(2))
        assert await speaking.cases(1) == ["heartbeat_answer"]
        speaking.close()


async def test_a_worker_that_speaks_over_the_call_hears_everything_there(
    tmp_path: Path, folder: Path
) -> None:
    async with offered(tmp_path, folder) as (_, worker, speaking):
        await worker.send(**beat(1))

        await worker.expect("step_committed")
        assert await speaking.receive() is None
        assert names_in(folder) == []


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({"process": HERE}, True),
        ({**ABLE, "process": pb.ProcessPlace(host=b"another host", id=1)}, True),
        ({"capabilities": [CONTROL_SOCKET]}, True),
        (ABLE, False),
    ],
    ids=["cannot", "elsewhere", "unknown", "off"],
)
async def test_no_socket_is_offered(
    tmp_path: Path, folder: Path, fields: dict[str, Any], *, shares: bool
) -> None:
    config = config_in(tmp_path, expect_workers=1, shared_dir=folder if shares else None)
    async with serving(config) as served:
        worker = served.worker(0)

        accepted = await worker.join(**fields)

        assert accepted.control_socket == ""
        await worker.expect("step_committed")
        assert names_in(folder) == []


async def test_a_folder_that_can_not_be_used_offers_none(tmp_path: Path, folder: Path) -> None:
    config = config_in(tmp_path, expect_workers=1, shared_dir=folder / "not there")
    async with serving(config) as served:
        worker = await sole(served)

        assert worker.accepted.control_socket == ""
        await worker.expect("step_committed")


async def test_what_was_said_over_the_socket_before_the_calls_end_counts(
    tmp_path: Path, folder: Path
) -> None:
    async with offered(tmp_path, folder) as (served, worker, speaking):
        await speaking.send(**beat(1))
        await speaking.send(
            leave=pb.Leave(reason=pb.LEAVE_REASON_FAILED, message="no more data", final_step=0)
        )
        worker.call.cancel()

        await until(lambda: served.coordinator.status().live == 0)
    with JournalReader(tmp_path / "journal.sqlite") as journal:
        assert [each.reason for each in journal.departures()] == ["FAILED"]


async def test_a_message_over_the_call_after_one_over_the_socket_is_refused(
    tmp_path: Path, folder: Path
) -> None:
    async with offered(tmp_path, folder) as (_, worker, speaking):
        await speaking.send(**beat(1))
        await speaking.cases(2)

        await worker.send(**beat(2))

        code, refusal = await refused(worker.receive())
        assert (code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")
        assert await speaking.receive() is None


@pytest.mark.parametrize(
    "forged",
    [
        socket_frame(b"\xff"),
        (2**31).to_bytes(4, "little"),
        socket_frame(pb.TrainRequest(join=pb.Join()).SerializeToString()),
        socket_frame(b""),
    ],
    ids=["no message", "too long", "a second join", "an empty message"],
)
@pytest.mark.parametrize("first", [True, False])
async def test_what_may_not_come_over_a_socket_ends_its_stream(
    tmp_path: Path, folder: Path, forged: bytes, *, first: bool
) -> None:
    async with offered(tmp_path, folder) as (_, worker, speaking):
        if not first:
            await speaking.send(**beat(1))
            await speaking.cases(2)

        await speaking.put(forged + socket_frame(b"\xff"))

        assert await code_of(end_of(worker.call)) is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: names_in(folder) == [])


async def test_a_worker_that_does_not_read_its_socket_is_cut_off(
    tmp_path: Path, folder: Path
) -> None:
    async with offered(tmp_path, folder) as (_, worker, speaking):
        await speaking.send(**beat(1))

        async def flood() -> None:
            frames = b"".join(
                socket_frame(pb.TrainRequest(**beat(each)).SerializeToString())
                for each in range(1000)
            )
            while True:
                await speaking.put(frames)

        flooding = asyncio.create_task(flood())
        code, refusal = await refused(worker.receive())
        assert (code, refusal.reason) == (grpc.StatusCode.ABORTED, "REJOIN_NEEDED")
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


async def test_messages_that_the_kernel_does_not_take_at_once_follow_in_order(folder: Path) -> None:
    stream = WorkerStream(1, flush_s=20.0)
    stream.socket = ControlSocket(folder, lambda frames: True)
    over_call: list[Any] = []

    async def write(message: Any) -> None:
        over_call.append(message)

    writing = asyncio.create_task(stream.write_all(write))
    answer = pb.TrainResponse(join_accepted=pb.JoinAccepted(worker=3))
    held, large, small = bytes(1), bytes(2**20), bytes(2)
    stream.accept(answer)
    stream.send(held)
    await until(lambda: bool(over_call))
    speaking = Speaking(folder, answer.join_accepted.control_socket)
    await until(lambda: names_in(folder) == [])
    stream.choose(socket=True)
    for message in (large, small, large, small):
        stream.send(message)
    stream.end()

    read = [await speaking.frame() for _ in range(5)]
    await writing
    stream.close_socket()

    assert over_call == [answer]
    assert read == [held, large, small, large, small]
    assert await speaking.frame() is None
    speaking.close()


async def test_a_stream_that_ends_before_the_choice_leaves_nothing(
    tmp_path: Path, folder: Path
) -> None:
    async with serving(config_in(tmp_path, expect_workers=1, shared_dir=folder)) as served:
        worker = await sole(served)
        assert names_in(folder)

        await worker.call.done_writing()

        await until(lambda: names_in(folder) == [])


class Joined:
    """A worker's own control stream, which has joined."""

    def __init__(self, address: str, folder: Path | None) -> None:
        self.inbox = Inbox()
        self.inbox.follow(1)
        self.stream = ControlStream(address, self.inbox, 1, outbox=ScalarOutbox())
        self.stream.shared_dir = folder
        self.answer = self.stream.join(
            Joining(
                run_id=RUN,
                incarnation=7,
                layout=small_layout(),
                plan=PLAN,
                node_id="here",
                launch_slot=0,
                device=("cpu", "", 0, 1),
                capabilities=(CONTROL_SOCKET,),
            )
        )


async def test_a_worker_hears_speaks_and_leaves_over_the_socket(
    tmp_path: Path, folder: Path
) -> None:
    async with serving(config_in(tmp_path, expect_workers=1, shared_dir=folder)) as served:
        joined = await asyncio.to_thread(Joined, served.address, folder)
        assert any(each.name == "andon-from-coordinator" for each in threading.enumerate())
        first = await asyncio.to_thread(joined.inbox.take, 20.0)
        assert type(first).__name__ == "Committed"

        joined.stream.leave(LeaveReport(reason="FAILED", message="no more data"))
        await asyncio.to_thread(joined.stream.close, after_s=20.0)

        assert not any(each.name == "andon-from-coordinator" for each in threading.enumerate())
    with JournalReader(tmp_path / "journal.sqlite") as journal:
        assert [each.reason for each in journal.departures()] == ["FAILED"]


async def test_a_worker_that_can_not_reach_the_socket_uses_the_call(
    tmp_path: Path, folder: Path
) -> None:
    async with serving(config_in(tmp_path, expect_workers=1, shared_dir=folder)) as served:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        joined = await asyncio.to_thread(Joined, served.address, elsewhere)
        assert joined.answer.control_socket

        first = await asyncio.to_thread(joined.inbox.take, 20.0)

        assert type(first).__name__ == "Committed"
        assert names_in(folder) == []
        await asyncio.to_thread(joined.stream.close)


async def test_a_worker_hears_what_came_before_the_end_and_then_why_it_came(
    tmp_path: Path, folder: Path
) -> None:
    async with serving(config_in(tmp_path, expect_workers=1, shared_dir=folder)) as served:
        joined = await asyncio.to_thread(Joined, served.address, folder)
        await asyncio.to_thread(joined.inbox.take, 20.0)
        await served.stub.PullCord(pb.PullCordRequest(run_id=RUN, reason="tests"))
        await served.coordinator.close()

        halted = await asyncio.to_thread(joined.inbox.take, 20.0)
        lost = await asyncio.to_thread(joined.inbox.take, 20.0)

        assert isinstance(halted, Halted)
        assert isinstance(lost, ControlLost)
        assert lost.message.startswith("UNAVAILABLE")
        await asyncio.to_thread(joined.stream.close)
