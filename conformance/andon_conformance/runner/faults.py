"""Faults: contributions that must not be averaged, and too old keys (sections 4 and 23)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from andon.protocol.encoding import Encoding
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import layout_pb2, reducer_pb2
from andon.wire import conversion
from andon_conformance.runner import reference
from andon_conformance.runner.checks import Checks, Violation, require, same
from andon_conformance.runner.gradients import AssignedRound, Part
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of

__all__ = ["BIAS", "CHECKS", "expect_faults", "poisoned"]

CHECKS = Checks()

BIAS = 22
"""Element of block 0: it is `bias[1]`."""


def poisoned(part: Part, value: float, *, block: int = 0, element: int = BIAS) -> Part:
    """A copy of a contribution with another number at one element."""
    numbers = list(part.blocks[block])
    numbers[element % len(numbers)] = value
    blocks = list(part.blocks)
    blocks[block] = tuple(numbers)
    return replace(part, blocks=tuple(blocks))


async def expect_faults(round_: AssignedRound, kind: str) -> dict[Player, Any]:
    """Waits for the BlockFault that each rank receives, which must have this kind."""
    received = {}
    for player in round_.players:
        stream = await player.stream()
        message = await stream.first(_judges_the_first_block, what="a BlockFault")
        if message.HasField("averaged_block"):
            raise Violation("a BlockFault", f"an average of the same chunk at {player.name}")
        require(_is_of(message.block_fault, round_.key), "a BlockFault of the round's key", message)
        received[player] = message.block_fault
    # Only after all have come: a rank without a fault is the greater mistake.
    for player, fault in received.items():
        came = reducer_pb2.BlockFaultKind.Name(fault.kind)
        same(f"the fault at {player.name}:", f"BLOCK_FAULT_KIND_{kind}", came)
    return received


def _judges_the_first_block(message: reducer_pb2.ReduceResponse) -> bool:
    """Whether an answer is about block 0, where the contradictions are."""
    case = message.WhichOneof("message")
    average = case == "averaged_block" and message.averaged_block.block == 0
    return average or case == "block_fault"


def _is_of(message: Any, key: Key) -> bool:
    return (message.key.term, message.key.round) == (key.term, key.round)


async def _non_finite(line: LineUnderTest, value: float, text: str) -> None:
    round_ = await line.deal()
    parts = round_.rough_parts()
    bad = round_.players[-1]
    parts[bad] = poisoned(parts[bad], value)
    # The bad contribution comes first, and the others complete its chunk.
    for player in reversed(round_.players):
        await round_.send_part(player, parts[player])
    for fault in (await expect_faults(round_, "NON_FINITE")).values():
        require(fault.HasField("rank"), "the rank at fault", "none")
        same("its rank", len(round_.players) - 1, fault.rank)
        same("its block", 0, fault.block)
        same("its element", BIAS, fault.element)
        same("its value", text, fault.value)


@CHECKS.add("fault.nan", "23")
async def a_nan_is_told_to_all(line: LineUnderTest) -> None:
    """A NaN is reported to every rank: NON_FINITE, with rank, block, element, value."""
    await _non_finite(line, math.nan, "nan")


@CHECKS.add("fault.infinity", "23")
async def an_infinity_is_told_to_all(line: LineUnderTest) -> None:
    """An infinity, likewise."""
    await _non_finite(line, -math.inf, "-inf")


@CHECKS.add("fault.average", "23", workers=3)
async def an_overflowing_mean_is_told_to_all(line: LineUnderTest) -> None:
    """A mean that is not finite though all contributions are: NON_FINITE_AVERAGE."""
    round_ = await line.deal()
    parts = _overflowing(round_)
    for player in round_.players:
        await round_.send_part(player, parts[player])
    for fault in (await expect_faults(round_, "NON_FINITE_AVERAGE")).values():
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
                for rank, (player, part) in enumerate(round_.rough_parts().items())
            }
    raise AssertionError("some quotients of three and more weights are rounded up that far")


@CHECKS.add("fault.overflow", "23")
async def an_encoding_that_is_too_small(line: LineUnderTest) -> None:
    """A finite mean that the answer's encoding can't hold: ENCODING_OVERFLOW."""
    round_ = await line.deal()
    # Finite in float32, and beyond the 65504 of float16.
    fields = {"answer_encoding": layout_pb2.ENCODING_FLOAT16}
    for player, part in round_.rough_parts().items():
        await round_.send_part(player, poisoned(part, 70_000.0), **fields)
    with round_.offered(Encoding.FLOAT16):
        faults = await expect_faults(round_, "ENCODING_OVERFLOW")
    for fault in faults.values():
        same("its element", BIAS, fault.element)


async def _begun(line: LineUnderTest) -> tuple[AssignedRound, dict[Player, Part]]:
    """A round in which every rank has a data stream, and its contribution, which is not sent."""
    round_ = await line.deal()
    for player in round_.players:
        await player.stream()
    return round_, round_.rough_parts()


async def _contradict(
    line: LineUnderTest, *, silent: int = 0, at: int = 0, chunk: int = 1, **fields: Any
) -> None:
    """The ranks send their first chunks, and rank `at` then one with wrong `fields`.

    The first `silent` ranks send nothing before. Else the first chunk is averaged before, so that
    the fault can only be of what follows.
    """
    round_, parts = await _begun(line)
    await _first_chunks(round_, parts, round_.players[silent:])
    player = round_.players[at]
    await round_.send_chunk(player, parts[player], round_.chunks[chunk], **fields)
    await expect_faults(round_, "INCONSISTENT")


async def _first_chunks(
    round_: AssignedRound, parts: Mapping[Player, Part], players: list[Player]
) -> None:
    for player in players:
        await round_.send_chunk(player, parts[player], round_.chunks[0])
    if players == round_.players:
        for player in players:
            await (await player.stream()).take("averaged_block")


@CHECKS.add("fault.twice", "23")
async def a_chunk_comes_once(line: LineUnderTest) -> None:
    """A chunk that comes twice, on two streams of a rank: INCONSISTENT."""
    round_, parts = await _begun(line)
    await _first_chunks(round_, parts, round_.players)
    player = round_.players[0]
    other = await player.open_bulk()
    await other.take("round_opened")
    await other.send(round_.chunk_message(player, parts[player], round_.chunks[0]))
    await expect_faults(round_, "INCONSISTENT")


@CHECKS.add("fault.weight", "2.15")
async def a_rank_has_one_weight(line: LineUnderTest) -> None:
    """A rank that changes its weight within an exchange: INCONSISTENT."""
    await _contradict(line, weight=5.5)


@CHECKS.add("fault.bad_weight", "23")
async def weights_are_above_zero(line: LineUnderTest) -> None:
    """A weight that is negative: INCONSISTENT."""
    await _contradict(line, silent=1, weight=-1.0)


@CHECKS.add("fault.world_size", "23")
async def ranks_agree_on_their_number(line: LineUnderTest) -> None:
    """Ranks that disagree on the world size: INCONSISTENT."""
    await _contradict(line, world_size=len(line.players) + 1)


@CHECKS.add("fault.rank", "23", workers=2)
async def a_rank_is_one_workers(line: LineUnderTest) -> None:
    """A worker that contributes in another one's rank: INCONSISTENT."""
    await _contradict(line, at=1, rank=0)


