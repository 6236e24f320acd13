"""Control: what a coordinator does with one client, but for its steps, move by move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from andon.protocol import tokens
from andon.protocol.layout import Layout
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.reducers import ReducerShare, partition
from andon.protocol.run_settings import Policy, RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2
from andon.wire import conversion
from andon_conformance.judge.checks import Stopped
from andon_conformance.judge.client import Running
from andon_conformance.judge.layouts import layout_of
from andon_conformance.judge.rounds import FLOAT32
from andon_conformance.judge.server import GET, PUT, TRAIN, ScriptedServer
from andon_conformance.judge.streams import ClientCall
from andon_conformance.judge.transcript import OPENED, Event, Transcript

__all__ = ["LineSetting", "ScriptedCoordinator", "opened"]

_SECRET = b"the judge's session secret"


@dataclass(frozen=True, kw_only=True)
class LineSetting:
    """What a line is like."""

    slot: int = 1
    """The client's launch slot, and its id."""
    workers: int = 2
    policy: Policy = FLOAT32
    lease_s: float = 0.9
    reducers: int = 1
    """How many there are, the coordinator's own among them."""
    token: bytes = b""
    """What is in the token's file; empty: there is none."""


@dataclass
class ScriptedCoordinator:
    """The control plane of a line with one client on it.

    Moves raise `Overdue` if the client does not do its part.
    """

    setting: LineSetting
    transcript: Transcript
    servers: tuple[ScriptedServer, ...]
    """The coordinator's with its reducer, then other reducers."""
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
    _train: ClientCall | None = None
    joined_at: int = 0
    """The place in the transcript where the client's present Train stream began."""
    _joins: int = 0
    _asked: pb.RequestWork | None = None
    """The client's request, while it is good."""
    _asks_from: int = 0

    # ------------------------------------------------------------------ what there is

    @property
    def train(self) -> ClientCall:
        """The client's present Train stream."""
        assert self._train is not None, "no client joined"
        return self._train

    @property
    def session_token(self) -> bytes:
        """What opens this client's streams to the reducer, from its present Join on."""
        return tokens.session_token(
            _SECRET, self.run_id, self.setting.slot, (self.term, self._joins)
        )

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
    def shares(self) -> tuple[ReducerShare, ...]:
        """Who averages what."""
        addresses = ["", *(server.address for server in self.servers[1:])]
        return partition(self.layout, self.setting.policy.chunk_elements, addresses)

    @property
    def plan(self) -> RunPlan:
        """The client's plan."""
        try:
            return conversion.plan_from_proto(self.join.plan)
        except conversion.WireError as error:
            raise Stopped(f"the client's plan can't be: {error}") from None

    @property
    def peer(self) -> int:
        """The id of another worker."""
        return 0 if self._id else 1

    def new_key(self) -> Key:
        """A key that was never used."""
        self._round += 1
        return Key(self.term, self._round)

    # ------------------------------------------------------------------ joining

    async def joins(self, *, patience_s: float | None = None) -> pb.Join:
        """Waits for the client's next Join, on a new stream."""
        beginning = await self.transcript.wait(
            "a Train stream", opened(TRAIN), self.joined_at, patience_s=patience_s
        )
        self.joined_at = self.transcript.events.index(beginning) + 1
        self._joins += 1
        self._train = beginning.stream
        self._asked, self._asks_from = None, self.joined_at
        event = await self.transcript.wait("Join", self.on_train("join"))
        self.join = event.message
        return self.join

    def accept(
        self,
        join_status: pb.JoinStatus,
        head: Key | None = None,
        halt: halt_pb2.HaltEvidence | None = None,
    ) -> None:
        """Answers Join.

        `head` is said to be the line's, if it is not the one that it has; `halt` is one that the
        line stands in.
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

    async def founded(self) -> None:
        """Takes a fresh client's Join, and makes its weights the line's."""
        await self.joins()
        self.accept(pb.JOIN_STATUS_FRESH)
        self.found()

    def found(self) -> None:
        """Says that the client's weights are the line's."""
        self.tell_record(self.initial_record_of(self._id))

    def initial_record_of(self, worker: int) -> Record:
        """The record that would make a worker's weights the line's."""
        return Record(self.new_key(), None, RecordKind.INITIAL, 0, Cursor(0, 0), (worker,))

    def tell_record(self, record: Record, stop_reason: str = "", loss: float = 1.0) -> None:
        """Makes a record the line's head, and sends it."""
        self.head, self.step, self.cursor = record.key, record.step, record.cursor
        if record.kind is not RecordKind.MARK:
            self._asked = None
        committed = pb.StepCommitted(
            record=conversion.record_to_proto(record),
            loss=loss,
            samples=len(record.roster),
            contributors=len(record.roster),
            stop_reason=stop_reason,
        )
        self.train.send(pb.TrainResponse(step_committed=committed))

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
        return asks and conversion.optional_key_from_proto(event.message.head) == self.head

    # ------------------------------------------------------------------ losses and transfers

    def cut(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """Ends the Train stream."""
        self.train.end(code, "the judge cuts the stream")

    def transfer(self, number: int, role: pb.TransferRole, head: Key | None = None) -> int:
        """Asks for a state transfer; the place in the transcript."""
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
        """Whether an event is a message of a case on the present Train stream."""
        return lambda event: event.kind == kind and event.stream is self._train

    @property
    def _id(self) -> int:
        return self.setting.slot


def opened(method: str) -> Callable[[Event], bool]:
    """Whether an event is the beginning of a stream."""
    return lambda event: event.kind == OPENED and event.stream.method == method
