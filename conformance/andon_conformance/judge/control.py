"""The control plane, scripted: what a coordinator does with one client, except for its steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from andon.protocol import tokens
from andon.protocol.layout import Block, BlockKind, Component, DType, Layout
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.reducers import ReducerShare, partition
from andon.protocol.run_settings import Policy, RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2, layout_pb2
from andon.wire import conversion
from andon_conformance.judge.checks import Stopped, Verdicts
from andon_conformance.judge.client import Running
from andon_conformance.judge.lanes import LaneScript
from andon_conformance.judge.rounds import FLOAT32
from andon_conformance.judge.server import GET, PUT, TRAIN, ScriptedServer
from andon_conformance.judge.streams import ClientCall
from andon_conformance.judge.transcript import OPENED, Event, Transcript

__all__ = ["LineSetting", "ScriptedCoordinator", "layout_of", "opened"]

_T = TypeVar("_T")
_SECRET = b"the judge's session secret"


@dataclass(frozen=True, kw_only=True)
class LineSetting:
    """The settings of a scripted line."""

    slot: int = 1
    """The client's launch slot, and its id."""
    workers: int = 2
    policy: Policy = FLOAT32
    lease_s: float = 0.9
    reducers: int = 1
    """How many reducers, including the coordinator's own."""
    token: bytes = b""
    """The run's token; empty: the line asks for none."""
    lanes: LaneScript = "none"
    """Whether the reducers offer TCP lanes."""
    same_bits: bool = False
    """Whether the client's environment asks it for grains."""
    checksums: bool = False
    """Whether the reducers answer `crc32c.v1`. The script then adds the checksums."""


