"""Faults: contributions that must not be averaged, and too old keys (sections 4 and 23)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from andon.protocol.encoding import Encoding
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import layout_pb2, reducer_pb2
from andon.wire import conversion
from andon_conformance.runner import reference
from andon_conformance.runner.checks import ServerCheck, Violation, check, require, same
from andon_conformance.runner.gradients import (
    AssignedRound,
    Part,
    chunk_message,
    exchange,
    offered,
    rough_parts,
    send_part,
)
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of

__all__ = ["BIAS", "CHECKS", "poisoned"]

BIAS = 22
"""Element of block 0: it is `bias[1]`."""


def poisoned(part: Part, value: float, *, block: int = 0, element: int = BIAS) -> Part:
    """A copy of a contribution with another number at one element."""
    numbers = list(part.blocks[block])
    numbers[element % len(numbers)] = value
    blocks = list(part.blocks)
    blocks[block] = tuple(numbers)
    return replace(part, blocks=tuple(blocks))


async def _faults(round_: AssignedRound) -> dict[Player, Any]:
    """The BlockFault that each rank receives."""
    received = {}
    for player in round_.players:
        stream = await player.stream()
        message = await stream.first(_judges_the_first_block, what="a BlockFault")
        if message.HasField("averaged_block"):
            raise Violation("a BlockFault", f"an average of the same chunk at {player.name}")
        require(_is_of(message.block_fault, round_.key), "a BlockFault of the round's key", message)
        received[player] = message.block_fault
    return received


def _judges_the_first_block(message: reducer_pb2.ReduceResponse) -> bool:
    """Whether an answer is about block 0, where the contradictions are."""
    case = message.WhichOneof("message")
    average = case == "averaged_block" and message.averaged_block.block == 0
    return average or case == "block_fault"


def _is_of(message: Any, key: Key) -> bool:
    return (message.key.term, message.key.round) == (key.term, key.round)


async def _inconsistent(
    line: LineUnderTest, send: Callable[[AssignedRound, Mapping[Player, Part]], Any]
) -> None:
    """Every rank contributes; then a message contradicts, and all ranks receive the fault."""
    round_ = await line.deal()
    parts = rough_parts(round_)
    for player in round_.players:
        await player.stream()
    await send(round_, parts)
    for player, fault in (await _faults(round_)).items():
        same(f"the fault at {player.name}:", "BLOCK_FAULT_KIND_INCONSISTENT", _kind(fault))


def _kind(fault: Any) -> str:
    return reducer_pb2.BlockFaultKind.Name(fault.kind)


async def _non_finite(line: LineUnderTest, value: float, text: str) -> None:
    round_ = await line.deal()
    parts: dict[Player, Part | None] = dict(rough_parts(round_))
    bad = round_.players[-1]
    part = parts[bad]
    assert part is not None
    parts[bad] = poisoned(part, value)
    for player in reversed(round_.players):
        await send_part(round_, player, parts[player])
    for player, fault in (await _faults(round_)).items():
        same(f"the fault at {player.name}:", "BLOCK_FAULT_KIND_NON_FINITE", _kind(fault))
        require(fault.HasField("rank"), "the rank at fault", "none")
        same("its rank", len(round_.players) - 1, fault.rank)
        same("its block", 0, fault.block)
        same("its element", BIAS, fault.element)
        same("its value", text, fault.value)


@check(
    "fault.nan",
    "23",
    "A NaN is reported to every rank: NON_FINITE, with rank, block, element, value",
)
async def a_nan_is_told_to_all(line: LineUnderTest) -> None:
    await _non_finite(line, math.nan, "nan")


@check("fault.infinity", "23", "An infinity, likewise")
async def an_infinity_is_told_to_all(line: LineUnderTest) -> None:
    await _non_finite(line, -math.inf, "-inf")


@check(
    "fault.average",
    "23",
    "A mean that is not finite though all contributions are: NON_FINITE_AVERAGE",
    workers=3,
)
async def an_overflowing_mean_is_told_to_all(line: LineUnderTest) -> None:
    round_ = await line.deal()
    parts = _overflowing(round_)
    for player in round_.players:
        await send_part(round_, player, parts[player])
    for player, fault in (await _faults(round_)).items():
        same(f"the fault at {player.name}:", "BLOCK_FAULT_KIND_NON_FINITE_AVERAGE", _kind(fault))
        same("its element", BIAS, fault.element)
        require(not fault.HasField("rank"), "no rank: no single one is at fault", fault.rank)


def _overflowing(round_: AssignedRound) -> dict[Player, Part]:
    """The largest float32 from every rank, under weights whose quotients are rounded up."""
    largest = reference.f32(3.4028234663852886e38)
    size = len(round_.works)
    for seed in range(1000):
        draw = random.Random(seed)
        weights = [float(draw.randint(1, 2**20)) for _ in range(size)]
        if math.isinf(reference.mean([(weight, [largest]) for weight in weights])[1][0]):
            return {
                player: replace(poisoned(part, largest), weight=weights[rank])
                for rank, (player, part) in enumerate(rough_parts(round_).items())
            }
    raise AssertionError("some quotients of three and more weights are rounded up that far")


@check(
    "fault.overflow",
    "23",
    "A finite mean that the answer's encoding can't hold: ENCODING_OVERFLOW",
)
async def an_encoding_that_is_too_small(line: LineUnderTest) -> None:
    round_ = await line.deal()
    fields = {"answer_encoding": layout_pb2.ENCODING_FLOAT16}
    for player, part in rough_parts(round_).items():
        await send_part(round_, player, poisoned(part, 70_000.0), **fields)
    with offered(round_, Encoding.FLOAT16):
        faults = await _faults(round_)
    for player, fault in faults.items():
        same(f"the fault at {player.name}:", "BLOCK_FAULT_KIND_ENCODING_OVERFLOW", _kind(fault))
        same("its element", BIAS, fault.element)


@check("fault.twice", "23", "A chunk that comes twice, on two streams of a rank: INCONSISTENT")
async def a_chunk_comes_once(line: LineUnderTest) -> None:
    async def send(round_: AssignedRound, parts: Mapping[Player, Part]) -> None:
        await _first_chunks(line, round_, parts)
        player = round_.players[0]
        other = await player.open_bulk()
        await other.take("round_opened")
        await other.send(chunk_message(round_, player, parts[player], round_.chunks[0]))

    await _inconsistent(line, send)


@check("fault.weight", "2.15", "A rank that changes its weight within an exchange: INCONSISTENT")
async def a_rank_has_one_weight(line: LineUnderTest) -> None:
    async def send(round_: AssignedRound, parts: Mapping[Player, Part]) -> None:
        await _first_chunks(line, round_, parts)
        player = round_.players[0]
        message = chunk_message(round_, player, parts[player], round_.chunks[1], weight=5.5)
        await (await player.stream()).send(message)

    await _inconsistent(line, send)


@check("fault.bad_weight", "23", "A weight that is negative: INCONSISTENT")
async def weights_are_above_zero(line: LineUnderTest) -> None:
    async def send(round_: AssignedRound, parts: Mapping[Player, Part]) -> None:
        await _first_chunks(line, round_, parts, skip=1)
        player = round_.players[0]
        message = chunk_message(round_, player, parts[player], round_.chunks[1], weight=-1.0)
        await (await player.stream()).send(message)

    await _inconsistent(line, send)


@check("fault.world_size", "23", "Ranks that disagree on the world size: INCONSISTENT")
async def ranks_agree_on_their_number(line: LineUnderTest) -> None:
    async def send(round_: AssignedRound, parts: Mapping[Player, Part]) -> None:
        await _first_chunks(line, round_, parts)
        player = round_.players[0]
        size = len(round_.works) + 1
        message = chunk_message(round_, player, parts[player], round_.chunks[1], world_size=size)
        await (await player.stream()).send(message)

    await _inconsistent(line, send)


@check(
    "fault.rank",
    "23",
    "A worker that contributes in another one's rank: INCONSISTENT",
    workers=2,
)
async def a_rank_is_one_workers(line: LineUnderTest) -> None:
    async def send(round_: AssignedRound, parts: Mapping[Player, Part]) -> None:
        await _first_chunks(line, round_, parts)
        second = round_.players[1]
        message = chunk_message(round_, second, parts[second], round_.chunks[1], rank=0)
        await (await second.stream()).send(message)

    await _inconsistent(line, send)


@check(
    "fault.encoding",
    "23",
    "Ranks that disagree on the encoding: INCONSISTENT",
    workers=2,
)
async def ranks_agree_on_the_encoding(line: LineUnderTest) -> None:
    async def send(round_: AssignedRound, parts: Mapping[Player, Part]) -> None:
        first, *others = round_.players
        for player in others:
            chunk = round_.chunks[0]
            await (await player.stream()).send(chunk_message(round_, player, parts[player], chunk))
        fields = {"encoding": Encoding.BFLOAT16.value}
        message = chunk_message(round_, first, parts[first], round_.chunks[0], **fields)
        await (await first.stream()).send(message)

    await _inconsistent(line, send)


async def _first_chunks(
    line: LineUnderTest, round_: AssignedRound, parts: Mapping[Player, Part], *, skip: int = 0
) -> None:
    """Sends the first chunk of every rank, except of the first `skip` ranks."""
    for player in round_.players[skip:]:
        message = chunk_message(round_, player, parts[player], round_.chunks[0])
        await (await player.stream()).send(message)
    if not skip:
        for player in round_.players:
            await (await player.stream()).take("averaged_block")


@check(
    "reduce.aborted",
    "19.14",
    "When a member's data stream ends, the others in the unfinished round receive RoundAborted",
    workers=2,
)
async def a_lost_data_stream_aborts(line: LineUnderTest) -> None:
    round_ = await line.deal()
    parts = rough_parts(round_)
    for player in round_.players[:-1]:
        await send_part(round_, player, parts[player])
    last = round_.players[-1]
    await (await last.stream()).send(chunk_message(round_, last, parts[last], round_.chunks[0]))
    await (await last.stream()).take("averaged_block")
    await last.close_bulk()
    for player in round_.players[:-1]:
        await (await player.stream()).take("round_aborted", lambda each: _is_of(each, round_.key))


@check(
    "reduce.stale", "19.14", "A message of an older key is answered with StaleRound, the greatest"
)
async def old_keys_are_stale(line: LineUnderTest) -> None:
    first = await line.deal()
    await line.finish(first)
    second = await line.deal()
    parts = rough_parts(second)
    # The second round has averages, so the reducer knows its key.
    await exchange(second, parts)
    player = second.players[0]
    late = await player.open_bulk()
    await late.take("round_opened")
    message = chunk_message(second, player, parts[player], second.chunks[0],
                            key=conversion.key_to_proto(first.key))  # fmt: skip
    await late.send(message)
    stale = await late.take("stale_round")
    same("the stale key", first.key, key_of(stale.key))
    same("the greatest key", second.key, key_of(stale.greatest))


@check(
    "reduce.term",
    "19.14",
    "A coordinator that learns of a key above its own takes a term above that",
)
async def a_greater_term_is_risen_above(line: LineUnderTest) -> None:
    round_ = await line.deal()
    greatest = Key((round_.key.term >> 32) + 7 << 32 | 5, 3)
    player = round_.players[0]
    await line.fault(
        round_, player, pb.FAULT_KIND_STALE_ROUND, greatest=conversion.key_to_proto(greatest)
    )
    following = await line.again(round_.players)
    require(
        following.key.term > greatest.term,
        f"a round of a term above {greatest.term}",
        following.key,
    )
    await line.finish(following)


CHECKS: tuple[ServerCheck, ...] = (
    a_nan_is_told_to_all,
    an_infinity_is_told_to_all,
    an_overflowing_mean_is_told_to_all,
    an_encoding_that_is_too_small,
    a_chunk_comes_once,
    a_rank_has_one_weight,
    weights_are_above_zero,
    ranks_agree_on_their_number,
    a_rank_is_one_workers,
    ranks_agree_on_the_encoding,
    a_lost_data_stream_aborts,
    old_keys_are_stale,
    a_greater_term_is_risen_above,
)
