"""Contributions whose mean is known to the bit: sent, and received back, chunk by chunk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

from andon.protocol.encoding import Encoding
from andon.protocol.layout import Block, BlockKind, Chunk, Component, Layout
from andon.protocol.limits import CHUNK_ELEMENTS
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.runner import reference
from andon_conformance.runner.checks import NotApplicable, Violation
from andon_conformance.runner.player import Player

__all__ = ["GRAIN_PLAN", "LAYOUT", "PLAN", "AssignedRound", "Part", "Parts", "rough_numbers"]

LAYOUT = Layout(
    (
        Block(BlockKind.LM_HEAD, "head", (Component("weight", (7, 3)), Component("bias", (3,)))),
        Block(BlockKind.TRANSFORMER_BLOCK, "body", (Component("table", (CHUNK_ELEMENTS + 5,)),)),
    )
)
"""The second block has two chunks, the last one short, unless the server asks for others."""

PLAN = RunPlan(global_batch=7, dataset_size=17, seed=20260101)
"""Each epoch ends with a short batch, which leaves one of four ranks without samples."""

GRAIN_PLAN = replace(PLAN, grain=2, tree=1)
"""Four grains in a batch, of which the last one is short, and two at each epoch's end."""


PERIOD = 61
"""A large block repeats this many numbers, because the reference implementation is slow."""


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's contribution; each block's numbers repeat until the block is full."""

    weight: float
    blocks: tuple[tuple[float, ...], ...]

    def payload(self, chunk: Chunk, encoding: Encoding = Encoding.FLOAT32) -> bytes:
        """The bytes of one chunk."""
        return _payload(self.blocks[chunk.block], chunk, encoding)


@lru_cache(maxsize=16)
def _payload(numbers: tuple[float, ...], chunk: Chunk, encoding: Encoding) -> bytes:
    def encoded(start: int, count: int) -> bytes:
        return reference.encode(_repeated(numbers, chunk.offset + start, count), encoding)

    return reference.repeated(encoded, encoding, len(numbers), chunk.count)


def _repeated(numbers: Sequence[float], start: int, count: int) -> list[float]:
    """`count` numbers from `start` on, of numbers that repeat forever."""
    size = len(numbers)
    return [numbers[at % size] for at in range(start, start + count)]


Parts = Mapping[Player, Part | None]
"""In rank order; None abstains."""


@cache
def rough_numbers(seed: int, roughness: int) -> tuple[tuple[float, ...], ...]:
    """For each block, finite float32 of many magnitudes, whose sum depends on the order."""
    draw = random.Random(seed)
    sizes = [min(block.elements, PERIOD) for block in LAYOUT.blocks]
    return tuple(
        tuple(reference.f32(draw.gauss(0, 1) * 2.0 ** draw.randint(-roughness, roughness))
              for _ in range(size))
        for size in sizes
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AssignedRound:
    """An assigned round, with each player's assignment, and what the players exchange in it."""

    key: Key
    works: dict[Player, pb.ShardAssignment]
    """In rank order."""
    totals: dict[Player, float] = field(default_factory=dict)
    """The total weight in each player's averages, once it has them."""

    @property
    def players(self) -> list[Player]:
        """Its members, in rank order."""
        return list(self.works)

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks of the model, as the line asks for them."""
        elements = self.players[0].accepted.policy.chunk_elements
        return list(LAYOUT.chunks(elements or CHUNK_ELEMENTS))

    def samples(self, player: Player) -> int:
        """How many positions a member has."""
        return sum(part.stop - part.start for part in self.works[player].positions)

    def rough_parts(
        self, weights: Sequence[float] = (3.0, 0.7, 11.0, 1e-3, 29.0)
    ) -> dict[Player, Part]:
        """Contributions with unequal weights, whose mean differs in any other order of ranks."""
        for seed in range(0, 10_000, 10):
            parts = {
                player: Part(weights[rank], rough_numbers(seed + rank, 3))
                for rank, player in enumerate(self.players)
            }
            first = [(part.weight, part.blocks[0]) for part in parts.values()]
            orders = [[first[rank] for rank in order] for order in _other_orders(len(first))]
            right = reference.mean(first)[1]
            if all(reference.mean(order)[1] != right for order in orders):
                return parts
        raise AssertionError("some numbers depend on the order of their sum")

    def _plain_parts(self) -> Parts:
        """A rank's weight is its sample count; without samples it abstains."""
        return {
            player: Part(samples, rough_numbers(rank, 2))
            if (samples := self.samples(player))
            else None
            for rank, player in enumerate(self.players)
        }

    def chunk_message(
        self, player: Player, part: Part, chunk: Chunk, **fields: Any
    ) -> reducer_pb2.ReduceRequest:
        """A chunk as the protocol demands; `fields` replace some of its fields."""
        encoding = Encoding(fields.get("encoding", Encoding.FLOAT32.value))
        values = {
            "key": conversion.key_to_proto(self.key),
            "operation": reducer_pb2.OPERATION_WEIGHTED_MEAN,
            "rank": self.works[player].rank,
            "world_size": len(self.works),
            "block": chunk.block,
            "element_offset": chunk.offset,
            "element_count": chunk.count,
            "weight": part.weight,
            "encoding": encoding.value,
            **fields,
        }
        if "payload" not in values:
            values["payload"] = part.payload(chunk, encoding)
        return reducer_pb2.ReduceRequest(block_gradient=reducer_pb2.BlockGradient(**values))

    def abstention(
        self, player: Player, *, sequence: int = 0, key: Key | None = None
    ) -> reducer_pb2.ReduceRequest:
        """A rank's Abstain; `key` replaces the round's."""
        return reducer_pb2.ReduceRequest(
            abstain=reducer_pb2.Abstain(
                key=conversion.key_to_proto(key or self.key),
                sequence=sequence,
                rank=self.works[player].rank,
                world_size=len(self.works),
            )
        )

    async def send_chunk(self, player: Player, part: Part, chunk: Chunk, **fields: Any) -> None:
        """Sends one chunk on a player's data stream; `fields` as for `chunk_message`."""
        stream = await player.stream()
        await stream.send(self.chunk_message(player, part, chunk, **fields))

    async def send_part(self, player: Player, part: Part | None, **fields: Any) -> None:
        """Sends one rank's whole contribution, or abstains."""
        if part is None:
            stream = await player.stream()
            await stream.send(self.abstention(player, sequence=fields.get("sequence", 0)))
            return
        for chunk in self.chunks:
            await self.send_chunk(player, part, chunk, **fields)

    async def gather_averages(
        self, player: Player, *, sequence: int = 0, empty: bool = False
    ) -> list[Any]:
        """Receives every average that a player is owed, in the layout's order."""
        stream = await player.stream()
        averages = []
        for chunk in [Chunk(0, 0, 0)] if empty else self.chunks:
            place = (self.key.term, self.key.round, sequence, chunk.block, chunk.offset)
            what = f"the average of block {chunk.block} from element {chunk.offset} on"
            average = await stream.take("averaged_block", partial(_lies_at, place), what=what)
            averages.append(average)
        return averages

    async def exchange(self, parts: Parts | None = None, **fields: Any) -> dict[Player, list[Any]]:
        """Every rank contributes, and receives all averages, right or wrong."""
        parts = self._plain_parts() if parts is None else parts
        # The last rank first: a reducer that adds in the order of arrival gets another sum.
        for player in reversed(self.players):
            await self.send_part(player, parts[player], **fields)
        empty = all(part is None for part in parts.values())
        sequence = fields.get("sequence", 0)
        got = {
            player: await self.gather_averages(player, sequence=sequence, empty=empty)
            for player in self.players
        }
        # The first exchange is the step's own; StepReady reports its total weight.
        if sequence == 0:
            self.totals.update({player: got[player][0].total_weight for player in got})
        return got

    def expect_averages(
        self,
        parts: Parts,
        got: Mapping[Player, list[Any]],
        encoding: Encoding = Encoding.FLOAT32,
        answer: Encoding | None = None,
        mean: reference.MeanOf = reference.mean,
    ) -> None:
        """Demands that the averages equal the reference's; `Violation` names what differs first."""
        answer = answer or encoding
        # In rank order, which is the order of the sum.
        present = [part for part in parts.values() if part is not None]
        forms = encoding, answer
        self.expect_payloads(lambda chunk: _mean_of(present, chunk, forms, mean), got, answer)

    def expect_payloads(
        self,
        of: Callable[[Chunk], bytes],
        got: Mapping[Player, list[Any]],
        answer: Encoding = Encoding.FLOAT32,
    ) -> None:
        """Demands of each chunk's average a payload. As `expect_averages`."""
        for place, chunk in enumerate(self.chunks):
            expected = of(chunk)
            for player, averages in got.items():
                came = averages[place].payload
                if came != expected:
                    raise _difference(player, chunk, expected, came, answer)

    @contextmanager
    def offered(self, encoding: Encoding) -> Iterator[None]:
        """Within this context a reducer may refuse an encoding as not offered.

        Raises:
            NotApplicable: it refused the encoding as not offered.
        """
        try:
            yield
        except Violation:
            ends = [player.bulk.status for player in self.players if player.bulk is not None]
            if any(end is not None and end.reason == Reason.NOT_OFFERED for end in ends):
                text = f"the reducer does not have {encoding.label}"
                raise NotApplicable(text) from None
            raise