@dataclass
class ScriptedCoordinator:
    """The control plane of a line with one client.

    Methods that wait raise `Overdue` if the client does not do its part in time.
    """

    setting: LineSetting
    verdicts: Verdicts
    """Of the scenario."""
    transcript: Transcript
    servers: tuple[ScriptedServer, ...]
    """First the coordinator's, which also serves a reducer; then further reducers."""
    client: Running
    run_id: str
    term: int
    start_s: float = 0.0
    """How long the client may take for its first Join, if that is more than for others."""
    head: Key | None = None
    """The line's head."""
    step: int = 0
    cursor: Cursor = field(default_factory=lambda: Cursor(0, 0))
    join: pb.Join = field(default_factory=pb.Join)
    """The client's last Join."""
    _round: int = 0
    _train: ClientCall | None = None
    joined_at: int = 0
    """Where in the transcript the client's current Train stream began."""
    _joins: int = 0
    _asked: pb.RequestWork | None = None
    """The client's request for work, while it is valid."""
    _asks_from: int = 0

    # ------------------------------------------------------------------ state

    @property
    def train(self) -> ClientCall:
        """The client's current Train stream."""
        assert self._train is not None, "no client joined"
        return self._train

    @property
    def session_token(self) -> bytes:
        """The token that opens the client's reducer streams, from its current Join on."""
        return tokens.session_token(
            _SECRET, self.run_id, self.setting.slot, (self.term, self._joins)
        )

    @property
    def layout(self) -> Layout:
        """The client's layout. Its digest may be wrong: only one check is about that.

        Raises:
            Stopped: the message is not a valid layout.
        """
        try:
            return layout_of(self.join.layout)
        except ValueError as error:
            raise Stopped(f"the client's layout is invalid: {error}") from None

    @property
    def shares(self) -> tuple[ReducerShare, ...]:
        """Which reducer averages which elements."""
        addresses = ["", *(server.address for server in self.servers[1:])]
        return partition(self.layout, self.setting.policy.chunk_elements, addresses)

    @property
    def plan(self) -> RunPlan:
        """The client's plan."""
        try:
            return conversion.plan_from_proto(self.join.plan)
        except conversion.WireError as error:
            raise Stopped(f"the client's plan is invalid: {error}") from None

    @property
    def peer(self) -> int:
        """The id of another worker."""
        return 0 if self._id else 1

    def new_key(self) -> Key:
        """A key that was never used."""
        self._round += 1
        return Key(self.term, self._round)

    # ------------------------------------------------------------------ verdicts

    def judge(self, name: str, fact: object, evidence: str) -> bool:
        """See `Verdicts.judge`."""
        return self.verdicts.judge(name, fact, evidence)

    async def must(self, name: str, what: Awaitable[_T]) -> _T:
        """See `Verdicts.must`."""
        return await self.verdicts.must(name, what)

    # ------------------------------------------------------------------ joining

    async def joins(self, *, patience_s: float | None = None) -> pb.Join:
        """Waits for the client's next Join, on a new stream."""
        if patience_s is None and not self._joins:
            patience_s = max(self.start_s, self.transcript.patience_s)
        beginning = await self.transcript.wait(
            "a Train stream", opened(TRAIN), self.joined_at, patience_s=patience_s
        )
        # Everything before this place is of an older stream, and proves nothing about this one.
        self.joined_at = self.transcript.events.index(beginning) + 1
        self._joins += 1
        self._train = beginning.stream
        # A request for work ends with its stream.
        self._asked, self._asks_from = None, self.joined_at
        event = await self.transcript.wait("Join", self.on_train("join"), patience_s=patience_s)
        self.join = event.message
        return self.join

    def accept(
        self,
        join_status: pb.JoinStatus,
        head: Key | None = None,
        halt: halt_pb2.HaltEvidence | None = None,
    ) -> None:
        """Answers Join.

        Args:
            join_status: where the client is, relative to the line.
            head: sent in place of the line's own head.
            halt: the halt that the line is in, if any.
        """
        welcome = self.welcome(join_status, head)
        if halt is not None:
            welcome.halt.CopyFrom(halt)
        self.train.send(pb.TrainResponse(join_accepted=welcome))

    def welcome(self, join_status: pb.JoinStatus, head: Key | None = None) -> pb.JoinAccepted:
        """An answer to Join; see `accept`."""
        lease_s = self.setting.lease_s
        return pb.JoinAccepted(
            worker=self.setting.slot,
            session_token=self.session_token,
            reducers=conversion.shares_to_proto(self.shares),
            plan=conversion.plan_to_proto(self.plan),
            policy=conversion.policy_to_proto(self.setting.policy),
            liveness=pb.Liveness(
                lease_s=lease_s, heartbeat_s=lease_s / 3, reconnect_s=self.transcript.patience_s
            ),
            join_status=join_status,
            head=conversion.key_to_proto(head or self.head),
            step=self.step,
            term=self.term,
        )

    async def bootstrap(self) -> None:
        """Accepts a fresh client, and makes its weights the line's."""
        await self.joins()
        self.accept(pb.JOIN_STATUS_FRESH)
        self.send_initial_record()

    def send_initial_record(self) -> None:
        """Makes the client's weights the line's."""
        self.tell_record(self.initial_record_of(self._id))

    def initial_record_of(self, worker: int) -> Record:
        """The INITIAL record that makes a worker's weights the line's."""
        return Record(self.new_key(), None, RecordKind.INITIAL, 0, Cursor(0, 0), (worker,))

    def tell_record(
        self, record: Record, stop_reason: str = "", loss: float = 1.0, *, overflow: bool = False
    ) -> None:
        """Makes a record the line's head, and sends it."""
        self.head, self.step, self.cursor = record.key, record.step, record.cursor
        # A MARK moves the head, and earlier requests for work stay valid.
        if record.kind is not RecordKind.MARK:
            self._asked = None
        committed = pb.StepCommitted(
            record=conversion.record_to_proto(record),
            loss=loss,
            samples=len(record.roster),
            contributors=len(record.roster),
            stop_reason=stop_reason,
            overflow=overflow,
        )
        self.train.send(pb.TrainResponse(step_committed=committed))

    async def asks(self) -> pb.RequestWork:
        """Waits until the client has asked for work from the line's head.

        A request stays valid until a step is committed or the stream ends: after a void round the
        client need not ask again.
        """
        if self._asked is None:
            event = await self.transcript.wait(
                f"RequestWork from head {self.head}", self._asks_now, self._asks_from
            )
            # Each request is used once.
            self._asks_from = self.transcript.events.index(event) + 1
            self._asked = event.message
        assert self._asked is not None
        return self._asked

    def _asks_now(self, event: Event) -> bool:
        asks = self.on_train("request_work")(event)
        return asks and conversion.optional_key_from_proto(event.message.head) == self.head

    # ------------------------------------------------------------------ losses and transfers

    def end_train(self) -> None:
        """Ends the Train stream."""
        self.train.end(grpc.StatusCode.UNAVAILABLE, "the judge ends the stream")

    async def joins_again(self) -> pb.Join:
        """Ends the Train stream, and waits for the client's next Join."""
        self.end_train()
        return await self.joins()

    def transfer(self, number: int, role: pb.TransferRole, head: Key | None = None) -> int:
        """Asks for a state transfer; returns the current place in the transcript."""
        place = self.transcript.now
        asked = pb.StateTransfer(
            transfer_id=number,
            head=conversion.key_to_proto(head or self.head),
            role=role,
            peer=self.peer,
            step=self.step,
            cursor=conversion.cursor_to_proto(self.cursor),
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

    def on_train(self, kind: str) -> Callable[[Event], bool]:
        """Tests for a message of this case on the current Train stream."""
        return lambda event: event.kind == kind and event.stream is self._train

    @property
    def _id(self) -> int:
        return self.setting.slot


def opened(method: str) -> Callable[[Event], bool]:
    """Tests for the beginning of a stream of this method."""
    return lambda event: event.kind == OPENED and event.stream.method == method


def layout_of(message: layout_pb2.Layout) -> Layout:
    """The layout in a message, whether or not the message's digest is right.

    Raises:
        ValueError: it has no blocks, a name is empty, used twice or more than one line, or a kind
            or dtype is unknown.
    """
    if not message.blocks:
        raise ValueError("it has no blocks")
    return Layout(
        tuple(
            Block(
                BlockKind(block.kind),
                block.name,
                tuple(
                    Component(part.name, tuple(part.shape), DType(part.dtype))
                    for part in block.components
                ),
            )
            for block in message.blocks
        )
    )
