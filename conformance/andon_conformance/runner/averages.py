"""Averages: what a reducer computes from contributions, bit for bit (sections 4 to 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from andon.protocol.capabilities import TRIMMED, capabilities_of
from andon.protocol.encoding import Encoding
from andon.protocol.layout import Chunk
from andon.v1 import layout_pb2, reducer_pb2
from andon.wire.fields import length_prefixed
from andon_conformance.runner import reference
from andon_conformance.runner.checks import Checks, NotApplicable, require, same
from andon_conformance.runner.gradients import LAYOUT, AssignedRound, Part, Parts
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player
from andon_conformance.runner.reference import f32

__all__ = ["CHECKS"]

CHECKS = Checks()

_SPECIAL = (0.0, -0.0, 1.0, -1.5, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38)
_UNKNOWN_FIELD = b"\xca\x3e\x02hi"
"""Field 1001, of two bytes."""


async def _commit(line: LineUnderTest, round_: AssignedRound, parts: Parts) -> None:
    """Commits a round whose weights are not its sample counts."""
    for player, part in parts.items():
        weight = part.weight if part is not None else 0.0
        await line.ready(round_, player, weight=weight, loss_sum=weight)
    await line.committed(round_)


@CHECKS.add("message.any_order", "4")
async def messages_may_be_odd(line: LineUnderTest) -> None:
    """Padding and fields of later versions are ignored, and fields come in any order."""
    round_ = await line.deal()
    parts = round_.rough_parts()
    first, *others = round_.chunks
    for player in round_.players:
        stream = await player.stream()
        await stream.send(_oddly(round_.chunk_message(player, parts[player], first)))
        for chunk in others:
            await round_.send_chunk(player, parts[player], chunk)
    got = {player: await round_.gather_averages(player) for player in round_.players}
    round_.expect_averages(parts, got)


def _oddly(message: reducer_pb2.ReduceRequest) -> bytes:
    """A chunk with an unknown field first, then its fields in reverse order."""
    gradient = message.block_gradient
    gradient.padding = b"\xff" * 5
    # The payload stays last: that order is demanded of every sender.
    payload = reducer_pb2.BlockGradient(payload=gradient.payload).SerializeToString()
    gradient.ClearField("payload")
    fields = [
        reducer_pb2.BlockGradient(**{field.name: value}).SerializeToString()
        for field, value in gradient.ListFields()
    ]
    return b"\x12" + length_prefixed(b"".join([_UNKNOWN_FIELD, *reversed(fields), payload]))


@CHECKS.add("average.alone", "5")
async def one_alone_gets_its_own_back(line: LineUnderTest) -> None:
    """One contribution comes back bit for bit: signed zeros, subnormal and the largest numbers."""

    def parts_of(round_: AssignedRound) -> Parts:
        special = tuple(map(f32, _SPECIAL))
        numbers = tuple((special * 7)[: min(61, block.elements)] for block in LAYOUT.blocks)
        return {**dict.fromkeys(round_.players), round_.players[-1]: Part(17.0, numbers)}

    round_, parts, _ = await line.right_averages(parts_of)
    await _commit(line, round_, parts)


@CHECKS.add("average.weights", "5", workers=2)
async def weights_count(line: LineUnderTest) -> None:
    """The mean with unequal weights is the protocol's, bit for bit."""

    def parts_of(round_: AssignedRound) -> Parts:
        # Two numbers have the same sum in either order, so this check is about weights alone.
        two = list(round_.rough_parts().items())[:2]
        return {**dict.fromkeys(round_.players), **dict(two)}

    await line.right_averages(parts_of)


@CHECKS.add("average.order", "5", workers=3)
async def sums_are_in_rank_order(line: LineUnderTest) -> None:
    """Contributions are added in rank order, whatever the order in which they arrive."""
    await line.right_averages()


@CHECKS.add("average.everyone", "23", workers=2)
async def everybody_gets_the_same(line: LineUnderTest) -> None:
    """Every rank receives every average, with the same bytes."""
    got = await (await line.deal()).exchange()
    theirs = [[bytes(each.payload) for each in averages] for averages in got.values()]
    require(
        all(each == theirs[0] for each in theirs[1:]),
        "the same bytes at every rank",
        "averages that differ between ranks",
    )


