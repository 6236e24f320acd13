"""A run: its streams, the one round that is alive, and how much of it may be in memory.

Theory of operation. A chunk's *place* is its position in the order in which every stream sends
(`exchange.Place`), so places rise on each stream. A contribution is held until its chunk has one
from every rank that did not abstain. Then the chunk is a job for a thread, and its average goes
back on the streams that brought the contributions.

Memory is bounded by pausing streams, never by dropping. If there is no room for a contribution,
its stream is paused, and this one message is parked until there is room. There are two rules:

1. A chunk beyond the lowest incomplete one must fit into the window, beside all that is held.
2. The lowest incomplete chunk is always let in (rule 16 of the protocol), unless jobs and averages
   on their way out fill a window by themselves.

Neither rule can deadlock. The first: a rank whose part of the lowest chunk is missing has not sent
that part yet. Places rise on every stream, so none of its streams is parked beyond that chunk. The
second: averages leave as the workers read, and workers read while they write. So a run holds at
most two windows, two messages a stream (one that was the lowest when it was let in, and one parked)
and one chunk with its average: all of its nodes, if ranks contribute several. A span of shared
memory that is cut counts as one chunk: all of its averages may be on their way at once.

Averages for listeners are in neither rule: see `core.listeners`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockGradient,
    RoundAborted,
    StaleRound,
)
from andon.protocol.records import Key
from andon_reducer.core.disagreement import Disagreement
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
from andon_reducer.core.exchange import (
    OVERHEAD_BYTES,
    IncompleteChunk,
    held_bytes_of,
    place_of,
)
from andon_reducer.core.jobs import job_of
from andon_reducer.core.listeners import Listeners
from andon_reducer.core.outgoing import OutgoingChunk, OutgoingChunks
from andon_reducer.core.round import ReducerRound, Verdict
from andon_reducer.core.stream import StreamState

__all__ = ["Run"]


@dataclass(slots=True, eq=False)
class Run:
    """One run. Each method takes one event, and returns what to do about it."""

    id: str
    window_bytes: int
    chunk_elements: int | None
    """Where blocks are cut for streams without shared memory; None: unknown."""
    ids: Iterator[int]
    """Numbers for jobs, never used twice in a reducer."""
    listeners: Listeners
    streams: dict[int, StreamState] = field(default_factory=dict)
    _round: ReducerRound | None = None
    """The round of the greatest key so far, void or not; None before the first message."""
    _parked: dict[int, StreamState] = field(default_factory=dict)
    """The streams that have a message parked."""
    _outgoing: OutgoingChunks = field(default_factory=OutgoingChunks)

    @property
    def inflight_bytes(self) -> int:
        """What contributions, jobs and averages hold, parked messages too."""
        # Another thread may ask at any moment: so the round is read once, and the streams copied.
        round_ = self._round
        messages = [each.parked for each in list(self._parked.values())]
        parked = sum(held_bytes_of(each) for each in messages if each)
        held = round_.held_bytes if round_ else 0
        return held + parked + self._outgoing.held_bytes + self._outgoing.listened_bytes

    @property
    def charged_bytes(self) -> int:
        """What it holds for those that contribute; the loop asks, with each message.

        That is `inflight_bytes` without what only listeners have not taken, and what remembering
        the finished chunks of its round takes.
        """
        charged = self._outgoing.held_bytes
        for stream in self._parked.values():
            charged += held_bytes_of(stream.parked) if stream.parked else 0
        if self._round is not None:
            charged += self._round.held_bytes + self._round.remembered_bytes
        return charged

    @property
    def over(self) -> bool:
        """Whether nothing of it is left."""
        # Threads may still work on jobs of a run whose streams all ended: it stays until they are
        # done, so that their ChunkReduced finds it.
        return not self.streams and not self._outgoing

    def open(self, stream: StreamState) -> None:
        """A stream was opened."""
        self.streams[stream.number] = stream
        if stream.listens:
            self.listeners.opened(stream.number)

    def contribute(self, stream: StreamState, gradient: BlockGradient, now: float) -> list[Effect]:
        """A stream brought a contribution."""
        effects: list[Effect] = []
        round_ = self._enter(stream, gradient.key, effects)
        if round_ is None:
            return effects
        # Set even if the message is parked below: the stream's next place must be above this one.
        stream.brought(gradient)
        if not self._parked and self._has_room(round_, gradient):
            self._hold(round_, stream, gradient, now, effects)
            return effects
        # Parked messages are let in lowest place first, and the lowest may be this one.
        self._park(stream, gradient)
        self._admit(now, effects)
        if stream.parked is not None:
            stream.paused = True
            effects.append(PauseStream(stream.number))
        return effects

    def abstain(self, stream: StreamState, abstain: Abstain, now: float) -> list[Effect]:
        """A stream's rank has nothing for an exchange."""
        effects: list[Effect] = []
        round_ = self._enter(stream, abstain.key, effects)
        if round_ is None:
            return effects
        try:
            # It takes no room, so it is never parked.
            complete, empty = round_.abstain(stream, abstain, now)
        except Disagreement as disagreement:
            fault = round_.fault_of(abstain, disagreement)
            self._void(round_, fault, effects, (abstain.rank, stream.worker))
        else:
            self._reduce(round_, complete, effects)
            if empty is not None:
                streams = round_.abstainers(abstain.group, abstain.sequence)
                effects.append(SendNotice(self._live(streams), empty))
                self._send_empty(round_, empty, effects)
        # A completed chunk makes room, and a void round makes all of it.
        self._admit(now, effects)
        return effects

    def reduced(self, event: ChunkReduced, now: float) -> list[Effect]:
        """A job is done."""
        effects: list[Effect] = []
        chunk = self._outgoing[event.job]
        round_, streams = chunk.round, self._live(chunk.streams)
        # The round may have become void, or made way for a greater key, while a thread worked. Then
        # nobody gets the result. A fault is dropped too: a round has one verdict.
        if round_ is not self._round or round_.verdict is not None or not streams:
            self._outgoing.drop(chunk)
        elif event.fault is not None:
            self._outgoing.drop(chunk)
            self._void(round_, event.fault, effects)
        else:
            assert chunk.job is not None, "a job is done once"
            round_.averaged(chunk.job.group, chunk.job.sequence, now)
            listeners = self.listeners.send(round_.listeners, chunk.job.answer_bytes, effects)
            self._outgoing.averaged(chunk, streams, listeners)
            effects.append(SendAverage(event.job, streams + listeners))
        # After the job was closed above: that may be what jobs of a newer exchange wait for.
        for free in self._outgoing.startable():
            assert free.job is not None, "it has not begun"
            effects.append(Reduce(free.job, self._recipients(free.round, free.streams)))
        self._admit(now, effects)
        return effects

    def sent(self, stream: StreamState, job: int, now: float) -> list[Effect]:
        """A stream took an average."""
        effects: list[Effect] = []
        chunk = self._outgoing[job]
        if stream.listens:
            self.listeners.took(stream.number, chunk.held_bytes)
        self._outgoing.taken(chunk, stream.number)
        self._admit(now, effects)
        return effects

    def end(self, stream: StreamState, now: float) -> list[Effect]:
        """A stream is over (rule 14)."""
        effects: list[Effect] = []
        # First of all, because effects must not name a stream that has ended.
        del self.streams[stream.number]
        self._parked.pop(stream.number, None)
        self._outgoing.forget(stream.number)
        self.listeners.ended(stream.number)
        round_ = self._round
        if round_ is not None:
            round_.listeners.discard(stream.number)
        if round_ is not None and round_.verdict is None and stream.number in round_.streams:
            round_.streams.discard(stream.number)
            text = f"a stream of worker {stream.worker} ended"
            if stream.parked is not None or self._unfinished(round_):
                self._void(round_, RoundAborted(round_.key, text), effects)
            else:
                # Nothing is missing so far: the worker may have left after its last average. Only
                # another message of this round would show that the worker is needed (`_enter`).
                round_.lost = text
        # With listeners alone nothing goes on.
        if any(not each.listens for each in self.streams.values()):
            self._admit(now, effects)
        else:
            self._free(effects)
        return effects

    def _live(self, streams: Iterable[int]) -> tuple[int, ...]:
        # A recipient may end between its contribution and the average: effects must not name it.
        return tuple(number for number in streams if number in self.streams)

    def _recipients(self, round_: ReducerRound, streams: Iterable[int]) -> tuple[int, ...]:
        """Those of a chunk's streams that are there, and the listeners of its round."""
        return self._live(streams) + self.listeners.of(round_.listeners)

    def _send_empty(
        self, round_: ReducerRound, empty: AveragedBlock, effects: list[Effect]
    ) -> None:
        """Sends the listeners that every rank left an exchange."""
        # Numbered like an average: else nothing bounds how many wait for one that does not read.
        listeners = self.listeners.send(round_.listeners, OVERHEAD_BYTES, effects)
        if listeners:
            job = next(self.ids)
            self._outgoing.add_empty(job, round_, listeners)
            effects.append(SendNotice(listeners, empty, job))

    def _unfinished(self, round_: ReducerRound) -> bool:
        """Whether anything of a round is incomplete or parked."""
        parked = (stream.parked for stream in self._parked.values())
        return round_.unfinished or any(each.key == round_.key for each in parked if each)

    def _enter(self, stream: StreamState, key: Key, effects: list[Effect]) -> ReducerRound | None:
        """The round that a message of `key` belongs to; if there is none, its stream learns why."""
        round_ = self._round
        if round_ is None or key > round_.key:
            # The first message of a greater key frees all older rounds (rule 14).
            self._free(effects)
            listeners = self.listeners.present
            round_ = self._round = ReducerRound(key, self.chunk_elements, listeners)
        if key < round_.key:
            # One answer for each key is enough: the worker may have sent many chunks of it already.
            if stream.stale != key:
                stream.stale = key
                effects.append(SendNotice((stream.number,), StaleRound(key, round_.key)))
            return None
        round_.streams.add(stream.number)
        if round_.lost and round_.verdict is None:
            self._void(round_, RoundAborted(key, round_.lost), effects)
        if round_.verdict is None:
            return round_
        # It joined a void round after everybody else was informed.
        if stream.number not in round_.informed:
            round_.informed.add(stream.number)
            effects.append(SendNotice((stream.number,), round_.verdict))
        return None

    def _park(self, stream: StreamState, gradient: BlockGradient) -> None:
        stream.parked = gradient
        self._parked[stream.number] = stream

    def _admit(self, now: float, effects: list[Effect]) -> None:
        """Lets in parked messages, lowest place first, as far as there is room."""
        # Each message that is let in may complete a chunk. Then another place is the lowest, and
        # there is always room for it. So the walk is repeated until one lets nothing in.
        admitted = bool(self._parked)
        while admitted:
            admitted = False
            parked = [(s.parked, s) for s in self._parked.values() if s.parked]
            parked.sort(key=lambda pair: (pair[0].key, place_of(pair[0])))
            for gradient, stream in parked:
                # Looked up again: while the message was parked, its round may have become void, or
                # made way for a greater key.
                round_ = self._enter(stream, gradient.key, effects)
                if round_ is not None and not self._has_room(round_, gradient):
                    continue
                del self._parked[stream.number]
                stream.parked, admitted = None, True
                if stream.paused:
                    stream.paused = False
                    effects.append(ResumeStream(stream.number))
                if round_ is not None:
                    self._hold(round_, stream, gradient, now, effects)

    def _has_room(self, round_: ReducerRound, gradient: BlockGradient) -> bool:
        """The two rules for room; see the theory of operation."""
        lowest = round_.lowest()
        if lowest is None or place_of(gradient) <= lowest:
            return self._outgoing.held_bytes < self.window_bytes
        held_bytes = round_.held_bytes + self._outgoing.held_bytes
        return held_bytes + held_bytes_of(gradient) <= self.window_bytes

    def _hold(
        self,
        round_: ReducerRound,
        stream: StreamState,
        gradient: BlockGradient,
        now: float,
        effects: list[Effect],
    ) -> None:
        try:
            complete = round_.contribute(stream, gradient, now)
        except Disagreement as disagreement:
            fault = round_.fault_of(gradient, disagreement)
            self._void(round_, fault, effects, (gradient.rank, stream.worker))
        else:
            self._reduce(round_, complete, effects)

    def _reduce(
        self, round_: ReducerRound, complete: list[IncompleteChunk], effects: list[Effect]
    ) -> None:
        """Makes jobs of complete chunks; those that must wait begin in `reduced`."""
        for chunk in complete:
            streams = chunk.recipients()
            live = self._recipients(round_, streams)
            job = job_of(chunk, next(self.ids), [self.streams[each].shared for each in live])
            # The average is charged from now on: a thread may be making it at any time.
            held_bytes = chunk.held_bytes + job.answer_bytes
            if self._outgoing.add(OutgoingChunk(job.id, round_, held_bytes, list(streams), job)):
                effects.append(Reduce(job, live))

    def _void(
        self,
        round_: ReducerRound,
        verdict: Verdict,
        effects: list[Effect],
        *refused: tuple[int, int],
    ) -> None:
        """Voids the round with its final verdict, and sends that to every stream that took part.

        `refused` is the rank of the message that was refused, if one was, and who sent it.
        """
        fault = verdict if isinstance(verdict, BlockFault) else None
        # Before the round forgets its ranks.
        senders = {*refused, *round_.senders(fault.group)} if fault is not None else ()
        round_.void(verdict)
        streams = self._live(sorted(round_.streams))
        round_.informed.update(streams)
        if streams:
            effects.append(SendNotice(streams, verdict))
        if isinstance(verdict, BlockFault):
            outcome = RoundOutcome.FAULTED
        else:
            outcome = RoundOutcome.CORRUPT if verdict.corrupt else RoundOutcome.ABORTED
        effects.append(
            FreeRound(self.id, round_.key, outcome, fault=fault, senders=tuple(sorted(senders)))
        )

    def _free(self, effects: list[Effect]) -> None:
        """Lets go of the round. Unless it was void already, this is its end."""
        round_, self._round = self._round, None
        if round_ is None or round_.verdict is not None:
            return
        if self._unfinished(round_):
            effects.append(FreeRound(self.id, round_.key, RoundOutcome.SUPERSEDED))
        else:
            seconds = round_.exchange_seconds
            effects.append(FreeRound(self.id, round_.key, RoundOutcome.FINISHED, seconds))
