"""A line's port without sockets: bytes in, through translation, core and journal, and bytes out.

Everything is the service's own code except gRPC, threads and clocks. Whatever raises, raises in the
test.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, get_args

from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from andon.protocol.halts import HaltAnswer
from andon.protocol.records import make_term
from andon.protocol.run_settings import Policy, RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2
from andon.wire import conversion, layouts
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.telemetry import LineMetrics, Totals
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.incoming import event_from, is_slow_to_read, join_from
from andon_coordinator.transport.journal import JournalEffect
from andon_coordinator.transport.outgoing import (
    JoinAnswers,
    MessageEffect,
    ServicePlaces,
    heartbeat_answer_to,
    message_to,
    status_to,
)
from andon_coordinator.transport.store import JournalStore
from scenarios.line_bench import LAYOUT

__all__ = ["PLAN", "RUN", "Healthy", "Port", "held_bytes", "let_work"]

RUN = "sim"
PLAN = RunPlan(global_batch=4, dataset_size=10, seed=3)

_SAVES = get_args(JournalEffect)
_SENDS = get_args(MessageEffect)
_FOR_PEOPLE = (
    do.RefuseOperator,
    do.NoteCaughtUp,
    do.NoteSetback,
    do.NoteSlow,
    do.NoteSlowness,
    do.NoteWriter,
    do.NoteNotice,
    do.NoteSchedule,
    do.NoteFewGrains,
    do.NoteArithmetic,
    do.NoteCheckpoint,
    do.NoteOverdue,
    do.NoteScalarsRefused,
    do.NoteStopRefused,
    do.NoteWentBack,
)
_BORN_UNIX_S = 1_700_000_000.0
_MOST_TURNS = 200


class Port:
    """One coordinator and its connections."""

    def __init__(self, workers: int = 2, plan: RunPlan = PLAN) -> None:
        self.plan = plan
        self.settings = LineSettings(
            run_id=RUN,
            expect_workers=workers,
            min_workers=1,
            max_workers=workers + 1,
            policy=Policy(digest_every=2),
        )
        self.now = 0.0
        self.said: dict[int, deque[pb.TrainResponse]] = {}
        """What each open stream was told and did not read."""
        self._folder = TemporaryDirectory()
        self._store: JournalStore | None = None
        self._streams = 0
        self.start()

    def start(self) -> None:
        """A coordinator begins on the journal, as after a crash: every stream is gone."""
        self.said.clear()
        if self._store is not None:
            self._store.close()
        path = Path(self._folder.name) / "journal.sqlite"
        self._store = JournalStore(path, RUN, sync="normal", clock=self._wall)
        history = self._store.past.history()
        term = make_term(history.greatest_term, self._wall(), 7)
        self._store.begin_term(term)
        self._store.past.counts()
        self._metrics = LineMetrics(CollectorRegistry(), Totals())
        self.line = LineCore(self.settings, term=term, history=history, random_bits=lambda: 7)
        self._answers = JoinAnswers(
            run_id=RUN,
            secret=b"secret",
            policy=self.settings.policy,
            liveness=self.settings.liveness,
        )

    def close(self) -> None:
        """Closes the journal and throws it away."""
        assert self._store is not None
        self._store.close()
        self._folder.cleanup()

    @property
    def core(self) -> Any:
        """The core's state."""
        return self.line._core

    def join(self, data: bytes) -> int:
        """Opens a stream with its first message; its number. It may be over at once."""
        self._streams += 1
        stream = self._streams
        self.said[stream] = deque()
        try:
            message = pb.TrainRequest.FromString(data)
            is_slow_to_read(message)
            request = join_from(message)
        except (DecodeError, LineError) as error:
            self._refuse(stream, error)
        else:
            self.tell(on.WorkerJoined(stream, request))
        return stream

    def hear(self, stream: int, data: bytes) -> None:
        """A later message of a stream, unless that is over."""
        if stream not in self.said:
            return
        try:
            event = event_from(stream, pb.TrainRequest.FromString(data))
        except (DecodeError, LineError) as error:
            self._refuse(stream, error)
            self.tell(on.WorkerStreamEnded(stream))
        else:
            self.tell(event)

    def end(self, stream: int, *, gone: bool = True) -> None:
        """A stream ends at its other end."""
        if self.said.pop(stream, None) is not None:
            self.tell(on.WorkerStreamEnded(stream, gone))

    def tell(self, event: on.Event) -> None:
        """The core takes an event; all that follows is done, the journal's part included."""
        pending = deque([event])
        while pending:
            event = pending.popleft()
            effects = self.line.receive(event, self.now, wall=self._wall())
            for effect in effects:
                pending += self._done(effect)
            self._metrics.observe(event, effects, self.now)
        status = self.line.status(self.now)
        self._metrics.tick(status)
        status_to(status, ServicePlaces()).SerializeToString()

    def _done(self, effect: do.Effect) -> list[on.Event]:
        if isinstance(effect, _SAVES):
            return self._saved(effect)
        if isinstance(effect, _FOR_PEOPLE):
            return []  # It only goes to the log and the metrics.
        stream = getattr(effect, "stream", 0)
        match effect:
            case do.RefuseJoin():
                self._refuse(stream, LineError.of(effect.refusal))
            case do.CloseStream():
                if self.said.pop(stream, None) is not None:
                    return [on.WorkerStreamEnded(stream)]
            case do.AcceptJoin():
                self._send(stream, self._answers.accepted(effect, self.core.keys.term))
            case do.Assign():
                self._send(stream, self._answers.assignment(effect))
            case do.SendHeartbeatAnswer():
                self._send(stream, heartbeat_answer_to(effect, self._wall()))
            case _:
                assert isinstance(effect, _SENDS)
                self._send(stream, message_to(effect))
        return []

    def _saved(self, effect: JournalEffect) -> list[on.Event]:
        assert self._store is not None
        match effect:
            case do.SaveTerm(term):
                self._store.begin_term(term)
                return [on.TermSaved(term)]
            case do.SaveRecord():
                self._store.save_record(effect)
                return [on.RecordSaved(effect.record.key)]
            case do.SaveRun():
                self._store.save_run(effect)
            case do.SaveHalt():
                self._store.save_halt(effect)
            case do.SaveAnswer():
                self._store.save_answer(effect)
            case do.SaveDeparture():
                self._store.save_departure(effect)
            case do.FindAncestor(heads):
                return [on.AncestorFound(heads, self._store.past.find_ancestor(heads))]
            case do.SaveSteered():
                self._store.save_steered(effect)
            case do.SaveScalars():
                self._store.save_scalars(effect)
                return [on.ScalarsSaved(effect.stream, effect.sequence)]
        return []

    def _send(self, stream: int, message: pb.TrainResponse) -> None:
        data = message.SerializeToString()
        if stream in self.said:
            self.said[stream].append(pb.TrainResponse.FromString(data))

    def _refuse(self, stream: int, error: DecodeError | LineError) -> None:
        if isinstance(error, LineError):
            assert error.status.trailing_metadata
        self.said.pop(stream, None)

    def _wall(self) -> float:
        return _BORN_UNIX_S + self.now


