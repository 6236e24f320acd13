"""The core as a whole: any order of arrival, any schedule, bounded memory, no deadlock."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from andon.protocol.grains import Node, cover, fold
from andon.protocol.messages import Abstain, AveragedBlock, BlockGradient, TreeNode
from andon.protocol.reasons import Reason
from andon.protocol.records import Key, PositionRange
from andon.protocol.shards import Ranges, merged
from andon_reducer.core import effects as do
from andon_reducer.core import events as on
from andon_reducer.core.exchange import OVERHEAD_BYTES
from andon_reducer.core.jobs import Job, reduce_chunk
from andon_reducer.core.round import MAX_EXCHANGES
from andon_reducer.core.rounds import Rounds

KEY = Key(1, 1)
COUNT = 4
MESSAGE_BYTES = COUNT * 4 + OVERHEAD_BYTES

Message = BlockGradient | Abstain


def numbers_of(rank: int, chunk: int) -> memoryview:
    numbers = np.random.default_rng([rank, chunk]).standard_normal(COUNT)
    return memoryview(numbers.astype(np.float32).tobytes())


def chunk_of(rank: int, world_size: int, chunk: int, sequence: int = 0) -> BlockGradient:
    return BlockGradient(
        key=KEY,
        rank=rank,
        world_size=world_size,
        block=chunk // 3,
        offset=chunk % 3 * COUNT,
        count=COUNT,
        weight=1.0 + rank,
        sequence=sequence,
        payload=numbers_of(rank, chunk),
    )


@dataclass
class World:
    """Simulated workers, threads and sockets: takes one small step at a time, in random order.

    `lanes` are the streams by number, with what each still has to send. A worker reads at any time,
    also while a stream of it is paused.
    """

    lanes: dict[int, deque[Message]]
    rank_of: dict[int, int]
    rounds: Rounds
    bound_bytes: int
    random: random.Random
    paused: set[int] = field(default_factory=set)
    jobs: list[Job] = field(default_factory=list)
    unread: list[tuple[int, int]] = field(default_factory=list)
    answers: dict[int, AveragedBlock] = field(default_factory=dict)
    got: dict[int, dict[tuple[int, int, int], bytes]] = field(default_factory=dict)

    def report(self, event: on.Event) -> None:
        for effect in self.rounds.receive(event, 0.0):
            match effect:
                case do.Reduce(job):
                    self.jobs.append(job)
                case do.SendAverage(job_id, streams):
                    self.unread += [(stream, job_id) for stream in streams]
                case do.PauseStream(number):
                    self.paused.add(number)
                case do.ResumeStream(number):
                    self.paused.remove(number)
                case _:
                    raise AssertionError(effect)
        assert self.rounds.inflight_bytes <= self.bound_bytes

    def run(self) -> None:
        """Goes on until nothing can."""
        while True:
            ready = [n for n, lane in self.lanes.items() if lane and n not in self.paused]
            steps = [
                *(partial(self.send, number) for number in ready),
                *(partial(self.reduce, job) for job in self.jobs),
                *(partial(self.read, *unread) for unread in self.unread),
            ]
            if not steps:
                return
            self.random.choice(steps)()

    def send(self, number: int) -> None:
        message = self.lanes[number].popleft()
        if isinstance(message, Abstain):
            self.report(on.Abstained(number, message))
        else:
            self.report(on.GradientArrived(number, message))

    def reduce(self, job: Job) -> None:
        self.jobs.remove(job)
        answer = reduce_chunk(job)
        assert isinstance(answer, AveragedBlock)
        self.answers[job.id] = answer
        self.report(on.ChunkReduced(job.id))

    def read(self, stream: int, job: int) -> None:
        self.unread.remove((stream, job))
        answer = self.answers[job]
        place = (answer.sequence, answer.block, answer.offset)
        mine = self.got.setdefault(self.rank_of[stream], {})
        assert place not in mine, "an average came twice"
        mine[place] = bytes(answer.payload)
        self.report(on.AverageSent(stream, job))


def world_of(
    lanes_by_rank: Sequence[Sequence[Sequence[Message]]],
    window_messages: float,
    seed: int,
    parts: int = 0,
) -> World:
    """A world whose rank r has one stream for each list of `lanes_by_rank[r]`.

    A chunk has as many `parts`, by default one of each rank.
    """
    streams = sum(map(len, lanes_by_rank))
    ranks = parts or len(lanes_by_rank)
    window_bytes = int(window_messages * MESSAGE_BYTES)
    world = World(
        {},
        {},
        Rounds(window_bytes=window_bytes, max_payload_bytes=1024),
        2 * window_bytes + (2 * streams + ranks + 1) * MESSAGE_BYTES,
        random.Random(seed),
    )
    for rank, lanes in enumerate(lanes_by_rank):
        for lane in lanes:
            number = len(world.lanes) + 1
            world.lanes[number] = deque(lane)
            world.rank_of[number] = rank
            world.report(on.ReduceStreamOpened(number, "7f3a", worker=rank))
    return world


def split(messages: Sequence[Message], lanes: int, draw: random.Random) -> list[list[Message]]:
    """Splits messages among streams at random; each stream keeps their order."""
    streams: list[list[Message]] = [[] for _ in range(lanes)]
    for message in messages:
        draw.choice(streams).append(message)
    return streams


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_deadlocks_or_holds_more_than_its_bound(seed: int) -> None:
    draw = random.Random(seed)
    ranks, chunks = draw.randint(1, 4), draw.randint(1, 12)
    abstainers = draw.sample(range(ranks), draw.randint(0, ranks - 1))
    lanes_by_rank = []
    for rank in range(ranks):
        messages: list[Message] = [chunk_of(rank, ranks, chunk) for chunk in range(chunks)]
        if rank in abstainers:
            messages = [Abstain(key=KEY, rank=rank, world_size=ranks)]
        lanes_by_rank.append(split(messages, draw.randint(1, 3), draw))
    world = world_of(lanes_by_rank, draw.choice([0.01, 1, 2.5, 8]), seed)

    world.run()

    assert not any(world.lanes.values()), f"streams are stuck (seed {seed})"
    assert [len(world.got[rank]) for rank in range(ranks)] == [chunks] * ranks
    assert len({tuple(sorted(got.items())) for got in world.got.values()}) == 1
    assert world.rounds.inflight_bytes == 0


def leaf_of(grain: int, chunk: int) -> np.ndarray:
    return np.random.default_rng([7, grain, chunk]).standard_normal(COUNT).astype(np.float32)


def nodes_of(grains: Ranges, count: int, chunk: int, rank: int, ranks: int) -> list[BlockGradient]:
    """A rank's contributions to a chunk of a batch of so many grains; grain i has the weight i."""
    found = []
    for node in cover(grains, count):
        own = range(node.first, node.stop)
        leaves = {Node(grain, grain + 1): leaf_of(grain, chunk) for grain in own}
        message = replace(
            chunk_of(rank, ranks, chunk),
            weight=float(sum(own)),
            payload=memoryview(fold(leaves, node, np.add).tobytes()),
            node=TreeNode(node.first, len(node), count, 3),
        )
        found.append(message)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_nodes_give_the_tree_of_all_grains_for_any_shares_order_and_streams(seed: int) -> None:
    draw = random.Random(seed)
    ranks, chunks, count = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 20)
    owners = [draw.randrange(ranks) for _ in range(count)]
    lanes_by_rank, parts = [], 0
    for rank in range(ranks):
        own = [PositionRange(grain, grain + 1) for grain in range(count) if owners[grain] == rank]
        shares = [nodes_of(merged(own), count, chunk, rank, ranks) for chunk in range(chunks)]
        parts += len(shares[0])
        lanes: list[list[Message]] = [[] for _ in range(draw.randint(1, 3))]
        for nodes in shares:  # Those of one chunk travel on one stream.
            draw.choice(lanes).extend(nodes)
        if not own:
            lanes = [[Abstain(key=KEY, rank=rank, world_size=ranks)]]
        lanes_by_rank.append(lanes)
    world = world_of(lanes_by_rank, draw.choice([0.01, 1, 2.5, 8]), seed, parts)

    world.run()

    assert not any(world.lanes.values()), f"streams are stuck (seed {seed})"
    for chunk in range(chunks):
        leaves = {Node(grain, grain + 1): leaf_of(grain, chunk) for grain in range(count)}
        root, total = fold(leaves, Node(0, count), np.add), sum(range(count))
        if count == 1:  # Its only grain has the weight 0.
            root = np.zeros(COUNT, np.float32)
        mean = root / np.float32(total / 3) if total else root
        for got in world.got.values():
            assert got[0, chunk // 3, chunk % 3 * COUNT] == mean.tobytes()
    assert len(world.got) == ranks
    assert world.rounds.inflight_bytes == 0


def test_c_ddp_001_any_order_of_arrival_gives_the_same_bytes() -> None:
    seen = set()

    for order in itertools.permutations(range(4)):
        rounds = Rounds(window_bytes=1 << 20, max_payload_bytes=1024)
        for rank in range(4):
            rounds.receive(on.ReduceStreamOpened(rank, "7f3a", rank), 0.0)
        effects = [
            effect
            for rank in order
            for effect in rounds.receive(on.GradientArrived(rank, chunk_of(rank, 4, 0)), 0.0)
        ]
        (reduce,) = effects
        assert isinstance(reduce, do.Reduce)
        answer = reduce_chunk(reduce.job)
        assert isinstance(answer, AveragedBlock)
        seen.add((bytes(answer.payload), answer.total_weight))

    assert len(seen) == 1


def test_contributions_are_freed_once_averaged_even_if_nobody_read_the_average() -> None:
    buffers = [bytearray(numbers_of(rank, 0)) for rank in (0, 1)]
    lanes: list[list[list[Message]]] = [
        [[replace(chunk_of(rank, 2, 0), payload=memoryview(buffer))]]
        for rank, buffer in enumerate(buffers)
    ]
    world = world_of(lanes, 2, seed=0)
    del lanes
    world.send(1)
    world.send(2)

    world.reduce(world.jobs[0])

    assert len(world.unread) == 2
    for buffer in buffers:
        buffer.clear()  # BufferError, if anybody could still read it


def test_padding_counts_as_held() -> None:
    rounds = Rounds(window_bytes=1 << 20, max_payload_bytes=1024)
    rounds.receive(on.ReduceStreamOpened(1, "7f3a", 0), 0.0)
    padded = memoryview(bytes(10_000) + bytes(numbers_of(0, 0)))[10_000:]
    gradient = BlockGradient(
        key=KEY, rank=0, world_size=2, block=0, offset=0, count=COUNT, weight=1.0, payload=padded
    )

    rounds.receive(on.GradientArrived(1, gradient), 0.0)

    assert rounds.inflight_bytes > 10_000


def test_c_wire_002_exchanges_of_a_round_are_bounded() -> None:
    rounds = Rounds(window_bytes=1 << 20, max_payload_bytes=1024)
    rounds.receive(on.ReduceStreamOpened(1, "7f3a", 0), 0.0)
    abstains = [
        Abstain(key=KEY, rank=0, world_size=2, sequence=n) for n in range(MAX_EXCHANGES + 1)
    ]

    answers = [rounds.receive(on.Abstained(1, abstain), 0.0) for abstain in abstains]

    assert answers[:-1] == [[]] * MAX_EXCHANGES
    assert [type(effect) for effect in answers[-1]] == [do.SendNotice, do.FreeRound]


def test_a_run_is_forgotten_with_its_last_stream() -> None:
    rounds = Rounds(window_bytes=1 << 20, max_payload_bytes=1024)
    rounds.receive(on.ReduceStreamOpened(1, "7f3a", 0), 0.0)
    rounds.receive(on.GradientArrived(1, chunk_of(0, 2, 0)), 0.0)

    effects = rounds.receive(on.ReduceStreamEnded(1), 0.0)

    assert [type(effect) for effect in effects] == [do.FreeRound]
    assert rounds.inflight_bytes == 0
    rounds.receive(on.ReduceStreamOpened(2, "7f3a", 0), 0.0)
    older = BlockGradient(
        key=Key(1, 0), rank=0, world_size=2, block=0, offset=0, count=COUNT, weight=1.0,
        payload=numbers_of(0, 0),
    )  # fmt: skip
    assert rounds.receive(on.GradientArrived(2, older), 0.0) == []


def test_a_chunk_beyond_what_may_be_held_ends_the_stream_that_brought_it() -> None:
    rounds = Rounds(window_bytes=2**20, max_payload_bytes=2**10, max_held_bytes=2 * MESSAGE_BYTES)
    for stream in (1, 2):
        rounds.receive(on.ReduceStreamOpened(stream, "run", stream - 1), 0.0)
    for chunk in range(2):
        rounds.receive(on.GradientArrived(1, chunk_of(0, 2, chunk)), 0.0)

    (effect,) = rounds.receive(on.GradientArrived(1, chunk_of(0, 2, 2)), 0.0)

    assert isinstance(effect, do.RefuseStream)
    assert effect.refusal.reason is Reason.MEMORY_LIMIT
    assert "--max-held-bytes" in effect.refusal.message
