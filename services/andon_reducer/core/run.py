"""A run: its streams, the one round that is alive, and the room there is for chunks.

Theory of operation. Each stream brings chunks in rising places. A contribution is held until its
chunk has one from every rank that did not abstain; then the chunk is a job for a thread, and its
average goes back on the streams that brought the contributions.

Memory is bounded by pausing streams, never by dropping. A stream that brings more than there is
room for is paused with its one message parked, which is looked at again whenever room is made.
Room means two things. A chunk beyond the lowest incomplete one must fit into the window, beside all
that is held. The lowest incomplete chunk is always let in (rule 16), unless jobs and averages on
their way out fill a window by themselves. The first cannot deadlock: a rank whose part of the
lowest chunk is missing has not sent it yet, so none of its streams is parked beyond it, for places
rise on every stream. Nor can the second: averages leave as the workers read, which they do while
they write. So a run holds at most two windows, two messages a stream (one that was the lowest when
it was let in, and one parked) and one chunk with its average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from andon.protocol.messages import Abstain, BlockFault, BlockGradient, RoundAborted, StaleRound
from andon.protocol.records import Key
from andon_reducer.core.effects import (
    Effect,
    FreeRound,
    PauseStream,
    Reduce,
    ResumeStream,
    RoundOutcome,
    SendAverage,
    SendNotice,
)
from andon_reducer.core.events import ChunkReduced
from andon_reducer.core.exchange import Disagreement, held_bytes_of, last_place_of, place_of
from andon_reducer.core.jobs import Job
from andon_reducer.core.round import Complete, Round
from andon_reducer.core.settling import Entry, Settling
from andon_reducer.core.stream import Stream

__all__ = ["Run"]


@dataclass(slots=True)
class Run:
    """One run. Its methods say what to do, as `Rounds.receive` does."""

    id: str
    window_bytes: int
    chunk_elements: int | None
    """Where blocks are cut for streams without shared memory; None: nobody knows."""
    ids: Iterator[int]
    """Numbers for jobs."""
    streams: dict[int, Stream] = field(default_factory=dict)
    _round: Round | None = None
    _settling: Settling = field(default_factory=Settling)

    @property
    def inflight_bytes(self) -> int:
        """What contributions, jobs and averages hold, parked messages too."""
        parked = sum(held_bytes_of(s.parked) for s in self.streams.values() if s.parked)
        held = self._round.held_bytes if self._round else 0
        return parked + held + self._settling.held_bytes

    @property
    def remembered_bytes(self) -> int:
        """What remembering the finished chunks of its round takes."""
        return self._round.remembered_bytes if self._round else 0

    @property
    def over(self) -> bool:
        """Whether nothing of it is left."""
        return not self.streams and not self._settling

    def contribute(self, stream: Stream, gradient: BlockGradient, now: float) -> list[Effect]:
        """A stream brought a contribution."""
        effects: list[Effect] = []
        if not self._enter(stream, gradient.key, effects):
            return effects
        stream.last = gradient.key, last_place_of(gradient)
        stream.parked = gradient
        self._admit(now, effects)
        if stream.parked is not None:
            stream.paused = True
            effects.append(PauseStream(stream.number))
        return effects

    def abstain(self, stream: Stream, abstain: Abstain, now: float) -> list[Effect]:
        """A stream's rank has nothing for an exchange."""
        effects: list[Effect] = []
        if not self._enter(stream, abstain.key, effects):
            return effects
        round_ = self._alive()
        try:
            complete, empty = round_.abstain(stream, abstain, now)
        except Disagreement as disagreement:
            self._void(round_.fault_of(abstain, disagreement), effects)
        else:
            self._reduce(round_, complete, effects)
            if empty is not None:
                streams = round_.abstainers(abstain.group, abstain.sequence)
                effects.append(SendNotice(self._live(streams), empty))
        self._admit(now, effects)
        return effects

    def reduced(self, event: ChunkReduced, now: float) -> list[Effect]:
        """A job is done."""
        effects: list[Effect] = []
        entry = self._settling[event.job]
        streams = self._live(entry.streams)
        if entry.round is not self._round or entry.round.verdict is not None or not streams:
            self._settling.drop(entry)
        elif event.fault is not None:
            self._settling.drop(entry)
            self._void(event.fault, effects)
        else:
            entry.round.averaged(entry.job.group, entry.job.sequence, now)
            self._settling.average(entry, streams)
            effects.append(SendAverage(event.job, streams))
        effects += [Reduce(each.job, self._live(each.streams)) for each in self._settling.next()]
        self._admit(now, effects)
        return effects

    def sent(self, stream: Stream, job: int, now: float) -> list[Effect]:
        """A stream took an average."""
        effects: list[Effect] = []
        self._settling.take(job, stream.number)
        self._admit(now, effects)
        return effects

    def end(self, stream: Stream, now: float) -> list[Effect]:
        """A stream is over (rule 14)."""
        effects: list[Effect] = []
        del self.streams[stream.number]
        self._settling.forget(stream.number)
        round_ = self._round
        if round_ is not None and round_.verdict is None and stream.number in round_.streams:
            round_.streams.discard(stream.number)
            text = f"a stream of worker {stream.worker} ended"
            if stream.parked is not None or self._unfinished(round_):
                self._void(RoundAborted(round_.key, text), effects)
            else:
                round_.lost = text
        if self.streams:
            self._admit(now, effects)
        else:
            self._free(effects)
        return effects

    def _alive(self) -> Round:
        assert self._round is not None, "a message entered"
        return self._round

    def _live(self, streams: tuple[int, ...] | list[int]) -> tuple[int, ...]:
        return tuple(number for number in streams if number in self.streams)

    def _unfinished(self, round_: Round) -> bool:
        """Whether anything of a round is incomplete or parked."""
        parked = (stream.parked for stream in self.streams.values())
        return round_.unfinished or any(each.key == round_.key for each in parked if each)

    def _enter(self, stream: Stream, key: Key, effects: list[Effect]) -> bool:
        """Whether a message of `key` has a round to go to; if not, its stream is told why."""
        if self._round is None or key > self._round.key:
            self._free(effects)
            self._round = Round(key, self.chunk_elements)
        round_ = self._round
        if key < round_.key:
            if stream.stale != key:
                stream.stale = key
                effects.append(SendNotice((stream.number,), StaleRound(key, round_.key)))
            return False
        round_.streams.add(stream.number)
        if round_.lost and round_.verdict is None:
            self._void(RoundAborted(key, round_.lost), effects)
        if round_.verdict is None:
            return True
        if stream.number not in round_.told:
            round_.told.add(stream.number)
            effects.append(SendNotice((stream.number,), round_.verdict))
        return False

    def _admit(self, now: float, effects: list[Effect]) -> None:
        """Lets in what is parked, lowest first, as far as there is room."""
        admitted = True
        while admitted:
            admitted = False
            parked = [(s.parked, s) for s in self.streams.values() if s.parked]
            parked.sort(key=lambda pair: (pair[0].key, place_of(pair[0])))
            for gradient, stream in parked:
                entered = self._enter(stream, gradient.key, effects)
                if entered and not self._has_room(gradient):
                    continue
                stream.parked, admitted = None, True
                if stream.paused:
                    stream.paused = False
                    effects.append(ResumeStream(stream.number))
                if entered:
                    self._hold(stream, gradient, now, effects)

    def _has_room(self, gradient: BlockGradient) -> bool:
        round_ = self._alive()
        lowest = round_.lowest()
        if lowest is None or place_of(gradient) <= lowest:
            return self._settling.held_bytes < self.window_bytes
        held_bytes = round_.held_bytes + self._settling.held_bytes
        return held_bytes + held_bytes_of(gradient) <= self.window_bytes

    def _hold(
        self, stream: Stream, gradient: BlockGradient, now: float, effects: list[Effect]
    ) -> None:
        round_ = self._alive()
        try:
            complete = round_.contribute(stream, gradient, now)
        except Disagreement as disagreement:
            self._void(round_.fault_of(gradient, disagreement), effects)
            return
        self._reduce(round_, complete, effects)

    def _reduce(self, round_: Round, complete: list[Complete], effects: list[Effect]) -> None:
        """Makes jobs of complete chunks; those that must wait are begun in `reduced`."""
        for each in complete:
            job = self._job(round_, each)
            streams = list(each.streams)
            if self._settling.add(
                Entry(job, round_, each.chunk.held_bytes + job.answer_bytes, streams)
            ):
                effects.append(Reduce(job, self._live(streams)))

    def _job(self, round_: Round, complete: Complete) -> Job:
        sequence, block, offset, group = complete.place
        chunk = complete.chunk
        job = Job(
            id=next(self.ids),
            key=round_.key,
            group=group,
            sequence=sequence,
            operation=chunk.operation,
            world_size=complete.world_size,
            block=block,
            offset=offset,
            count=chunk.count,
            encoding=chunk.encoding,
            answer_encoding=chunk.answer_encoding,
            contributions=tuple(chunk.contributions[r] for r in sorted(chunk.contributions)),
        )
        shared = [self.streams[number].shared for number in self._live(complete.streams)]
        if not (any(shared) and job.fits_memory):
            return job
        return replace(job, to_memory=True, in_place=all(shared))

    def _void(self, verdict: BlockFault | RoundAborted, effects: list[Effect]) -> None:
        """Ends the round for good and tells everybody who took part."""
        round_ = self._alive()
        round_.void(verdict)
        streams = self._live(sorted(round_.streams))
        round_.told.update(streams)
        if streams:
            effects.append(SendNotice(streams, verdict))
        if isinstance(verdict, BlockFault):
            outcome = RoundOutcome.FAULTED
        else:
            outcome = RoundOutcome.CORRUPT if verdict.corrupt else RoundOutcome.ABORTED
        effects.append(FreeRound(self.id, round_.key, outcome))

    def _free(self, effects: list[Effect]) -> None:
        """Lets go of the round, if it was not void already."""
        round_, self._round = self._round, None
        if round_ is None or round_.verdict is not None:
            return
        if self._unfinished(round_):
            effects.append(FreeRound(self.id, round_.key, RoundOutcome.SUPERSEDED))
        else:
            seconds = round_.exchange_seconds
            effects.append(FreeRound(self.id, round_.key, RoundOutcome.FINISHED, seconds))
