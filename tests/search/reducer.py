"""The reducer: the real `Rounds`, with averages that are lists of their contributions."""

from __future__ import annotations

from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockGradient,
    RoundAborted,
    StaleRound,
)
from andon_reducer.core import effects as do
from andon_reducer.core import events as on
from andon_reducer.core.jobs import Job
from andon_reducer.core.rounds import Rounds
from search.messages import Chunk, Lost
from search.numbers import Stream
from search.weights import Averages, Wrong, contribution_in, payload_of

__all__ = ["Reply", "open_stream", "start", "take"]

Reply = tuple[Stream, Averages | RoundAborted | StaleRound | BlockFault]


class _Numbers:
    """Numbers for jobs, from 1 again after each event, since no job is left between two events."""

    def __init__(self) -> None:
        self.last = 0

    def __iter__(self) -> _Numbers:
        return self

    def __next__(self) -> int:
        self.last += 1
        return self.last


def start() -> Rounds:
    """A reducer without streams."""
    rounds = Rounds(window_bytes=2**30, max_payload_bytes=2**20)
    rounds._ids = _Numbers()  # type: ignore[assignment]  # a counter that can be copied
    return rounds


def open_stream(rounds: Rounds, stream: Stream, worker: int, *, listens: bool) -> None:
    """A worker opens a stream, and waits until it is open."""
    rounds.receive(on.ReduceStreamOpened(stream, "search", worker, listens=listens), 0.0)


def take(rounds: Rounds, stream: Stream, message: Chunk | Lost, chunks: int) -> list[Reply]:
    """Processes a message of a stream, or its end. Returns all answers.

    Averages are made and taken at once: no other event can change the average of a complete chunk.
    """
    if isinstance(message, Lost):
        return _done(rounds, rounds.receive(on.ReduceStreamEnded(stream), 0.0), chunks)
    given = message.contribution
    if not given.samples:
        abstain = Abstain(key=given.key, rank=message.rank, world_size=message.world_size)
        return _done(rounds, rounds.receive(on.Abstained(stream, abstain), 0.0), chunks)
    gradient = BlockGradient(
        key=given.key,
        rank=message.rank,
        world_size=message.world_size,
        block=0,
        offset=message.offset,
        count=1,
        weight=float(given.samples),
        payload=payload_of(given),
        node=message.node,
    )
    return _done(rounds, rounds.receive(on.GradientArrived(stream, gradient), 0.0), chunks)


def _done(rounds: Rounds, effects: list[do.Effect], chunks: int) -> list[Reply]:
    replies: list[Reply] = []
    jobs: dict[int, Job] = {}
    for effect in effects:
        match effect:
            case do.Reduce(job):
                jobs[job.id] = job
                effects += rounds.receive(on.ChunkReduced(job.id), 0.0)
            case do.SendAverage(number, streams):
                job = jobs[number]
                for stream in streams:
                    rounds.receive(on.AverageSent(stream, number), 0.0)
                    # The last of a round's chunks completes its averages at the worker.
                    if job.offset == chunks - 1:
                        replies.append((Stream(stream), _averages(job)))
            case do.SendNotice(streams, notice):
                assert not isinstance(notice, AveragedBlock)
                replies += [(Stream(stream), notice) for stream in streams]
            case do.RefuseStream(stream, refusal):
                raise Wrong(f"the reducer refuses stream {stream}: {refusal.message}")
            case _:
                pass
    rounds._ids.last = 0  # type: ignore[attr-defined]  # of `_Numbers`
    return replies


def _averages(job: Job) -> Averages:
    parts = job.contributions
    return Averages(
        job.key,
        job.world_size,
        sum(part.weight for part in parts),
        tuple(contribution_in(part.payload) for part in parts),
    )
