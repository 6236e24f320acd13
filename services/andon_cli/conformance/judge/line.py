"""The line: what coordinator, reducer and the other workers do with one client, move by move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from andon import tokens, wire
from andon.layout import Chunk, Layout
from andon.messages import BlockGradient
from andon.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.shards import after, next_batch, share_of
from andon.terms import Policy, RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon_cli.conformance.judge.checks import Overdue, Stopped
from andon_cli.conformance.judge.client import Running
from andon_cli.conformance.judge.layouts import layout_of
from andon_cli.conformance.judge.rounds import FLOAT32, Averages, Given, Round, steady
from andon_cli.conformance.judge.server import GET, PUT, REDUCE, TRAIN, Server
from andon_cli.conformance.judge.streams import Stream
from andon_cli.conformance.judge.transcript import ENDED, OPENED, Event, Transcript

__all__ = ["Line", "Setting"]

_SECRET = b"the judge's session secret"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a line is like."""

    slot: int = 1
    """The client's launch slot, and its id."""
    workers: int = 2
    policy: Policy = FLOAT32
    lease_s: float = 0.9
    token: bytes = b""
    """What is in the token's file; empty: there is none."""


@dataclass
class Line:
    """One line, with one client on it. Moves raise `Overdue` if the client does not do its part."""

    setting: Setting
    transcript: Transcript
    server: Server
    client: Running
    run_id: str
    term: int
    head: Key | None = None
    """The line's."""
    step: int = 0
    cursor: Cursor = field(default_factory=lambda: Cursor(0, 0))
    join: pb.Join = field(default_factory=pb.Join)
    """The client's last."""
    _round: int = 0
    _train: Stream | None = None
    _joined_at: int = 0
    _asked: pb.RequestWork | None = None
    """The client's request, while it is good."""
    _asks_from: int = 0

    # ------------------------------------------------------------------ what there is

    @property
    def train(self) -> Stream:
        """The client's present Train stream."""
        assert self._train is not None, "no client joined"
        return self._train

    @property
    def session_token(self) -> bytes:
        """What opens this client's streams to the reducer."""
        return tokens.issue(_SECRET, self.run_id, self.setting.slot)

    @property
    def layout(self) -> Layout:
        """The client's layout; its digest may be wrong, and matters to one check alone.

        Raises:
            Stopped: it is no layout.
        """
        try:
            return layout_of(self.join.layout)
        except ValueError as error:
            raise Stopped(f"the client's layout can't be: {error}") from None

    @property
    def plan(self) -> RunPlan:
        """The client's plan."""
        try:
            return wire.plan_from_proto(self.join.plan)
        except wire.WireError as error:
            raise Stopped(f"the client's plan can't be: {error}") from None

    def chunks(self) -> list[Chunk]:
        """Every chunk of the model, in the layout's order."""
        return list(self.layout.chunks(self.setting.policy.chunk_elements))

    def new_key(self) -> Key:
        """A key that was never used."""
        self._round += 1
        return Key(self.term, self._round)

    # ------------------------------------------------------------------ joining

    async def joins(self, *, patience_s: float | None = None) -> pb.Join:
        """Waits for the client's next Join, on a new stream."""
        opened = await self.transcript.wait(
            "a Train stream", _is(OPENED, TRAIN), self._joined_at, patience_s=patience_s
        )
        self._joined_at = self.transcript.events.index(opened) + 1
        self._train = opened.stream
        self._asked, self._asks_from = None, self._joined_at
        event = await self.transcript.wait("Join", self.on_train("join"))
        self.join = event.message
        return self.join

    def accept(self, standing: pb.Standing, head: Key | None = None) -> None:
        """Answers Join; `head` is said to be the line's, if it is not the one that it has."""
        lease_s = self.setting.lease_s
        accepted = pb.JoinAccepted(
            worker=self.setting.slot,
            session_token=self.session_token,
            reducers=[pb.ReducerShare(stop_element=self.layout.elements)],
            plan=wire.plan_to_proto(self.plan),
            policy=wire.policy_to_proto(self.setting.policy),
            liveness=pb.Liveness(
                lease_s=lease_s, heartbeat_s=lease_s / 3, reconnect_s=self.transcript.patience_s
            ),
            standing=standing,
            head=wire.key_to_proto(head or self.head),
            step=self.step,
            term=self.term,
        )
        self.train.send(pb.TrainResponse(join_accepted=accepted))

    async def founded(self) -> None:
        """Takes a fresh client's Join, and makes its weights the line's."""
        await self.joins()
        self.accept(pb.STANDING_FRESH)
        self.found()

    def found(self) -> None:
        """Says that the client's weights are the line's."""
        record = Record(self.new_key(), None, RecordKind.FOUND, 0, Cursor(0, 0), (self._id,))
        self.tell_record(record)

    def tell_record(self, record: Record, stop_reason: str = "", loss: float = 1.0) -> None:
        """Makes a record the line's head, and sends it."""
        self.head, self.step, self.cursor = record.key, record.step, record.cursor
        self._asked = None
        committed = pb.StepCommitted(
            record=wire.record_to_proto(record),
            loss=loss,
            samples=1,
            contributors=len(record.roster),
            stop_reason=stop_reason,
        )
        self.train.send(pb.TrainResponse(step_committed=committed))

    # ------------------------------------------------------------------ a step

    async def asks(self) -> pb.RequestWork:
        """Waits until the client has asked for work from the line's head.

        A request is good until a step is committed or the stream ends: whoever was assigned a round
        that is void need not ask again.
        """
        if self._asked is None:
            event = await self.transcript.wait(
                f"RequestWork from head {self.head}", self._asks_now, self._asks_from
            )
            self._asks_from = self.transcript.events.index(event) + 1
            self._asked = event.message
        assert self._asked is not None
        return self._asked

    def _asks_now(self, event: Event) -> bool:
        asks = self.on_train("request_work")(event)
        return asks and wire.optional_key_from_proto(event.message.head) == self.head

    def assign(
        self,
        roster: Sequence[int] | None = None,
        *,
        empty: bool = False,
        parent: Key | None = None,
    ) -> Round:
        """Assigns the next round; `empty`: no position to the client."""
        limit = self.plan.total_steps
        if limit is not None and self.step >= limit:
            raise Stopped(f"the client's plan ends after {limit} steps: the judge needs more")
        assert self.head is not None
        roster = tuple(roster or range(self.setting.workers))
        rank = roster.index(self._id)
        batch = next_batch(self.cursor, self.plan.global_batch, self.plan.dataset_size)
        share = share_of(batch, rank, len(roster))
        positions: tuple[PositionRange, ...] = () if empty else (share if len(share) else batch,)
        current = Round(
            key=self.new_key(),
            parent=parent or self.head,
            roster=roster,
            rank=rank,
            step=self.step + 1,
            cursor=after(self.cursor, batch, self.plan.dataset_size),
            positions=positions,
            batch=batch,
            began=self.transcript.now,
        )
        self.train.send(pb.TrainResponse(shard_assignment=_assignment(current, self.cursor)))
        return current

    async def gives(self, current: Round, *, count: int | None = None) -> None:
        """Waits until the client gave `count` chunks of a round (None: all), or abstained."""
        wanted = len(self.chunks()) if count is None else count

        def complete(event: Event) -> bool:
            match event.kind:
                case "block_gradient" if _may_be_of(current, event.message):
                    current.given.append(Given(event.stream, event.message))
                case "abstain":
                    current.abstained.append((event.stream, event.message))
            places = {(each.message.block, each.message.offset) for each in current.given}
            return bool(len(places) >= wanted or current.abstained)

        current.given.clear()
        current.abstained.clear()
        what = f"the client's {wanted} chunks of step {current.step}"
        try:
            await self.transcript.wait(what, complete, current.began)
        except Overdue as overdue:
            raise Overdue(f"{overdue} ({len(current.given)} chunks came)") from None

    def answers(
        self, current: Round, make: Callable[[Chunk], reducer_pb2.AveragedBlock] | None = None
    ) -> list[tuple[Stream, reducer_pb2.ReduceResponse]]:
        """The averages of a round in the layout's order, each with the stream that it goes to.

        `make` makes a chunk's average; by default it is the mean.
        """
        make = make or self.averages(current).true
        answers = []
        for chunk in self.chunks():
            given = current.of(chunk)
            stream = given.stream if given is not None else current.abstained[0][0]
            answers.append((stream, reducer_pb2.ReduceResponse(averaged_block=make(chunk))))
        return answers

    def averages(self, current: Round) -> Averages:
        """What makes a round's averages."""
        return Averages(self.layout, self.setting.policy, current)

    def average(
        self, current: Round, make: Callable[[Chunk], reducer_pb2.AveragedBlock] | None = None
    ) -> None:
        """Sends all averages of a round."""
        for stream, answer in self.answers(current, make):
            stream.send(answer)

    async def ready(self, current: Round) -> pb.StepReady:
        """Waits for StepReady of a round."""
        event = await self.transcript.wait(
            f"StepReady of step {current.step}", self.of_round("step_ready", current), current.began
        )
        ready: pb.StepReady = event.message
        return ready

    def commit(self, current: Round, stop_reason: str = "") -> Record:
        """Makes a round's record, and sends it; the record."""
        record = self.record_of(current)
        self.tell_record(record, stop_reason)
        return record

    def record_of(self, current: Round) -> Record:
        """The record that a round may become."""
        return Record(
            current.key,
            current.parent,
            RecordKind.STEP,
            current.step,
            current.cursor,
            current.roster,
        )

    def void(self, current: Round) -> None:
        """Says that a round is void."""
        voided = pb.RoundVoided(key=wire.key_to_proto(current.key), message="the judge voids it")
        self.train.send(pb.TrainResponse(round_voided=voided))

    async def steps(self, count: int = 1) -> None:
        """Takes whole steps of made-up averages, up to their commit."""
        for _ in range(count):
            _, current = await self.averaged()
            self.commit(current)

    async def averaged(
        self, make: Callable[[Round, Chunk], reducer_pb2.AveragedBlock] | None = None
    ) -> tuple[pb.StepReady, Round]:
        """Takes a step up to the client's StepReady; made-up averages unless `make` makes them."""
        await self.asks()
        current = self.assign()
        await self.gives(current)
        maker = self.averages(current)
        self.average(
            current,
            lambda chunk: (
                maker.made(chunk, steady(chunk)) if make is None else make(current, chunk)
            ),
        )
        return await self.ready(current), current

    # ------------------------------------------------------------------ losses and transfers

    def cut(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """Ends the Train stream."""
        self.train.end(code, "the judge cuts the stream")

    async def gives_up(self, current: Round) -> str:
        """Waits until the client says that a round can't be: by Fault, or by joining again.

        It is in sync then, and the round void. Returns what it did.
        """
        event = await self.transcript.wait(
            f"Fault of step {current.step}, or the end of the stream",
            lambda event: (
                self.of_round("fault", current)(event)
                or (event.kind == ENDED and event.stream is self._train)
            ),
            current.began,
        )
        if event.kind == ENDED:
            await self.joins()
            self.accept(pb.STANDING_IN_SYNC)
            return "it joined again"
        self.void(current)
        return f"it sent Fault {pb.FaultKind.Name(event.message.kind)}"

    def transfer(self, number: int, role: pb.TransferRole, head: Key | None = None) -> int:
        """Asks for a state transfer; the place in the transcript."""
        place = self.transcript.now
        asked = pb.StateTransfer(
            transfer_id=number,
            head=wire.key_to_proto(head or self.head),
            role=role,
            peer=0 if self._id else 1,
            step=self.step,
            cursor=wire.cursor_to_proto(self.cursor),
        )
        self.train.send(pb.TrainResponse(state_transfer=asked))
        return place

    async def state_call(self, method: str, since: int) -> Event:
        """Waits for the first message of a PutState or GetState call."""
        kind = {PUT: "put_state", GET: "get_state"}[method]
        return await self.transcript.wait(method, lambda event: event.kind == kind, since)

    async def reports(self, number: int, since: int) -> pb.StateReport:
        """Waits for the StateReport of a transfer."""
        event = await self.transcript.wait(
            f"StateReport of transfer {number}",
            lambda event: (
                self.on_train("state_report")(event) and event.message.transfer_id == number
            ),
            since,
        )
        report: pb.StateReport = event.message
        return report

    # ------------------------------------------------------------------ tests of events

    def on_train(self, kind: str) -> Callable[[Event], bool]:
        """Whether an event is a message of a case on the present Train stream."""
        return lambda event: event.kind == kind and event.stream is self._train

    def of_round(self, kind: str, current: Round) -> Callable[[Event], bool]:
        """Whether an event is a message up the Train stream that names a round."""
        return lambda event: (
            event.kind == kind and wire.optional_key_from_proto(event.message.key) == current.key
        )

    def reduce_streams(self, since: int = 0) -> list[Stream]:
        """Streams to the reducer that were opened from a place on."""
        return [event.stream for event in self.transcript.find(_is(OPENED, REDUCE), since)]

    @property
    def _id(self) -> int:
        return self.setting.slot


def _is(kind: str, method: str) -> Callable[[Event], bool]:
    return lambda event: event.kind == kind and event.stream.method == method


def _may_be_of(current: Round, message: BlockGradient) -> bool:
    """Whether a contribution is of a round: that its key is right is for one check to find."""
    late = message.key.term == current.key.term and message.key < current.key
    return not late or message.key == current.parent


def _assignment(current: Round, cursor: Cursor) -> pb.ShardAssignment:
    return pb.ShardAssignment(
        key=wire.key_to_proto(current.key),
        parent=wire.key_to_proto(current.parent),
        roster=current.roster,
        rank=current.rank,
        world_size=current.world_size,
        step=current.step,
        epoch=cursor.epoch,
        positions=[wire.range_to_proto(part) for part in current.positions],
        batch=wire.range_to_proto(current.batch),
    )