@CHECKS.add("average.facts", "4")
async def averages_tell_what_they_are(line: LineUnderTest) -> None:
    """An average has its place, encoding, total weight, contributors and world size."""
    round_ = await line.deal()
    parts = round_.rough_parts()
    total = 0.0
    for part in parts.values():
        total += part.weight
    for averages in (await round_.exchange(parts)).values():
        for chunk, average in zip(round_.chunks, averages, strict=True):
            same("element_count", chunk.count, average.element_count)
            same("total_weight", total, average.total_weight)
            same("contributors", len(parts), average.contributors)
            same("world_size", len(parts), average.world_size)
            same("the operation", reducer_pb2.OPERATION_WEIGHTED_MEAN, average.operation)
            same("the encoding", layout_pb2.ENCODING_FLOAT32, average.encoding)


@CHECKS.add("average.abstain", "5", workers=2)
async def abstaining_ranks_are_left_out(line: LineUnderTest) -> None:
    """A rank that abstains is left out of all sums, and receives every average."""
    _, parts, got = await line.right_averages(
        lambda round_: {**round_.rough_parts(), round_.players[0]: None}
    )
    for averages in got.values():
        same("contributors", len(parts) - 1, averages[0].contributors)


@CHECKS.add("average.all_abstain", "2.15")
async def all_may_abstain(line: LineUnderTest) -> None:
    """If all abstain, every rank receives one average without elements, and the step is
    committed.
    """
    round_ = await line.deal()
    parts = dict.fromkeys(round_.players)
    for averages in (await round_.exchange(parts)).values():
        same("contributors", 0, averages[0].contributors)
        same("total_weight", 0.0, averages[0].total_weight)
        same("elements", 0, averages[0].element_count)
    await _commit(line, round_, parts)


@CHECKS.add("average.interleaved", "19.16", workers=2)
async def ranks_may_be_far_apart(line: LineUnderTest) -> None:
    """A chunk is answered as soon as all ranks have sent it, even if one of them is far ahead."""
    round_ = await line.deal()
    parts = round_.rough_parts()
    ahead, *others = round_.players
    await round_.send_part(ahead, parts[ahead])
    for chunk in round_.chunks:
        for player in others:
            await round_.send_chunk(player, parts[player], chunk)
        # Each answer comes before the others send their next chunk.
        for player in round_.players:
            await _average_at(player, chunk)


async def _average_at(player: Player, chunk: Chunk) -> Any:
    def at(each: Any) -> bool:
        return (each.block, each.element_offset) == (chunk.block, chunk.offset)

    what = f"the average of block {chunk.block} from {chunk.offset} on, which is complete"
    return await (await player.stream()).take("averaged_block", at, what=what)


@CHECKS.add("average.sequences", "4")
async def a_step_may_have_several_exchanges(line: LineUnderTest) -> None:
    """Exchanges of one step differ by their sequence, and each has weights of its own."""
    round_ = await line.deal()
    for sequence, weights in enumerate([(3.0, 0.7, 11.0, 1e-3, 29.0), (1.0, 2.0, 3.0, 4.0, 5.0)]):
        parts = round_.rough_parts(weights)
        got = await round_.exchange(parts, sequence=sequence)
        round_.expect_averages(parts, got)


@CHECKS.add("average.bfloat16", "6")
async def bfloat16_is_rounded(line: LineUnderTest) -> None:
    """BFLOAT16 contributions are added in float32 and rounded to nearest even."""
    await _encoded(line, Encoding.BFLOAT16)


@CHECKS.add("average.float16", "6")
async def float16_is_rounded(line: LineUnderTest) -> None:
    """FLOAT16 contributions, likewise."""
    await _encoded(line, Encoding.FLOAT16)


@CHECKS.add("average.answer", "6")
async def answers_have_their_own_encoding(line: LineUnderTest) -> None:
    """BFLOAT16 contributions come back in FLOAT32 if that is asked for."""
    await _encoded(line, Encoding.BFLOAT16, Encoding.FLOAT32)


