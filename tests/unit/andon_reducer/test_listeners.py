"""Streams that only listen: whatever they do, members and memory are as if they were not there."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from andon.protocol.messages import Abstain, AveragedBlock, BlockGradient, Slice
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon_reducer.core import effects as do
from andon_reducer.core import events as on
from andon_reducer.core.exchange import OVERHEAD_BYTES
from andon_reducer.core.jobs import Job, reduce_chunk
from andon_reducer.core.rounds import Rounds

COUNT = 4
"""Elements of a chunk; a block has three."""
MESSAGE_BYTES = 4 * COUNT + OVERHEAD_BYTES
WINDOW_BYTES = 3 * MESSAGE_BYTES
LISTENER_BYTES = 20 * MESSAGE_BYTES
ROUNDS = 4
FIRST_LISTENER = 100

Message = BlockGradient | Abstain
Heard = dict[tuple[int, int, int], bytes]
"""By sequence, block and element; an exchange of nothing is block -1."""


def gradient_of(key: Key, rank: int, ranks: int, block: int, chunks: range) -> BlockGradient:
    """A rank's contribution to some chunks of a block: a slice, if they are several."""
    draw = np.random.default_rng([key.round, rank, block])
    numbers = draw.standard_normal(3 * COUNT).astype(np.float32)
    part = numbers[chunks.start * COUNT : chunks.stop * COUNT]
    return BlockGradient(
        key=key,
        rank=rank,
        world_size=ranks,
        block=block,
        offset=chunks.start * COUNT,
        count=part.size,
        weight=1.0 + rank,
        payload=memoryview(part.tobytes()),
        slice=Slice(0, 4 * part.size, 1) if len(chunks) > 1 else None,
    )


