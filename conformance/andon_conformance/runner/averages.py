"""Averages: what a reducer computes from contributions, bit for bit (sections 4 to 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from andon.protocol.capabilities import capabilities_of
from andon.protocol.encoding import Encoding
from andon.protocol.layout import Chunk
from andon.v1 import layout_pb2, reducer_pb2
from andon_conformance.runner.checks import NotApplicable, ServerCheck, check, require, same
from andon_conformance.runner.gradients import (
    LAYOUT,
    AssignedRound,
    Part,
    chunk_message,
    exchange,
    expect_averages,
    gather_averages,
    offered,
    rough_parts,
    send_part,
)
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player
from andon_conformance.runner.reference import f32
from andon_conformance.runner.talk import Talk

__all__ = ["CHECKS"]

_SPECIAL = (0.0, -0.0, 1.0, -1.5, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38)


async def _end(line: LineUnderTest, round_: AssignedRound, parts: Sequence[Part | None]) -> None:
    """Commits a round whose weights are not its sample counts."""
    for rank, player in enumerate(round_.players):
        part = parts[rank]
        weight = part.weight if part is not None else 0.0
        await line.ready(round_, player, weight=weight, loss_sum=weight)
    await line.committed(round_)


@check(
    "average.alone",
    "5",
    "One contribution comes back bit for bit: signed zeros, subnormal and the largest numbers",
)
async def one_alone_gets_its_own_back(line: LineUnderTest) -> None:
    round_ = await line.deal()
    special = tuple(map(f32, _SPECIAL))
    numbers = tuple(tuple((special * 7)[: min(61, block.elements)]) for block in LAYOUT.blocks)
    parts: dict[Player, Part | None] = dict.fromkeys(round_.players)
    parts[round_.players[-1]] = Part(17.0, numbers)
    expect_averages(round_, parts, await exchange(round_, parts))
    await _end(line, round_, list(parts.values()))


@check(
    "average.weights",
    "5",
    "The mean with unequal weights is the protocol's, bit for bit",
    workers=2,
)
async def weights_count(line: LineUnderTest) -> None:
    round_ = await line.deal()
    first, second = round_.players[:2]
    full = rough_parts(round_)
    parts: dict[Player, Part | None] = dict.fromkeys(round_.players)
    # Two numbers have the same sum in either order, so this check is about weights alone.
    parts[first], parts[second] = full[first], full[second]
    expect_averages(round_, parts, await exchange(round_, parts))


@check(
    "average.order",
    "5",
    "Contributions are added in rank order, whatever the order in which they arrive",
    workers=3,
)
async def sums_are_in_rank_order(line: LineUnderTest) -> None:
    round_ = await line.deal()
    parts = rough_parts(round_)
    # `exchange` sends the last rank's contribution first.
    expect_averages(round_, parts, await exchange(round_, parts))


@check(
    "average.everyone",
    "23",
    "Every rank receives every average, with the same bytes",
    workers=2,
)
async def everybody_gets_the_same(line: LineUnderTest) -> None:
    round_ = await line.deal()
    got = await exchange(round_)
    theirs = [[bytes(each.payload) for each in averages] for averages in got.values()]
    require(
        all(each == theirs[0] for each in theirs[1:]),
        "the same bytes at every rank",
        "averages that differ between ranks",
    )


@check(
    "average.facts",
    "4",
    "An average has its place, encoding, total weight, contributors and world size",
)
async def averages_tell_what_they_are(line: LineUnderTest) -> None:
    round_ = await line.deal()
    parts = rough_parts(round_)
    total = 0.0
    for part in parts.values():
        total += part.weight
    for averages in (await exchange(round_, parts)).values():
        for chunk, average in zip(round_.chunks, averages, strict=True):
            same("element_count", chunk.count, average.element_count)
            same("total_weight", total, average.total_weight)
            same("contributors", len(parts), average.contributors)
            same("world_size", len(parts), average.world_size)
            same("the operation", reducer_pb2.OPERATION_WEIGHTED_MEAN, average.operation)
            same("the encoding", layout_pb2.ENCODING_FLOAT32, average.encoding)


@check(
    "average.abstain",
    "5",
    "A rank that abstains is left out of all sums, and receives every average",
    workers=2,
)
async def abstaining_ranks_are_left_out(line: LineUnderTest) -> None:
    round_ = await line.deal()
    full = rough_parts(round_)
    parts: dict[Player, Part | None] = {**full, round_.players[0]: None}
    got = await exchange(round_, parts)
    expect_averages(round_, parts, got)
    for averages in got.values():
        same("contributors", len(parts) - 1, averages[0].contributors)


@check(
    "average.all_abstain",
    "2.15",
    "If all abstain, every rank receives one average without elements, and the step is committed",
)
async def all_may_abstain(line: LineUnderTest) -> None:
    round_ = await line.deal()
    parts = dict.fromkeys(round_.players)
    for averages in (await exchange(round_, parts)).values():
        same("contributors", 0, averages[0].contributors)
        same("total_weight", 0.0, averages[0].total_weight)
        same("elements", 0, averages[0].element_count)
    await _end(line, round_, [None] * len(round_.players))


@check(
    "average.interleaved",
    "19.16",
    "A chunk is answered as soon as all ranks have sent it, even if one of them is far ahead",
    workers=2,
)
async def ranks_may_be_far_apart(line: LineUnderTest) -> None:
    round_ = await line.deal()
    parts = rough_parts(round_)
    ahead, *others = round_.players
    await send_part(round_, ahead, parts[ahead])
    for chunk in round_.chunks:
        for player in others:
            stream = await player.stream()
            await stream.send(chunk_message(round_, player, parts[player], chunk))
        for player in round_.players:
            await _average_at(await player.stream(), chunk)


async def _average_at(stream: Talk[Any], chunk: Chunk) -> Any:
    def at(each: Any) -> bool:
        return (each.block, each.element_offset) == (chunk.block, chunk.offset)

    what = f"the average of block {chunk.block} from {chunk.offset} on, which is complete"
    return await stream.take("averaged_block", at, what=what)


@check(
    "average.sequences",
    "4",
    "Exchanges of one step differ by their sequence, and each has weights of its own",
)
async def a_step_may_have_several_exchanges(line: LineUnderTest) -> None:
    round_ = await line.deal()
    for sequence, weights in enumerate([(3.0, 0.7, 11.0, 1e-3), (1.0, 2.0, 3.0, 4.0)]):
        parts = rough_parts(round_, weights)
        got = await exchange(round_, parts, sequence=sequence)
        expect_averages(round_, parts, got)


@check(
    "average.bfloat16",
    "6",
    "BFLOAT16 contributions are added in float32 and rounded to nearest even",
)
async def bfloat16_is_rounded(line: LineUnderTest) -> None:
    await _encoded(line, Encoding.BFLOAT16, None)


@check("average.float16", "6", "FLOAT16 contributions, likewise")
async def float16_is_rounded(line: LineUnderTest) -> None:
    await _encoded(line, Encoding.FLOAT16, None)


@check("average.answer", "6", "BFLOAT16 contributions come back in FLOAT32 if that is asked for")
async def answers_have_their_own_encoding(line: LineUnderTest) -> None:
    await _encoded(line, Encoding.BFLOAT16, Encoding.FLOAT32)


@check("average.int8", "6", "INT8_BLOCK contributions, likewise, if RoundOpened has int8.v1")
async def int8_is_rounded(line: LineUnderTest) -> None:
    await _encoded(line, Encoding.INT8_BLOCK, None)


@check("average.int4", "6", "INT4_BLOCK contributions, likewise, if RoundOpened has int4.v1")
async def int4_is_rounded(line: LineUnderTest) -> None:
    await _encoded(line, Encoding.INT4_BLOCK, None)


@check("average.int8_answer", "6", "INT8_BLOCK contributions come back in FLOAT32, likewise")
async def int8_is_answered_in_float32(line: LineUnderTest) -> None:
    await _encoded(line, Encoding.INT8_BLOCK, Encoding.FLOAT32)


async def _encoded(line: LineUnderTest, encoding: Encoding, answer: Encoding | None) -> None:
    round_ = await line.deal()
    parts = rough_parts(round_)
    for player in round_.players:
        await player.stream()
        for missing in set(capabilities_of((encoding, answer))) - player.reducer_can:
            raise NotApplicable(f"the reducer does not have {missing}")
    fields = {"encoding": encoding.value}
    if answer is not None:
        fields["answer_encoding"] = answer.value
    with offered(round_, encoding):
        averages = await exchange(round_, parts, **fields)
    expect_averages(round_, parts, averages, encoding, answer)


@check(
    "average.broadcast",
    "5",
    "BROADCAST: every rank receives rank 0's bytes, unchanged and unchecked",
)
async def a_broadcast_is_not_looked_at(line: LineUnderTest) -> None:
    round_ = await line.deal()
    sender, *others = round_.players
    # As float32 these would be NaN.
    payload = bytes([0xFF]) * 64 + bytes(range(256))
    for player in others:
        await send_part(round_, player, None)
    message = chunk_message(
        round_,
        sender,
        Part(1.0, ()),
        Chunk(0, 0, len(payload)),
        operation=reducer_pb2.OPERATION_BROADCAST,
        encoding=layout_pb2.ENCODING_UINT8,
        payload=payload,
    )
    await (await sender.stream()).send(message)
    for player in round_.players:
        came = await _average_at(await player.stream(), Chunk(0, 0, len(payload)))
        require(came.payload == payload, "rank 0's bytes", f"others at {player.name}")


@check(
    "message.any_order",
    "4",
    "Padding and fields of later versions are ignored, and fields come in any order",
)
async def messages_may_be_odd(line: LineUnderTest) -> None:
    round_ = await line.deal()
    parts = rough_parts(round_)
    first = round_.chunks[0]
    for player in round_.players:
        padded = chunk_message(round_, player, parts[player], first, padding=b"\xff" * 5)
        gradient = padded.block_gradient
        payload = reducer_pb2.BlockGradient(payload=gradient.payload).SerializeToString()
        gradient.ClearField("payload")
        fields = [
            reducer_pb2.BlockGradient(**{field.name: value}).SerializeToString()
            for field, value in gradient.ListFields()
        ]
        body = b"".join([_UNKNOWN_FIELD, *reversed(fields), payload])
        await (await player.stream()).send(b"\x12" + _varint(len(body)) + body)
        for chunk in round_.chunks[1:]:
            message = chunk_message(round_, player, parts[player], chunk)
            await (await player.stream()).send(message)
    got = {player: await gather_averages(round_, player) for player in round_.players}
    expect_averages(round_, parts, got)


_UNKNOWN_FIELD = b"\xca\x3e\x02hi"
"""Field 1001, of two bytes."""


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


CHECKS: tuple[ServerCheck, ...] = (
    messages_may_be_odd,
    one_alone_gets_its_own_back,
    weights_count,
    sums_are_in_rank_order,
    everybody_gets_the_same,
    averages_tell_what_they_are,
    abstaining_ranks_are_left_out,
    all_may_abstain,
    ranks_may_be_far_apart,
    a_step_may_have_several_exchanges,
    bfloat16_is_rounded,
    float16_is_rounded,
    answers_have_their_own_encoding,
    int8_is_rounded,
    int4_is_rounded,
    int8_is_answered_in_float32,
    a_broadcast_is_not_looked_at,
)