def _other_orders(size: int) -> list[tuple[int, ...]]:
    """Orders that may give another sum; with two numbers there are none."""
    if size < 3:
        return []
    ranks = tuple(range(size))
    return [ranks[::-1], (*ranks[1:], ranks[0])]


def _lies_at(place: tuple[int, ...], average: Any) -> bool:
    key = average.key
    where = (key.term, key.round, average.sequence, average.block, average.element_offset)
    return where == place


def _mean_of(
    present: Sequence[Part],
    chunk: Chunk,
    forms: tuple[Encoding, Encoding],
    mean: reference.MeanOf,
) -> bytes:
    """The encoded mean of a chunk of repeating numbers; `forms`: sent and answered in these."""
    encoding, answer = forms

    def made(start: int, count: int) -> bytes:
        decoded = []
        for part in present:
            numbers = _repeated(part.blocks[chunk.block], chunk.offset + start, count)
            sent = reference.encode(numbers, encoding)
            decoded.append((part.weight, reference.decode(sent, encoding, count)))
        return reference.encode(mean(decoded)[1], answer)

    period, strip = len(present[0].blocks[chunk.block]), reference.strip_elements(encoding)
    return reference.repeated(made, answer, period, chunk.count, strip)


def _difference(
    player: Player, chunk: Chunk, expected: bytes, came: bytes, answer: Encoding
) -> Violation:
    if len(came) != len(expected):
        return Violation(
            f"{len(expected)} bytes of block {chunk.block} from element {chunk.offset} on",
            f"{len(came)} bytes at {player.name}",
        )
    width = 1 if answer.loses_much else answer.wire_dtype.itemsize
    differing = [
        start for start in range(0, len(expected), width)
        if expected[start : start + width] != came[start : start + width]
    ]  # fmt: skip
    first = differing[0]
    where = f"element {chunk.offset + first // width} of block {chunk.block}"
    if answer.loses_much:
        where = f"byte {first} of block {chunk.block} from element {chunk.offset} on"
    return Violation(
        f"{reference.bits(expected[first : first + width])} as {where}",
        f"{reference.bits(came[first : first + width])} at {player.name}, and "
        f"{len(differing) - 1} other elements of the chunk differ",
    )