@CHECKS.add("average.int8", "6")
async def int8_is_rounded(line: LineUnderTest) -> None:
    """INT8_BLOCK contributions, likewise, if RoundOpened has int8.v1."""
    await _encoded(line, Encoding.INT8_BLOCK)


@CHECKS.add("average.int4", "6")
async def int4_is_rounded(line: LineUnderTest) -> None:
    """INT4_BLOCK contributions, likewise, if RoundOpened has int4.v1."""
    await _encoded(line, Encoding.INT4_BLOCK)


@CHECKS.add("average.int2", "6")
async def int2_is_rounded(line: LineUnderTest) -> None:
    """INT2_BLOCK contributions come back in INT4_BLOCK, likewise, if RoundOpened has int2.v1."""
    await _encoded(line, Encoding.INT2_BLOCK, Encoding.INT4_BLOCK)


@CHECKS.add("average.topk", "6")
async def topk_is_listed(line: LineUnderTest) -> None:
    """TOPK contributions, likewise, if RoundOpened has topk.v1."""
    await _encoded(line, Encoding.TOPK)


@CHECKS.add("average.int8_answer", "6")
async def int8_is_answered_in_float32(line: LineUnderTest) -> None:
    """INT8_BLOCK contributions come back in FLOAT32, likewise."""
    await _encoded(line, Encoding.INT8_BLOCK, Encoding.FLOAT32)


async def _encoded(line: LineUnderTest, encoding: Encoding, answer: Encoding | None = None) -> None:
    round_ = await line.deal()
    parts = round_.rough_parts()
    for player in round_.players:
        await player.stream()
        for missing in set(capabilities_of((encoding, answer))) - player.reducer_can:
            raise NotApplicable(f"the reducer does not have {missing}")
    fields = {"encoding": encoding.value}
    if answer is not None:
        fields["answer_encoding"] = answer.value
    with round_.offered(encoding):
        averages = await round_.exchange(parts, **fields)
    round_.expect_averages(parts, averages, encoding, answer)


@CHECKS.add("average.trimmed", "5", workers=5)
async def extremes_are_left_out(line: LineUnderTest) -> None:
    """TRIMMED_MEAN of five leaves the lowest and highest out, if RoundOpened has trimmed.v1."""
    await _trimmed(line)


@CHECKS.add("average.untrimmed", "5", workers=2)
async def few_are_not_trimmed(line: LineUnderTest) -> None:
    """TRIMMED_MEAN of fewer than five ranks is the weighted mean, likewise."""

    def parts_of(round_: AssignedRound) -> Parts:
        few = list(round_.rough_parts().items())[:4]
        return {**dict.fromkeys(round_.players), **dict(few)}

    await _trimmed(line, parts_of)


async def _trimmed(
    line: LineUnderTest, parts_of: Callable[[AssignedRound], Parts] = AssignedRound.rough_parts
) -> None:
    round_ = await line.deal()
    parts = parts_of(round_)
    for player in round_.players:
        await player.stream()
        if TRIMMED not in player.reducer_can:
            raise NotApplicable(f"the reducer does not have {TRIMMED}")
    operation = reducer_pb2.OPERATION_TRIMMED_MEAN
    averages = await round_.exchange(parts, operation=operation)
    round_.expect_averages(parts, averages, mean=reference.trimmed_mean)
    for each in averages.values():
        same("the operation", operation, each[0].operation)


@CHECKS.add("average.broadcast", "5")
async def a_broadcast_is_not_looked_at(line: LineUnderTest) -> None:
    """BROADCAST: every rank receives rank 0's bytes, unchanged and unchecked."""
    round_ = await line.deal()
    sender, *others = round_.players
    # As float32 these would be NaN.
    payload = bytes([0xFF]) * 64 + bytes(range(256))
    chunk = Chunk(0, 0, len(payload))
    for player in others:
        await round_.send_part(player, None)
    await round_.send_chunk(
        sender,
        Part(1.0, ()),
        chunk,
        operation=reducer_pb2.OPERATION_BROADCAST,
        encoding=layout_pb2.ENCODING_UINT8,
        payload=payload,
    )
    for player in round_.players:
        came = await _average_at(player, chunk)
        require(came.payload == payload, "rank 0's bytes", f"others at {player.name}")
