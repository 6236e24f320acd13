"""Sessions: how a data stream must begin, and which chunks end it (sections 4, 12 and 25)."""

from __future__ import annotations

from typing import Any

from andon.protocol.capabilities import REDUCER_CAPABILITIES
from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.v1 import layout_pb2, reducer_pb2
from andon.wire import conversion
from andon_conformance.runner.checks import Checks, require, same
from andon_conformance.runner.line import LineUnderTest

__all__ = ["CHECKS"]

CHECKS = Checks()


@CHECKS.add("session.opened", "4")
async def the_opening_is_answered(line: LineUnderTest) -> None:
    """RoundOpened names capabilities that both sides have, and the largest payload."""
    for player in line.players:
        talk = await player.open_bulk()
        opened = await talk.take("round_opened")
        await talk.cancel()
        extra = set(opened.capabilities) - set(REDUCER_CAPABILITIES)
        require(not extra, "none of the capabilities that are not Andon's", ", ".join(extra))
        most = opened.max_payload_bytes
        limit = f"a largest payload of 1 to {MAX_PAYLOAD_BYTES} bytes"
        require(0 < most <= MAX_PAYLOAD_BYTES, limit, most)


@CHECKS.add("session.token", "25")
async def tokens_are_a_workers_own(line: LineUnderTest) -> None:
    """OpenRound with another worker's session token ends with UNAUTHENTICATED."""
    player = line.players[0]
    if len(line.players) > 1:
        token = line.players[1].accepted.session_token
    else:
        *first, last = player.accepted.session_token
        token = bytes([*first, last ^ 1])
    talk = await player.open_bulk(token=token)
    same("the status", "UNAUTHENTICATED", (await talk.refusal()).code.name)


@CHECKS.add("session.open_first", "4")
async def the_opening_comes_first(line: LineUnderTest) -> None:
    """A data stream whose first message is not OpenRound ends with INVALID_ARGUMENT."""
    talk = line.players[0].start_bulk()
    key = conversion.key_to_proto(line.players[0].head)
    abstain = reducer_pb2.Abstain(key=key, rank=0, world_size=1)
    await talk.send(reducer_pb2.ReduceRequest(abstain=abstain))
    await talk.ends_with("INVALID_ARGUMENT")


@CHECKS.add("session.unknown_case", "4")
async def unknown_requests_are_refused(line: LineUnderTest) -> None:
    """A oneof case that the reducer does not know ends the stream with INVALID_ARGUMENT."""
    stream = await line.players[0].stream()
    await stream.send(b"\xca\x3e\x00")
    await stream.ends_with("INVALID_ARGUMENT")


@CHECKS.add("session.count", "4")
async def counts_must_agree(line: LineUnderTest) -> None:
    """A payload whose length is not element_count numbers ends the stream with INVALID_ARGUMENT."""
    await _refused(line, {"element_count": 5})


@CHECKS.add("session.chunk", "12")
async def chunks_have_a_limit(line: LineUnderTest) -> None:
    """A chunk of more than chunk_elements ends the stream with INVALID_ARGUMENT."""
    # In the smallest encoding, so that only the element count is too large, not the byte count.
    limit = line.players[0].accepted.policy.chunk_elements
    fields = {"block": 1, "element_count": limit + 1, "payload": bytes(2 * (limit + 1))}
    await _refused(line, {**fields, "encoding": layout_pb2.ENCODING_BFLOAT16})


@CHECKS.add("session.rising", "2.16")
async def chunks_must_rise(line: LineUnderTest) -> None:
    """Chunks out of order on a stream end it with INVALID_ARGUMENT."""
    await _refused(line, {}, places=(1, 0))


async def _refused(
    line: LineUnderTest, fields: dict[str, Any], places: tuple[int, ...] = (0,)
) -> None:
    """A rank sends the chunks at these places, with `fields` changed: the last one is refused."""
    round_ = await line.deal()
    player = round_.players[0]
    part = round_.rough_parts()[player]
    for place in places:
        await round_.send_chunk(player, part, round_.chunks[place], **fields)
    await (await player.stream()).ends_with("INVALID_ARGUMENT")