@dataclass
class Simulation:
    """Members that train, and listeners that come, read, stall and go at random."""

    seed: int
    most_listeners: int
    random: random.Random = field(init=False)
    rounds: Rounds = field(init=False)
    shares: list[bool] = field(init=False)
    """By rank."""
    lanes: dict[int, deque[Message]] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    jobs: list[Job] = field(default_factory=list)
    answers: dict[int, AveragedBlock] = field(default_factory=dict)
    unread: dict[int, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    got: dict[tuple[int, Key], Heard] = field(default_factory=lambda: defaultdict(dict))
    """By stream and round."""
    opened: int = 0
    listening: set[int] = field(default_factory=set)
    reading: set[int] = field(default_factory=set)
    """Of those that listen, who reads."""
    whole: set[tuple[int, Key]] = field(default_factory=set)
    """Which rounds a listener hears from their beginning to their end."""
    refused: int = 0

    def __post_init__(self) -> None:
        # The members are the same with and without listeners.
        draw = random.Random(self.seed)
        self.shares = [draw.random() < 0.6 for _ in range(draw.randint(1, 3))]
        self.random = random.Random(self.seed)
        self.rounds = Rounds(
            window_bytes=WINDOW_BYTES,
            max_payload_bytes=1024,
            chunk_elements=COUNT,
            listener_bytes=LISTENER_BYTES,
        )
        for rank, shares in enumerate(self.shares):
            self.report(on.ReduceStreamOpened(rank, "7f3a", rank))
            if shares:
                self.report(on.MemoryMapped(rank))

    def report(self, event: on.Event) -> None:
        for effect in self.rounds.receive(event, 0.0):
            self.perform(effect)
        # One span of each rank is cut at a time, and its averages are on their way together.
        ranks = len(self.shares)
        assert self.rounds.inflight_bytes <= (
            2 * WINDOW_BYTES + (3 * ranks + 4) * MESSAGE_BYTES + LISTENER_BYTES
        )

    def perform(self, effect: do.Effect) -> None:
        match effect:
            case do.Reduce(job):
                self.jobs.append(job)
            case do.SendAverage(job_id, streams):
                for stream in streams:
                    self.unread[stream].append(job_id)
            case do.SendNotice(streams, AveragedBlock() as empty, job_id):
                self.notify(streams, empty, job_id)
            case do.PauseStream(number):
                self.paused.add(number)
            case do.ResumeStream(number):
                self.paused.remove(number)
            case do.RefuseStream(number, refusal):
                assert refusal.reason is Reason.PEER_GONE
                assert number in self.listening
                self.refused += 1
                self.gone(number)
                self.report(on.ReduceStreamEnded(number))
            case do.FreeRound(_, _, outcome):
                assert outcome is do.RoundOutcome.FINISHED
            case _:
                raise AssertionError(effect)

    def notify(self, streams: tuple[int, ...], empty: AveragedBlock, job: int | None) -> None:
        for stream in streams:
            if job is None:
                self.take(stream, empty)
            else:
                self.answers[job] = empty
                self.unread[stream].append(job)

    def run_round(self, round_: int) -> None:
        """One round, until its members have all averages."""
        key = Key(1, round_)
        draw, ranks = random.Random(f"{self.seed} {round_}"), len(self.shares)
        absent = draw.randrange(-ranks, ranks) if ranks > 1 else -1
        empty = draw.random() < 0.5
        blocks = draw.randint(1, 3)
        for rank, shares in enumerate(self.shares):
            lane = self.lanes.setdefault(rank, deque())
            whole = [range(3)] if shares else [range(n, n + 1) for n in range(3)]
            if rank == absent:
                lane.append(Abstain(key=key, rank=rank, world_size=ranks))
            else:
                lane += (
                    gradient_of(key, rank, ranks, block, chunks)
                    for block in range(blocks)
                    for chunks in whole
                )
            if empty:
                lane.append(Abstain(key=key, rank=rank, world_size=ranks, sequence=1))
        # The listeners before the first message hear it whole, if they stay.
        hearing = set(self.listening)
        first = True
        while steps := self.member_steps():
            if not first and self.random.random() < 0.4:
                self.disturb()
            else:
                hearing = set(self.listening) if first else hearing
                first = False
                self.random.choice(steps)()
        self.whole |= {(stream, key) for stream in hearing & self.listening}
        self.disturb()

    def member_steps(self) -> list[partial[None]]:
        ready = [n for n, lane in self.lanes.items() if lane and n not in self.paused]
        return [
            *(partial(self.send, number) for number in ready),
            *(partial(self.reduce, job) for job in self.jobs),
            *(partial(self.read, rank) for rank in range(len(self.shares)) if self.unread[rank]),
        ]

    def disturb(self) -> None:
        """A listener comes, goes, stalls or reads."""
        listening = sorted(self.listening)
        if len(listening) < self.most_listeners and self.random.random() < 0.3:
            number = FIRST_LISTENER + self.opened
            self.opened += 1
            self.listening.add(number)
            if self.random.random() < 0.7:
                self.reading.add(number)
            self.report(on.ReduceStreamOpened(number, "7f3a", worker=number, listens=True))
        elif listening and self.random.random() < 0.1:
            number = self.random.choice(listening)
            self.gone(number)
            self.report(on.ReduceStreamEnded(number))
        elif readers := [each for each in listening if each in self.reading and self.unread[each]]:
            self.read(self.random.choice(readers))

    def gone(self, number: int) -> None:
        self.listening.discard(number)
        self.unread.pop(number, None)

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

    def read(self, stream: int) -> None:
        job = self.unread[stream].popleft()
        self.take(stream, self.answers[job])
        self.report(on.AverageSent(stream, job))

    def take(self, stream: int, answer: AveragedBlock) -> None:
        mine = self.got[stream, answer.key]
        places = [(answer.sequence, -1, 0)] if answer.count == 0 else [
            (answer.sequence, answer.block, answer.offset + at) for at in range(answer.count)
        ]  # fmt: skip
        for at, place in enumerate(places):
            assert place not in mine, "an average came twice"
            mine[place] = bytes(answer.payload[4 * at : 4 * at + 4])

    def run(self) -> None:
        for round_ in range(1, ROUNDS + 1):
            self.run_round(round_)
        for number in sorted(self.listening):
            while self.unread[number]:
                self.read(number)


def test_members_do_not_notice_listeners_which_hear_whole_rounds() -> None:
    whole, refused, partly = 0, 0, 0

    for seed in range(150):
        alone, heard = Simulation(seed, most_listeners=0), Simulation(seed, most_listeners=3)
        alone.run()
        heard.run()
        for round_ in range(1, ROUNDS + 1):
            key = Key(1, round_)
            averages = heard.got[0, key]
            assert averages, seed
            for rank in range(len(heard.shares)):
                assert heard.got[rank, key] == alone.got[rank, key] == averages, seed
            for listener in heard.listening:
                expected = averages if (listener, key) in heard.whole else {}
                assert heard.got[listener, key] == expected, (seed, listener, key)
        assert heard.rounds.inflight_bytes == 0, seed
        whole += len(heard.whole)
        refused += heard.refused
        partly += any(heard.shares) and not all(heard.shares)

    # The simulations are worth something, since all that they are for happens.
    assert whole > 100
    assert refused > 10
    assert partly > 10


def test_what_a_listener_has_not_read_refuses_no_contribution() -> None:
    most_held = 2 * MESSAGE_BYTES
    rounds = Rounds(window_bytes=2**20, max_payload_bytes=1024, max_held_bytes=most_held)
    rounds.receive(on.ReduceStreamOpened(0, "7f3a", 0), 0.0)
    rounds.receive(on.ReduceStreamOpened(1, "7f3a", 1, listens=True), 0.0)
    for round_ in range(1, 5):
        gradient = gradient_of(Key(1, round_), 0, 1, 0, range(1))

        (*_, reduce) = rounds.receive(on.GradientArrived(0, gradient), 0.0)

        assert isinstance(reduce, do.Reduce)
        (sent,) = rounds.receive(on.ChunkReduced(reduce.job.id), 0.0)
        assert sent == do.SendAverage(reduce.job.id, (0, 1))
        rounds.receive(on.AverageSent(0, reduce.job.id), 0.0)
    assert rounds.inflight_bytes > most_held
