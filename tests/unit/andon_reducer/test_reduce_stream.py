"""Messages that leave on a stream: when they are written, and which share a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from andon.protocol.messages import RoundAborted
from andon.protocol.records import Key
from andon.tcp.framing import Frame
from andon.wire.frames import frame_response, parse_responses
from andon_reducer.transport.reduce_stream import MAX_BATCH, Context, OutgoingMessage, ReduceStream
from andon_reducer.transport.tcp_lanes import StreamLanes


class Peer:
    """A call that keeps what is written to it."""

    def __init__(self) -> None:
        self.messages: list[list[int]] = []

    async def write(self, data: bytes) -> None:
        """Notes which frames the message holds, by their rounds."""
        parsed = cast(list[RoundAborted], parse_responses(data))
        self.messages.append([each.key.round for each in parsed])


def frame(number: int) -> bytes:
    return frame_response(RoundAborted(Key(1, number), ""))


def written(
    script: Callable[[ReduceStream], Awaitable[None]], sent: list[OutgoingMessage] | None = None
) -> list[list[int]]:
    """What a stream writes while a script runs; nothing is left when it ends."""
    peer = Peer()

    async def run() -> None:
        stream = ReduceStream(1, cast(Context, cast(Any, peer)))
        reported = [] if sent is None else sent
        writing = asyncio.create_task(stream.write_all(reported.append))
        await script(stream)
        stream.close()
        await writing

    asyncio.run(run())
    return peer.messages


async def turns() -> None:
    """Gives the writer time to do all that it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_averages_in_shared_memory_wait_for_each_other_until_they_are_flushed() -> None:
    sent: list[OutgoingMessage] = []
    seen: list[int] = []

    async def script(stream: ReduceStream) -> None:
        for number in (1, 2, 3):
            stream.send(OutgoingMessage(frame(number), number, 64))
            await turns()
        seen.append(len(sent))
        stream.flush()
        await turns()
        seen.append(len(sent))
        stream.send(OutgoingMessage(frame(4), 4, 64))
        stream.flush()
        await turns()

    assert written(script, sent) == [[1, 2, 3], [4]]
    assert seen == [0, 3]
    assert [each.job for each in sent] == [1, 2, 3, 4]


class Lanes:
    """Lanes in use, which keep the heads that they are given."""

    in_use = True

    def __init__(self) -> None:
        self.heads: list[bytes] = []

    def send(self, message: Frame, sent: Callable[[int], None]) -> None:
        """Notes the head, and has written it at once."""
        self.heads.append(message[0])
        sent(0)


def test_an_average_that_was_framed_for_the_call_goes_there_though_lanes_came_into_use() -> None:
    lanes, sent = Lanes(), list[OutgoingMessage]()

    async def script(stream: ReduceStream) -> None:
        stream.lanes = cast(StreamLanes, lanes)
        stream.send(OutgoingMessage(frame(1), 1))
        stream.send(OutgoingMessage(frame(2), 2, on_lane=True))
        await turns()

    assert written(script, sent) == [[1]]
    assert lanes.heads == [frame(2)]
    assert sorted(each.job or 0 for each in sent) == [1, 2]


def test_any_other_message_takes_along_what_waits_before_it() -> None:
    async def script(stream: ReduceStream) -> None:
        stream.send(OutgoingMessage(frame(1), 1, 64))
        await turns()
        stream.send(OutgoingMessage(frame(2)))
        await turns()

    assert written(script) == [[1], [2]]


def test_a_full_batch_waits_for_nobody() -> None:
    async def script(stream: ReduceStream) -> None:
        for number in range(MAX_BATCH):
            stream.send(OutgoingMessage(frame(number), number, 64))
        await turns()
        stream.send(OutgoingMessage(frame(MAX_BATCH), MAX_BATCH, 64))

    assert [len(message) for message in written(script)] == [MAX_BATCH, 1]


def test_what_waits_is_written_before_the_stream_ends() -> None:
    async def script(stream: ReduceStream) -> None:
        stream.send(OutgoingMessage(frame(1), 1, 64))

    assert written(script) == [[1]]
