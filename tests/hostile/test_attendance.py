"""Ranks that lie, and strangers that never were ranks: each ends its own stream, or its own session
as the culprit, and the service goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from andon.protocol.limits import COUNT_LIMIT, MAX_TEXT_BYTES, PROTOCOL_VERSION
from andon.v1 import record_pb2
from andon.v1 import session_pb2 as pb
from integration.served import Served, config_in, run, serving
from integration.strangers import Refused

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

TOKEN = b"a-token-of-the-tests"
ATTEND = "/andon.v1.Coordinator/Attend"
LIAR = 1
ANSWER_S = 20.0
"""How long a busy service may take for an answer."""
LONG = "x" * 2**20
HUGE = 2**64 - 1


def attend(rank: int, **fields: Any) -> pb.AttendRequest:
    given = {
        "rank": rank, "world_size": 2, "incarnation": rank + 1, "node_id": f"host-{rank}",
        "protocol_version": PROTOCOL_VERSION, "token": TOKEN, **fields,
    }  # fmt: skip
    return pb.AttendRequest(attend=pb.Attend(**given))


@dataclass
class Rank:
    """A stream that sends what it likes."""

    call: Any
    key: record_pb2.Key = field(default_factory=record_pb2.Key)

    async def say(self, message: pb.AttendRequest | bytes) -> None:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await self.call.write(data)

    async def hear(self) -> pb.AttendResponse:
        data = await asyncio.wait_for(self.call.read(), ANSWER_S)
        assert data is not grpc.aio.EOF, await self.call.code()
        return pb.AttendResponse.FromString(data)

    async def end(self) -> Refused:
        """How the service ends the stream, after what it still says."""
        try:
            while await asyncio.wait_for(self.call.read(), ANSWER_S) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return Refused.of(error)
        raise AssertionError("the stream ended without an error")

    async def goes_on(self, number: int) -> None:
        """A report of this rank is answered."""
        await self.say(pb.AttendRequest(report=pb.RankReport(key=self.key, number=number)))
        answer = await self.hear()
        assert answer.report_answer.number == number, answer


def open_rank(channel: grpc.aio.Channel) -> Rank:
    return Rank(channel.stream_stream(ATTEND)())


async def session(channel: grpc.aio.Channel) -> list[Rank]:
    ranks = [open_rank(channel) for _ in range(2)]
    for number, rank in enumerate(ranks):
        await rank.say(attend(number))
    for rank in ranks:
        rank.key = (await rank.hear()).formed.key
    return ranks


def told(story: Callable[[Served, grpc.aio.Channel], Any], folder: Path) -> None:
    async def whole() -> None:
        async with (
            serving(config_in(folder, token=TOKEN)) as served,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            await story(served, channel)

    run(whole())


# Who shows no token learns nothing, not even that its message is wrong.
STRANGERS: dict[str, tuple[bytes | pb.AttendRequest, str]] = {
    "garbage": (b"\xff" * 1000, "INVALID_ARGUMENT INVALID_MESSAGE"),
    "an empty message": (b"", "UNAUTHENTICATED TOKEN"),
    "no token": (attend(0, token=b""), "UNAUTHENTICATED TOKEN"),
    "another token": (attend(0, token=b"another-token-of-the-tests"), "UNAUTHENTICATED TOKEN"),
    "another run": (attend(0, run_id="99aa"), "NOT_FOUND WRONG_RUN"),
    "a rank that can't be": (attend(HUGE % 2**32), "INVALID_ARGUMENT INVALID_MESSAGE"),
    "a world of millions": (
        attend(0, world_size=2**31), "INVALID_ARGUMENT INVALID_MESSAGE"
    ),
    "a term of the future": (
        attend(0, greatest_term=HUGE), "INVALID_ARGUMENT INVALID_MESSAGE"
    ),
    "too many capabilities": (
        attend(0, capabilities=["x"] * 10_000), "RESOURCE_EXHAUSTED TOO_LARGE"
    ),
    "an address that is none": (
        attend(0, address=LONG), "INVALID_ARGUMENT INVALID_MESSAGE"
    ),
    "a report without a session": (
        pb.AttendRequest(report=pb.RankReport(number=1)), "UNAUTHENTICATED TOKEN"
    ),
    "the end of all": (
        pb.AttendRequest(end=pb.EndAttendance(done=True)), "UNAUTHENTICATED TOKEN"
    ),
}  # fmt: skip


def test_a_stranger_ends_its_own_stream_and_no_session(tmp_path: Path) -> None:
    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        ranks = await session(channel)
        ends = {}
        for name, (message, _) in STRANGERS.items():
            stranger = open_rank(channel)
            await stranger.say(message)
            ends[name] = str(await stranger.end())

        assert ends == {name: end for name, (_, end) in STRANGERS.items()}
        for rank in ranks:
            await rank.goes_on(1)

    told(story, tmp_path)


def report(**fields: Any) -> Callable[[Rank], pb.AttendRequest]:
    return lambda rank: pb.AttendRequest(report=pb.RankReport(key=rank.key, **fields))


def fault(**fields: Any) -> Callable[[Rank], pb.AttendRequest]:
    return lambda rank: pb.AttendRequest(fault=pb.RankFault(key=rank.key, **fields))


def pending(**fields: Any) -> pb.PendingCall:
    call = pb.Call(kind=pb.CALL_KIND_BARRIER, tensors=1)
    return pb.PendingCall(**{"call": call, **fields})


UNKNOWN = pb.Call.FromString(b"\x08\x4d")
"""A call of kind 77."""


def numbers(*names: str) -> list[pb.NamedNumber]:
    return [pb.NamedNumber(name=name, step=1, value=1.0) for name in names]


LIES: dict[str, Callable[[Rank], pb.AttendRequest | bytes]] = {
    "a second attend": lambda rank: attend(LIAR),
    "garbage": lambda rank: b"\xff" * 1000,
    "10,000 numbers": report(numbers=numbers(*map(str, range(10_000)))),
    "a number's name of a megabyte": report(numbers=numbers(LONG)),
    "a count beyond all counts": report(steps=HUGE),
    "a time that is none": report(exchange_s=float("nan"), calls=HUGE),
    "a call that nobody can mean": report(pending=pending(call=UNKNOWN)),
    "10,000 ranks that are missing": report(pending=pending(missing=range(10_000))),
    "a rank that is not there is accused": fault(end=pb.SESSION_END_RANK_LEFT, culprit=7),
    "an end that is for the coordinator to say": fault(end=pb.SESSION_END_OPERATOR, culprit=0),
    "an element of 10,000 dimensions": fault(
        end=pb.SESSION_END_NON_FINITE, culprit=LIAR, element=[1] * 10_000
    ),
    "an element beyond all elements": fault(
        end=pb.SESSION_END_NON_FINITE, culprit=LIAR, element=[HUGE], parameter="w", value="nan"
    ),
    "texts of a megabyte": fault(
        end=pb.SESSION_END_SCRIPT_FAILED, culprit=LIAR, message=LONG + "\x1b[2J\n", value=LONG
    ),
    "a message of 8 MiB": report(numbers=numbers(8 * LONG)),
}


def test_a_rank_that_lies_ends_its_session_as_the_culprit_and_the_next_one_forms(
    tmp_path: Path,
) -> None:
    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        culprits, texts = {}, []
        for name, lie in LIES.items():
            honest, liar = await session(channel)
            await liar.say(lie(liar))
            over = (await honest.hear()).over
            culprits[name] = over.culprit if over.HasField("culprit") else None
            texts += [over.message, over.fault.message, over.fault.value]
            liar.call.cancel()

        assert culprits == dict.fromkeys(LIES, LIAR)
        assert max(len(text.encode()) for text in texts) <= MAX_TEXT_BYTES
        assert all(text.isprintable() for text in texts)
        status = served.coordinator.status()
        assert status.session is not None
        assert status.session.formed == len(LIES)
        for rank in await session(channel):
            await rank.goes_on(1)

    told(story, tmp_path)


def test_messages_of_another_session_have_no_effect(tmp_path: Path) -> None:
    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        honest, liar = await session(channel)
        others = [
            record_pb2.Key(term=liar.key.term, round=liar.key.round + 1),
            record_pb2.Key(term=HUGE, round=COUNT_LIMIT - 1),
        ]
        for key in others:
            await liar.say(pb.AttendRequest(report=pb.RankReport(key=key, number=9, steps=99)))
            accuses = pb.RankFault(key=key, end=pb.SESSION_END_CALLS_DIFFER, culprit=0)
            await liar.say(pb.AttendRequest(fault=accuses))
            await liar.say(pb.AttendRequest(end=pb.EndAttendance(key=key, done=True)))

        # The first answer that it gets is that of its own session.
        await liar.goes_on(1)
        await honest.goes_on(1)
        status = served.coordinator.status()
        assert status.session is not None
        assert [rank.report.steps for rank in status.session.ranks] == [0, 0]

    told(story, tmp_path)


def test_a_flood_of_reports_that_nobody_reads_keeps_no_other_rank_waiting(tmp_path: Path) -> None:
    async def flood(liar: Rank) -> None:
        names = [f"{number}" for number in range(64)]
        while True:
            await liar.say(report(numbers=numbers(*names), number=1)(liar))

    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        async with grpc.aio.insecure_channel(
            served.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as other:
            honest, liar = open_rank(channel), open_rank(other)
            for number, rank in enumerate((honest, liar)):
                await rank.say(attend(number))
            for rank in (honest, liar):
                rank.key = (await rank.hear()).formed.key
            flooding = asyncio.create_task(flood(liar))
            for number in range(1, 20):
                await asyncio.wait_for(honest.goes_on(number), ANSWER_S)
            flooding.cancel()
            liar.call.cancel()

            over = (await honest.hear()).over

        assert (over.end, over.culprit) == (pb.SESSION_END_RANK_LOST, LIAR)

    told(story, tmp_path)
