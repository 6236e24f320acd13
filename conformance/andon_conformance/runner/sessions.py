"""Sessions: how a data stream must begin, and which chunks end it (sections 4, 12 and 25)."""

from __future__ import annotations

from typing import Any

from andon.protocol.capabilities import REDUCER_CAPABILITIES
from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.v1 import layout_pb2, reducer_pb2
from andon.wire import conversion
from andon_conformance.runner.checks import ServerCheck, check, require, same
from andon_conformance.runner.gradients import chunk_message, rough_parts
from andon_conformance.runner.line import LineUnderTest

__all__ = ["CHECKS"]


@check(
    "session.token",
    "25",
    "OpenRound with another worker's session token ends with UNAUTHENTICATED",
)
async def tokens_are_a_workers_own(line: LineUnderTest) -> None:
    player = line.players[0]
    if len(line.players) > 1:
        token = line.players[1].accepted.session_token
    else:
        *first, last = player.accepted.session_token
        token = bytes([*first, last ^ 1])
    talk = await player.open_bulk(token=token)
    same("the status", "UNAUTHENTICATED", (await talk.refusal()).code.name)


@check(
    "session.opened",
    "4",
    "RoundOpened names capabilities that both sides have, and the largest payload",
)
async def the_opening_is_answered(line: LineUnderTest) -> None:
    for player in line.players:
        talk = await player.open_bulk()
        opened = await talk.take("round_opened")
        await talk.cancel()
        extra = set(opened.capabilities) - set(REDUCER_CAPABILITIES)
        require(not extra, "none of the capabilities that are not Andon's", ", ".join(extra))
        most = opened.max_payload_bytes
        limit = f"a largest payload of 1 to {MAX_PAYLOAD_BYTES} bytes"
        require(0 < most <= MAX_PAYLOAD_BYTES, limit, most)


@check(
    "session.open_first",
    "4",
    "A data stream whose first message is not OpenRound ends with INVALID_ARGUMENT",
)
async def the_opening_comes_first(line: LineUnderTest) -> None:
    talk = line.players[0].start_bulk()
    key = conversion.key_to_proto(line.players[0].head)
    abstain = reducer_pb2.Abstain(key=key, rank=0, world_size=1)
    await talk.send(reducer_pb2.ReduceRequest(abstain=abstain))
    same("the status", "INVALID_ARGUMENT", (await talk.end()).code.name)


@check(
    "session.unknown_case",
    "4",
    "A oneof case that the reducer does not know ends the stream with INVALID_ARGUMENT",
)
async def unknown_requests_are_refused(line: LineUnderTest) -> None:
    stream = await line.players[0].stream()
    await stream.send(b"\xca\x3e\x00")
    same("the status", "INVALID_ARGUMENT", (await stream.end()).code.name)


@check(
    "session.count",
    "4",
    "A payload whose length is not element_count numbers ends the stream with INVALID_ARGUMENT",
)
async def counts_must_agree(line: LineUnderTest) -> None:
    await _refused_chunk(line, element_count=5)


@check(
    "session.chunk",
    "12",
    "A chunk of more than chunk_elements ends the stream with INVALID_ARGUMENT",
)
async def chunks_have_a_limit(line: LineUnderTest) -> None:
    # In the smallest encoding, so that only the element count is too large, not the byte count.
    limit = line.players[0].accepted.policy.chunk_elements
    await _refused_chunk(
        line,
        block=1,
        element_count=limit + 1,
        encoding=layout_pb2.ENCODING_BFLOAT16,
        payload=bytes(2 * (limit + 1)),
    )


@check(
    "session.rising",
    "2.16",
    "Chunks out of order on a stream end it with INVALID_ARGUMENT",
)
async def chunks_must_rise(line: LineUnderTest) -> None:
    round_ = await line.deal()
    player = round_.players[0]
    part = rough_parts(round_)[player]
    stream = await player.stream()
    await stream.send(chunk_message(round_, player, part, round_.chunks[1]))
    await stream.send(chunk_message(round_, player, part, round_.chunks[0]))
    same("the status", "INVALID_ARGUMENT", (await stream.end()).code.name)


async def _refused_chunk(line: LineUnderTest, **fields: Any) -> None:
    round_ = await line.deal()
    player = round_.players[0]
    part = rough_parts(round_)[player]
    stream = await player.stream()
    await stream.send(chunk_message(round_, player, part, round_.chunks[0], **fields))
    same("the status", "INVALID_ARGUMENT", (await stream.end()).code.name)


CHECKS: tuple[ServerCheck, ...] = (
    the_opening_is_answered,
    tokens_are_a_workers_own,
    the_opening_comes_first,
    unknown_requests_are_refused,
    counts_must_agree,
    chunks_have_a_limit,
    chunks_must_rise,
)
