"""The scripted line: coordinator, reducer and other workers, as one client sees them in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from andon.protocol.layout import Chunk
from andon.protocol.messages import BlockGradient
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.reducers import ReducerShare
from andon.protocol.shards import Split, cursor_after, deal, next_batch
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.judge.checks import Overdue, Stopped
from andon_conformance.judge.control import ScriptedCoordinator, opened
from andon_conformance.judge.rounds import Averages, ClientChunk, ClientRound, steady
from andon_conformance.judge.server import REDUCE
from andon_conformance.judge.streams import ClientCall
from andon_conformance.judge.transcript import ENDED, EXITED, Event

__all__ = ["Answers", "ScriptedLine", "send_answers"]

_EQUAL = Split()
Answers = list[tuple[ClientCall, reducer_pb2.ReduceResponse]]
"""Averages, each with the stream that it goes to."""


@dataclass
class ScriptedLine(ScriptedCoordinator):
    """A line with one client. Methods that wait raise `Overdue` if the client is too late."""

    def chunks(self) -> list[Chunk]:
        """Every chunk of the model, in the layout's order."""
        return list(self.layout.chunks(self.setting.policy.chunk_elements))

    def assign(
        self,
        roster: Sequence[int] | None = None,
        *,
        positions: Sequence[PositionRange] | None = None,
        parent: Key | None = None,
        reducers: Sequence[ReducerShare] = (),
        split: Split = _EQUAL,
        more: pb.ShardAssignment | None = None,
    ) -> ClientRound:
        """Assigns the next round to the client.

        Args:
            roster: the workers of the round; by default all.
            positions: the client's, perhaps none; by default its part of the batch.
            parent: sent in place of the line's head.
            reducers: a partition that replaces the one in JoinAccepted.
            split: how the batch is divided among the roster.
            more: further fields of the assignment.

        Raises:
            Stopped: the client's plan has no further step.
        """
        limit = self.plan.total_steps
        if limit is not None and self.step >= limit:
            raise Stopped(f"the client's plan ends after {limit} steps: the judge needs more")
        assert self.head is not None
        roster = tuple(roster or range(self.setting.workers))
        rank = roster.index(self._id)
        batch = next_batch(self.cursor, self.plan.global_batch, self.plan.epoch_size)
        if positions is None:
            positions = deal(batch, split, len(roster))[rank] or (batch,)
        current = ClientRound(
            key=self.new_key(),
            parent=parent or self.head,
            roster=roster,
            rank=rank,
            step=self.step + 1,
            cursor=cursor_after(self.cursor, batch, self.plan.epoch_size),
            positions=tuple(positions),
            batch=batch,
            began=self.transcript.now,
        )
        assignment = _assignment(current, self.cursor)
        assignment.reducers.extend(conversion.shares_to_proto(reducers))
        assignment.targets.extend(split.targets)
        assignment.interleaved = split.interleaved
        if more is not None:
            assignment.MergeFrom(more)
        self.train.send(pb.TrainResponse(shard_assignment=assignment))
        return current

    async def begin(
        self,
        roster: Sequence[int] | None = None,
        *,
        check: str = "",
        empty: bool = False,
        split: Split = _EQUAL,
        wants_digest: bool = False,
    ) -> ClientRound:
        """A round in which the client contributed everything and has no average yet.

        `check` is the check that fails if the contribution does not come, and with `empty` the
        client has no positions; the rest is as for `assign`.
        """
        await self.asks()
        positions = () if empty else None
        more = pb.ShardAssignment(wants_digest=wants_digest)
        current = self.assign(roster, positions=positions, split=split, more=more)
        with self.verdicts.deciding(check) if check else nullcontext():
            await self.gives(current)
        return current

    async def gives(self, current: ClientRound) -> None:
        """Waits until the client contributed every element, in any chunks, or abstained."""
        places: dict[tuple[int, int], int] = {}

        # By elements, not by chunks: how the client cuts its blocks is for checks to judge.
        def complete(event: Event) -> bool:
            match event.kind:
                case "block_gradient" if _may_be_of(current, event.message):
                    message: BlockGradient = event.message
                    current.given.append(ClientChunk(event.stream, message))
                    places[message.block, message.offset] = message.count
                case "abstain":
                    current.abstained.append((event.stream, event.message))
            return sum(places.values()) >= self.layout.elements or bool(current.abstained)

        # A call after one in vain begins anew.
        current.given.clear()
        current.abstained.clear()
        what = f"the client's contribution to step {current.step}"
        try:
            await self.transcript.wait(what, complete, current.began)
        except Overdue as overdue:
            raise Overdue(f"{overdue} ({len(current.given)} chunks came)") from None

    def answers(
        self, current: ClientRound, make: Callable[[Chunk], reducer_pb2.AveragedBlock] | None = None
    ) -> Answers:
        """A round's averages in the layout's order; `make` makes them, by default the true mean."""
        make = make or self.averages(current).true
        answers = []
        for chunk in self.chunks():
            stream = current.stream_of(chunk)
            answers.append((stream, reducer_pb2.ReduceResponse(averaged_block=make(chunk))))
        return answers

    def averages(self, current: ClientRound) -> Averages:
        """Computes a round's averages."""
        return Averages(self.layout, self.setting.policy, current)

    def average(
        self, current: ClientRound, make: Callable[[Chunk], reducer_pb2.AveragedBlock] | None = None
    ) -> None:
        """Sends all averages of a round."""
        send_answers(self.answers(current, make))

    def made_up(self, current: ClientRound) -> Answers:
        """Averages of a round that have nothing to do with what the client contributed."""
        averages = self.averages(current)
        return self.answers(current, lambda chunk: averages.made(chunk, steady(chunk)))

    async def fault(self, current: ClientRound) -> pb.Fault:
        """Waits for the client's Fault of a round."""
        event = await self.transcript.wait(
            f"Fault of step {current.step}", self.of_round("fault", current), current.began
        )
        fault: pb.Fault = event.message
        return fault

    def readies(self, current: ClientRound) -> list[Event]:
        """Every StepReady of a round so far."""
        return self.transcript.find(self.of_round("step_ready", current))

    async def ready(self, current: ClientRound) -> pb.StepReady:
        """Waits for StepReady of a round."""
        event = await self.transcript.wait(
            f"StepReady of step {current.step}", self.of_round("step_ready", current), current.began
        )
        ready: pb.StepReady = event.message
        return ready

    def commit(self, current: ClientRound, stop_reason: str = "") -> Record:
        """Sends the record that a round becomes, and returns it."""
        record = self.record_of(current)
        self.tell_record(record, stop_reason)
        return record

    def record_of(self, current: ClientRound) -> Record:
        """The record that a round becomes if it is committed."""
        return Record(
            current.key,
            current.parent,
            RecordKind.STEP,
            current.step,
            current.cursor,
            current.roster,
        )

    def void(self, current: ClientRound) -> None:
        """Voids a round."""
        self.void_key(current.key)

    def void_key(self, key: Key) -> None:
        """Voids the round of any key."""
        voided = pb.RoundVoided(key=conversion.key_to_proto(key), message="the judge voids it")
        self.train.send(pb.TrainResponse(round_voided=voided))

    async def steps(self, count: int = 1) -> None:
        """Takes whole steps with made-up averages, each up to its commit."""
        for _ in range(count):
            _, current = await self.averaged()
            self.commit(current)

    async def averaged(
        self, make: Callable[[ClientRound, Chunk], reducer_pb2.AveragedBlock] | None = None
    ) -> tuple[pb.StepReady, ClientRound]:
        """Takes a step up to the client's StepReady; made-up averages unless `make` makes them."""
        current = await self.begin()
        maker = self.averages(current)
        self.average(
            current,
            lambda chunk: (
                maker.made(chunk, steady(chunk)) if make is None else make(current, chunk)
            ),
        )
        return await self.ready(current), current

    async def answer_to(self, current: ClientRound) -> Event:
        """Waits until the client sends Fault or StepReady of a round, or ends its stream."""
        return await self.transcript.wait(
            f"Fault of step {current.step}, StepReady, or the end of the Train stream",
            lambda event: (
                self.of_round("fault", current)(event)
                or self.of_round("step_ready", current)(event)
                or self.train_ends(event)
            ),
            current.began,
        )

    async def refusal(self, current: ClientRound) -> Event:
        """Waits until the client refuses a round in any way, or contributes to it."""
        return await self.transcript.wait(
            "Fault, or the end of the stream",
            lambda event: (
                event.kind in (EXITED, "block_gradient")
                or self.of_round("fault", current)(event)
                or self.train_ends(event)
            ),
            current.began,
        )

    def train_ends(self, event: Event) -> bool:
        """Tests for the end of the current Train stream."""
        return event.kind == ENDED and event.stream is self._train

    async def gives_up(self, current: ClientRound) -> str:
        """Waits until the client rejects a round, by Fault or by joining again.

        Afterwards the round is void and the client in sync.

        Returns:
            What the client did, as a sentence.
        """
        event = await self.transcript.wait(
            f"Fault of step {current.step}, or the end of the stream",
            lambda event: self.of_round("fault", current)(event) or self.train_ends(event),
            current.began,
        )
        # A client may also give up the whole stream: what counts is that it is not ready.
        if event.kind == ENDED:
            await self.joins()
            self.accept(pb.JOIN_STATUS_IN_SYNC)
            return "it joined again"
        self.void(current)
        return f"it sent Fault {pb.FaultKind.Name(event.message.kind)}"

    async def ends(self, stream: ClientCall) -> None:
        """Waits until the client ends a stream."""
        await self.transcript.wait(
            f"the end of {stream}", lambda event: event.kind == ENDED and event.stream is stream
        )

    def of_round(self, kind: str, current: ClientRound) -> Callable[[Event], bool]:
        """Tests for a message on the Train stream that names this round."""
        return lambda event: (
            event.kind == kind
            and conversion.optional_key_from_proto(event.message.key) == current.key
        )

    def reduce_streams(self, since: int = 0) -> list[ClientCall]:
        """The streams to the reducer that were opened since a place in the transcript."""
        return [event.stream for event in self.transcript.find(opened(REDUCE), since)]


def send_answers(answers: Answers) -> None:
    """Sends averages in the order of the list."""
    for stream, answer in answers:
        stream.send(answer)


def _may_be_of(current: ClientRound, message: BlockGradient) -> bool:
    """Whether a contribution may belong to a round. One check of its own looks at the key."""
    # Late messages of an older round are no mistake; those of the parent's key are.
    late = message.key.term == current.key.term and message.key < current.key
    return not late or message.key == current.parent


def _assignment(current: ClientRound, cursor: Cursor) -> pb.ShardAssignment:
    return pb.ShardAssignment(
        key=conversion.key_to_proto(current.key),
        parent=conversion.key_to_proto(current.parent),
        roster=current.roster,
        rank=current.rank,
        world_size=current.world_size,
        step=current.step,
        epoch=cursor.epoch,
        positions=[conversion.range_to_proto(part) for part in current.positions],
        batch=conversion.range_to_proto(current.batch),
    )