class Healthy:
    """A worker that keeps every rule, and gets all averages and state that it should."""

    def __init__(self, port: Port, slot: int) -> None:
        self._port = port
        self._slot = slot
        self._join = pb.Join(
            run_id=RUN,
            incarnation=slot + 1,
            launch_slot=slot,
            protocol_version=1,
            layout=layouts.layout_to_proto(LAYOUT),
            plan=conversion.plan_to_proto(port.plan),
        )
        self.stream = 0
        self.steps = 0
        """Steps that it applied."""
        self.over = False

    def turn(self) -> bool:
        """Joins, or reads all that it was told and does it; whether there was anything to do."""
        if self.over:
            return False
        said = self._port.said.get(self.stream)
        if said is None:
            self.stream = self._port.join(pb.TrainRequest(join=self._join).SerializeToString())
            return self.stream in self._port.said  # else it was refused, and comes again later
        if not said:
            return False
        self._obey(said.popleft())
        return True

    def _obey(self, message: pb.TrainResponse) -> None:
        match message.WhichOneof("message"):
            case "join_accepted":
                accepted = message.join_accepted
                self._join.greatest_term = max(self._join.greatest_term, accepted.term)
                self._join.ClearField("held_key")
                self._join.ClearField("halt")
                if accepted.HasField("halt"):
                    self._join.halt.CopyFrom(accepted.halt)
                if accepted.join_status == pb.JOIN_STATUS_IN_SYNC:
                    self._ask()
            case "shard_assignment":
                self._work(message.shard_assignment)
            case "step_committed":
                self._apply(message.step_committed)
            case "state_transfer":
                self._transfer(message.state_transfer)
            case "halt":
                self._join.halt.CopyFrom(message.halt.evidence)
            case "resume":
                self._join.ClearField("halt")
            case "shutdown":
                self._leave()

    def _ask(self) -> None:
        self._say(request_work=pb.RequestWork(head=self._join.head))

    def _work(self, work: pb.ShardAssignment) -> None:
        assert work.parent == self._join.head, "a worker is assigned only work that it can apply"
        self._join.held_key.CopyFrom(work.key)
        samples = sum(part.stop - part.start for part in work.positions)
        self._say(
            step_ready=pb.StepReady(
                key=work.key,
                loss_sum=samples,
                weight=samples,
                samples=samples,
                total_weight=work.batch.stop - work.batch.start,
                world_size=work.world_size,
            )
        )

    def _apply(self, committed: pb.StepCommitted) -> None:
        record = committed.record
        self._stand(record.key, record.step, record.cursor)
        self.steps += record.kind == record_pb2.RECORD_KIND_STEP
        if committed.stop_reason:
            self._leave()
        else:
            self._ask()

    def _transfer(self, transfer: pb.StateTransfer) -> None:
        if transfer.role == pb.TRANSFER_ROLE_SEND:
            self._report(transfer, "" if transfer.head == self._join.head else "another head")
        else:
            self._stand(transfer.head, transfer.step, transfer.cursor)
            self._report(transfer, "")
            self._ask()

    def _report(self, transfer: pb.StateTransfer, failure: str) -> None:
        self._say(
            state_report=pb.StateReport(
                transfer_id=transfer.transfer_id, head=self._join.head, failure=failure
            )
        )

    def _stand(self, head: Any, step: int, cursor: Any) -> None:
        self._join.head.CopyFrom(head)
        self._join.cursor.CopyFrom(cursor)
        self._join.step = step
        self._join.ClearField("held_key")

    def _leave(self) -> None:
        self._say(leave=pb.Leave(reason=pb.LEAVE_REASON_COMPLETE, final_step=self._join.step))
        self._port.end(self.stream, gone=False)
        self.over = True

    def _say(self, **case: Any) -> None:
        self._port.hear(self.stream, pb.TrainRequest(**case).SerializeToString())


def let_work(port: Port, workers: list[Healthy], steps: int = 1) -> None:
    """Healthy workers do what they are told until each applied so many steps, or can do no more;
    a halt is answered."""
    wanted = [worker.steps + steps for worker in workers]
    for _ in range(_MOST_TURNS):
        busy = False
        for worker, most in zip(workers, wanted, strict=True):
            busy |= worker.steps < most and worker.turn()
        if all(each.steps >= most for each, most in zip(workers, wanted, strict=True)):
            return
        if not busy:
            halt = port.core.halt
            if halt is not None:
                port.tell(on.HaltCleared(halt.id, HaltAnswer.RETRY))
            port.now += 1.0
            port.tell(on.TimePassed())


def held_bytes(*roots: object) -> int:
    """What can be reached from objects, in bytes; classes and functions are everybody's."""
    seen: set[int] = set()
    todo: list[object] = list(roots)
    total = 0
    while todo:
        each = todo.pop()
        shared = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
        if id(each) in seen or isinstance(each, shared):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        todo += gc.get_referents(each)
    return total
