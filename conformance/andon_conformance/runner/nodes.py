"""Nodes: contributions that a reducer adds along the tree of grains, and those that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from andon.protocol.capabilities import SAME_BITS
from andon.v1 import layout_pb2
from andon_conformance.runner.checks import Checks, NotApplicable, same
from andon_conformance.runner.faults import expect_faults
from andon_conformance.runner.gradients import AssignedRound, Part, rough_numbers
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player
from andon_conformance.runner.tree import (
    Span,
    leaf,
    maximal,
    mean_part,
    node_message,
    node_part,
)

__all__ = ["CHECKS"]

CHECKS = Checks()

_GRAIN, _COUNT = 4, 5
_OWNERS = (0, 1, 1, 0, 2)
"""Which rank has which grain, if there are so many ranks."""
_WEIGHTS = (4.0, 1711.0, 3.0, 4.0, 0.7)


async def _begun(line: LineUnderTest) -> AssignedRound:
    """A round in which every rank has a data stream that takes nodes."""
    round_ = await line.deal()
    for player in round_.players:
        await player.stream()
        if SAME_BITS not in player.reducer_can:
            raise NotApplicable(f"the reducer does not name {SAME_BITS}")
    return round_


def _leaves(seed: int) -> list[Part]:
    """Grains whose sum is another one in any other order than the tree's."""
    return [
        leaf(Part(weight, rough_numbers(seed + at, 3)), _GRAIN, _COUNT)
        for at, weight in enumerate(_WEIGHTS)
    ]


def _shares(round_: AssignedRound) -> dict[Player, list[Span]]:
    """The maximal nodes of each rank."""
    size = len(round_.players)
    owned = [
        {grain for grain, owner in enumerate(_OWNERS) if owner % size == rank}
        for rank in range(size)
    ]
    return {player: maximal(owned[rank], (0, _COUNT)) for rank, player in enumerate(round_.players)}


async def _send(
    round_: AssignedRound,
    player: Player,
    parts: Mapping[Span, Part],
    **fields: Any,
) -> None:
    """A rank's nodes, chunk by chunk; without one it abstains."""
    if not parts:
        await round_.send_part(player, None, **fields)
    for chunk in round_.chunks:
        for span, part in parts.items():
            node = node_message(span, _COUNT, _GRAIN)
            await round_.send_chunk(player, part, chunk, node=node, **fields)


@CHECKS.add("tree.sum", "32")
async def sums_are_the_trees(line: LineUnderTest) -> None:
    """Nodes are added along the tree, bit for bit, whatever the order in which they arrive."""
    round_ = await _begun(line)
    shares = _shares(round_)
    for sequence, players in enumerate((round_.players, round_.players[::-1])):
        leaves = _leaves(100 * sequence)
        for player in players:
            parts = {span: node_part(leaves, span) for span in shares[player]}
            await _send(round_, player, parts, sequence=sequence)
        got = {
            player: await round_.gather_averages(player, sequence=sequence) for player in players
        }
        mean = mean_part(leaves, _GRAIN)
        round_.expect_payloads(mean.payload, got)
        for average in (each for averages in got.values() for each in averages):
            same("total_weight", mean.weight, average.total_weight)
            same("contributors", sum(map(len, shares.values())), average.contributors)


@CHECKS.add("tree.nothing", "32")
async def nothing_is_a_zero(line: LineUnderTest) -> None:
    """If all grains have the weight 0, the mean is 0.0 everywhere, and the total weight is 0."""
    round_ = await _begun(line)
    absent = tuple(tuple(-0.0 for _ in block) for block in rough_numbers(0, 3))
    for player, spans in _shares(round_).items():
        await _send(round_, player, {span: Part(0.0, absent) for span in spans})
    got = {player: await round_.gather_averages(player) for player in round_.players}
    round_.expect_payloads(lambda chunk: bytes(4 * chunk.count), got)
    same("total_weight", 0.0, got[round_.players[0]][0].total_weight)


async def _contradict(line: LineUnderTest, *nodes: Span | None, **fields: Any) -> None:
    """The last rank sends nodes of the first chunk, and of the last of them `fields` are wrong."""
    round_ = await _begun(line)
    *others, player = round_.players
    for each in others:
        # So the reducer knows them, and tells them of the fault.
        await round_.send_part(each, None)
    part = Part(_WEIGHTS[0], rough_numbers(7, 3))
    for at, span in enumerate(nodes):
        node = None if span is None else node_message(span, _COUNT, _GRAIN)
        wrong = fields if at == len(nodes) - 1 else {}
        chunk = round_.chunks[wrong.get("block", 0)]
        await round_.send_chunk(player, part, chunk, **{"node": node, **wrong})
    for fault in (await expect_faults(round_, "INCONSISTENT")).values():
        same("its rank", len(round_.players) - 1, fault.rank if fault.HasField("rank") else None)


@CHECKS.add("tree.overlap", "33")
async def no_grain_counts_twice(line: LineUnderTest) -> None:
    """A node that overlaps another one of the exchange: INCONSISTENT, and its rank is at fault."""
    await _contradict(line, (0, 2), (1, 2))


@CHECKS.add("tree.strange", "33")
async def nodes_are_of_the_tree(line: LineUnderTest) -> None:
    """A node that the tree does not have: INCONSISTENT, likewise."""
    await _contradict(line, (1, 3))


@CHECKS.add("tree.batch", "33")
async def there_is_one_batch(line: LineUnderTest) -> None:
    """A node of a batch of another number of grains: INCONSISTENT, likewise."""
    await _contradict(line, (0, 1), (1, 2), node=node_message((1, 2), _COUNT + 1, _GRAIN))


@CHECKS.add("tree.weight", "33")
async def a_node_has_one_weight(line: LineUnderTest) -> None:
    """A node that has another weight in a later chunk: INCONSISTENT, likewise."""
    await _contradict(line, (0, 1), (0, 1), block=1, weight=_WEIGHTS[0] + 1)


@CHECKS.add("tree.mixed", "33")
async def nodes_are_not_mixed(line: LineUnderTest) -> None:
    """A contribution without a node beside nodes: INCONSISTENT, likewise."""
    await _contradict(line, (0, 1), None, block=1)


@CHECKS.add("tree.float32", "33")
async def nodes_are_float32(line: LineUnderTest) -> None:
    """A node in another encoding than FLOAT32 ends the stream with INVALID_ARGUMENT."""
    round_ = await _begun(line)
    player = round_.players[0]
    part = Part(_WEIGHTS[0], rough_numbers(7, 3))
    node = node_message((0, 1), _COUNT, _GRAIN)
    encoding = layout_pb2.ENCODING_BFLOAT16
    await round_.send_chunk(player, part, round_.chunks[0], node=node, encoding=encoding)
    await (await player.stream()).ends_with("INVALID_ARGUMENT")