@CHECKS.add("fault.encoding", "23", workers=2)
async def ranks_agree_on_the_encoding(line: LineUnderTest) -> None:
    """Ranks that disagree on the encoding: INCONSISTENT."""
    await _contradict(line, silent=1, chunk=0, encoding=Encoding.BFLOAT16.value)


@CHECKS.add("reduce.aborted", "19.14", workers=2)
async def a_lost_data_stream_aborts(line: LineUnderTest) -> None:
    """When a member's data stream ends, the others in the unfinished round receive RoundAborted."""
    round_ = await line.deal()
    parts = round_.rough_parts()
    *others, last = round_.players
    for player in others:
        await round_.send_part(player, parts[player])
    await round_.send_chunk(last, parts[last], round_.chunks[0])
    # Its average shows that the reducer counts the last rank in.
    await (await last.stream()).take("averaged_block")
    await last.close_bulk()
    for player in others:
        await (await player.stream()).take("round_aborted", lambda each: _is_of(each, round_.key))


@CHECKS.add("reduce.bystander", "4")
async def an_idle_stream_is_part_of_no_round(line: LineUnderTest) -> None:
    """The end of a data stream that brought nothing of the unfinished round does not abort it."""
    round_ = await line.deal()
    parts = round_.rough_parts()
    idle = await round_.players[0].open_bulk()
    await idle.take("round_opened")
    first, *rest = round_.chunks
    for player in round_.players:
        await round_.send_chunk(player, parts[player], first)
    await idle.cancel()
    await line.fence(round_.players)
    for player in round_.players:
        for chunk in rest:
            await round_.send_chunk(player, parts[player], chunk)
    got = {player: await round_.gather_averages(player) for player in round_.players}
    round_.expect_averages(parts, got)


@CHECKS.add("reduce.stale", "19.14")
async def old_keys_are_stale(line: LineUnderTest) -> None:
    """A message of an older key is answered with StaleRound, the greatest."""
    first = await line.deal()
    await line.finish(first)
    second = await line.deal()
    parts = second.rough_parts()
    # The second round has averages, so the reducer knows its key.
    await second.exchange(parts)
    player = second.players[0]
    late = await player.open_bulk()
    await late.take("round_opened")
    key = conversion.key_to_proto(first.key)
    await late.send(second.chunk_message(player, parts[player], second.chunks[0], key=key))
    stale = await late.take("stale_round")
    same("the stale key", first.key, key_of(stale.key))
    same("the greatest key", second.key, key_of(stale.greatest))


@CHECKS.add("reduce.term", "19.14")
async def a_greater_term_is_risen_above(line: LineUnderTest) -> None:
    """A coordinator that learns of a key above its own takes a term above that."""
    round_ = await line.deal()
    greatest = Key((round_.key.term >> 32) + 7 << 32 | 5, 3)
    told = conversion.key_to_proto(greatest)
    await line.fault(round_, round_.players[0], pb.FAULT_KIND_STALE_ROUND, greatest=told)
    following = await line.again(round_.players)
    above = f"a round of a term above {greatest.term}"
    require(following.key.term > greatest.term, above, following.key)
    await line.finish(following)
