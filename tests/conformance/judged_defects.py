"""Defects: each changes one behaviour of the real worker and names the check that must find it.

A defect patches classes of its own process, which is forked only for it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from andon.protocol.encoding import Encoding
from andon.protocol.messages import AveragedBlock, RoundAborted, StaleRound
from andon.protocol.records import Key, Record, RecordKind
from andon.protocol.shards import deal
from andon.tcp import connecting
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import layout_pb2, reducer_pb2
from andon.wire import checksums, frames
from andon.wire.conversion import WireError
from andon.wire.frames import FrameError, parse_response
from andon_trainer.core import values
from andon_trainer.core.effects import ReportFault
from andon_trainer.core.events import Voided
from andon_trainer.core.reports import Joined, Joining
from andon_trainer.core.worker_state import RoundPhase, WorkerState
from andon_trainer.exchange.collector import Collector
from andon_trainer.exchange.control import connection, control
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.control.heartbeats import Heartbeats
from andon_trainer.exchange.control.transfer import PartialState
from andon_trainer.exchange.star import parts, reducer_path, star
from andon_trainer.exchange.star.bulk_stream import BulkStream
from andon_trainer.exchange.star.tcp import WorkerLanes
from andon_trainer.place.driver import Driver
from chaos.model import LineState
from chaos.worker import Worker
from conformance.breaking import put, wrap

__all__ = ["DEFECTS", "Defect"]


@dataclass(frozen=True)
class Defect:
    """One wrong behaviour."""

    found_by: str
    """The one check that must fail."""
    build: Callable[[], None]
    may_fail: tuple[str, ...] = ()
    """Other checks, or scenarios, that may also fail, because they see the same defect."""
    patience_s: float = 30.0
    """How long the judge waits: long enough for a busy machine, short if it waits in vain."""


DEFECTS: dict[str, Defect] = {}
"""The defects, by the argument of `judged_numpy.py`."""

_GRADIENT_TAG = 2 << 3 | 2
_NEVER_S = 6.0
_A_MOMENT_S = 0.005

_Right = Callable[..., Any]


def _defect(
    found_by: str, *may_fail: str, patience_s: float = Defect.patience_s
) -> Callable[[Callable[[], None]], None]:
    """Decorator: the function breaks a worker. The defect has its name, with hyphens."""

    def add(build: Callable[[], None]) -> None:
        name = build.__name__.replace("_", "-")
        DEFECTS[name] = Defect(found_by, build, may_fail, patience_s)

    return add


def _wrong(
    owner: Any, name: str, found_by: str, *may_fail: str, patience_s: float = Defect.patience_s
) -> Callable[[Callable[..., Any]], None]:
    """Decorator: the function is called in place of the owner's, which it gets first."""

    def add(wrong: Callable[..., Any]) -> None:
        build = wraps(wrong)(lambda: wrap(owner, name, wrong))
        _defect(found_by, *may_fail, patience_s=patience_s)(build)

    return add


# ---------------------------------------------------------------------- joins and control


@_wrong(control, "join_to", "join.layout-digest")
def turns_the_digest(right: _Right, joining: Joining) -> Any:
    join = right(joining)
    join.layout.digest = join.layout.digest[::-1]
    return join


@_wrong(control, "join_to", "rejoin.held")
def hides_what_is_held(right: _Right, joining: Joining) -> Any:
    join = right(joining)
    join.ClearField("held_key")
    return join


@_wrong(control, "join_to", "halt.reported")
def hides_halts(right: _Right, joining: Joining) -> Any:
    join = right(joining)
    join.ClearField("halt")
    return join


@_wrong(Heartbeats, "run", "join.heartbeat")
def is_silent(_: _Right, self: Heartbeats, every_s: float) -> None: ...


@_wrong(control, "refusal_from", "refusal.final")
def insists(_: _Right, error: Any) -> None: ...


def _heard(right: _Right, message: Any, fragments: int, ignored: str) -> Any:
    if message.WhichOneof("message") == ignored:
        return None
    return right(message, fragments=fragments)


@_wrong(control, "event_from", "halt.silence", "malformed.train")
def ignores_halts(right: _Right, message: Any, *, fragments: int) -> Any:
    return _heard(right, message, fragments, "halt")


@_wrong(control, "event_from", "shutdown.final")
def ignores_shutdown(right: _Right, message: Any, *, fragments: int) -> Any:
    return _heard(right, message, fragments, "shutdown")


@_wrong(control, "event_from", "malformed.train", patience_s=_NEVER_S)
def passes_over_what_cannot_be(right: _Right, message: pb.TrainResponse, *, fragments: int) -> Any:
    with suppress(WireError):
        return right(message, fragments=fragments)
    return None


@_wrong(control, "accepted_from", "malformed.join", patience_s=_NEVER_S)
def believes_any_welcome(right: _Right, response: pb.TrainResponse) -> Any:
    welcome = response.join_accepted
    try:
        return right(response)
    except WireError:
        welcome.policy.Clear()
        welcome.policy.encoding = layout_pb2.ENCODING_FLOAT32
        welcome.policy.chunk_elements = 3
        welcome.join_status = pb.JOIN_STATUS_BEHIND
        return right(response)


@_wrong(control, "accepted_from", "halt.joined")
def overlooks_halts(right: _Right, response: pb.TrainResponse) -> Any:
    """Ignores the halt in the answer to Join."""
    return replace(right(response), halt=None)


@_wrong(control.ControlStream, "join", "rejoin.other-head")
def believes_to_be_in_sync(right: _Right, self: Any, joining: Joining) -> Joined:
    joined: Joined = right(self, joining)
    return replace(joined, head=joining.head) if joined.in_sync else joined


@_wrong(Connection, "connect", "rejoin.incarnation")
def is_born_again(right: _Right, self: Connection, joining: Joining) -> Any:
    return right(self, replace(joining, incarnation=secrets.randbits(63) + 1))


@_defect("rejoin.streams", "receive", "halt", "bootstrap")
def keeps_its_streams() -> None:
    """Keeps the exchange and the session token of its first Join for the whole process."""
    first: list[bytes] = []

    def join(right: _Right, self: control.ControlStream, joining: Joining) -> Joined:
        joined: Joined = right(self, joining)
        first.append(joined.session_token)
        return replace(joined, session_token=first[0])

    def rejoin(right: _Right, self: Any) -> None:
        self.exchange.close = lambda: None
        right(self)
        del self.exchange.close

    wrap(control.ControlStream, "join", join)
    wrap(Driver, "_rejoin", rejoin)


@_wrong(control.ControlStream, "leave", "shutdown.leave", "leave", patience_s=_NEVER_S)
def leaves_in_silence(_: _Right, self: control.ControlStream, departure: Any) -> None: ...


@_wrong(control.ControlStream, "at_end", "receive.cancel", "bootstrap.cancel", patience_s=_NEVER_S)
def waits_for_its_state(_: _Right, self: control.ControlStream, transfer_id: int, act: Any) -> None:
    """A transfer continues after the control stream has ended."""


@_wrong(control, "ready_to", "step.loss")
def loses_nothing(right: _Right, report: Any) -> Any:
    return right(replace(report, loss_sum=0.0))


@_wrong(control, "ready_to", "shares.timings")
def counts_what_was_kept(right: _Right, report: Any) -> Any:
    """Reports the samples of its share, whether or not it computed them."""
    return right(replace(report, timings=replace(report.timings, computed=report.samples)))


# ---------------------------------------------------------------------- the core


@_defect("receive.corrupt")
def installs_anything() -> None:
    put(PartialState, "is_right", property(lambda self: True))


@_wrong(WorkerState, "take_work", "commit.strange-parent", patience_s=_NEVER_S)
def works_for_any_parent(right: _Right, self: WorkerState) -> Any:
    if self._waiting is not None:
        self._waiting = replace(self._waiting, parent=self.head)
    return right(self)


@_wrong(WorkerState, "_voided", "commit.other-void", patience_s=_NEVER_S)
def believes_any_void(right: _Right, self: WorkerState, event: Voided) -> Any:
    mine = self.assigned
    return right(self, event if mine is None else replace(event, key=mine.key))


@_wrong(WorkerState, "_applies", "bootstrap.other", patience_s=_NEVER_S)
def founds_by_anybody(right: _Right, self: WorkerState, record: Record) -> bool:
    return (record.kind is RecordKind.INITIAL and self.head is None) or right(self, record)


@_wrong(WorkerState, "installed", "receive.cursor", "rejoin.head")
def forgets_the_cursor(right: _Right, self: WorkerState, asked: Any) -> Any:
    return right(self, replace(asked, cursor=self.cursor))


@_wrong(WorkerState, "_failed", "faults.held")
def tells_too_late(_: _Right, self: WorkerState, event: Any) -> Any:
    mine = self.assigned is not None and event.key == self.assigned.key
    return [ReportFault(event)] if mine and self.phase is not RoundPhase.NONE else []


@_wrong(WorkerState, "_committed", "commit.overflow")
def overlooks_overflows(right: _Right, self: WorkerState, commit: Any) -> Any:
    return right(self, replace(commit, overflow=False))


# ---------------------------------------------------------------------- gradients and averages


@_wrong(BulkStream, "send", "step.once")
def sends_twice(right: _Right, self: BulkStream, frame: Callable[[], bytes]) -> None:
    right(self, frame)
    right(self, lambda: data if (data := frame())[0] == _GRADIENT_TAG else b"")


@_wrong(
    # After a void round, the previous round is that one, and nobody answers it.
    *(reducer_path, "_gradient", "step.key"),
    *("receive", "shares", "commit", "averages", "faults", "halt", "rejoin", "lanes.broken"),
)
def names_the_round_before(right: _Right, *arguments: Any) -> Any:
    message = right(*arguments)
    return replace(message, key=Key(message.key.term, message.key.round - 1))


@_wrong(
    *(Collector, "_average", "step.patience"),
    *("receive", "commit", "averages", "reducers.patience", "halt", "rejoin"),
)
def is_ready_at_once(
    right: _Right, self: Collector, message: AveragedBlock, current: Any, **more: Any
) -> None:
    current.missing = min(current.missing, message.count)
    right(self, message, current, **more)


@_wrong(Collector, "_average", "averages.weight")
def believes_any_weight(
    right: _Right, self: Collector, message: AveragedBlock, current: Any, **more: Any
) -> None:
    first = current.total_weight
    told = message if first is None else replace(message, total_weight=first)
    right(self, told, current, **more)


@_wrong(Collector, "receive", "faults.stale", patience_s=_NEVER_S)
def keeps_stale_rounds(right: _Right, self: Collector, message: Any, **more: Any) -> None:
    if not isinstance(message, StaleRound):
        right(self, message, **more)


@_wrong(Collector, "receive", "averages.key", patience_s=_NEVER_S)
def takes_any_key(right: _Right, self: Collector, message: Any, **more: Any) -> None:
    if isinstance(message, AveragedBlock) and self._open is not None:
        message = replace(message, key=self._open.key)
    right(self, message, **more)


@_wrong(Collector, "receive", "checksums.told")
def keeps_corrupt_to_itself(right: _Right, self: Collector, message: Any, **more: Any) -> None:
    if isinstance(message, RoundAborted):
        message = replace(message, corrupt=None)
    right(self, message, **more)


@_wrong(star.StarExchange, "end", "faults.stream", patience_s=_NEVER_S)
def stays_on_the_stream(_: _Right, self: Any) -> None:
    self._open = None
    self._collector.end()


@_wrong(parts, "chunks_by_address", "reducers.chunks")
def misses_a_reducer(right: _Right, *arguments: Any) -> Any:
    """Sends all chunks to the map's first reducer."""
    lanes = right(*arguments)
    first, *others = lanes
    merged = [sorted(itertools.chain(*each)) for each in zip(*lanes.values(), strict=True)]
    return {first: merged, **{other: [[] for _ in merged] for other in others}}


@_wrong(values, "encode", "strips.codes")
def scales_by_all_digits(
    right: _Right, numbers: Any, encoding: Encoding, *more: Any, **named: Any
) -> Any:
    """Leaves a scale with more digits than the 16 that it may have."""
    payload = bytearray(right(numbers, encoding, *more, **named))
    if encoding is Encoding.INT8_BLOCK:
        payload[0] |= 1
    return memoryview(payload)


# ---------------------------------------------------------------------- malformed answers


def _unread(data: bytes) -> reducer_pb2.ReduceResponse:
    """As much of an invalid response as can be read."""
    message = reducer_pb2.ReduceResponse()
    with suppress(DecodeError):
        message.ParseFromString(data)
    return message


def _corrected(
    right: _Right, data: bytes, change: Callable[[reducer_pb2.AveragedBlock], None]
) -> Any:
    """Changes an invalid response until it is valid."""
    try:
        return right(data)
    except FrameError as error:
        message = _unread(data)
        if not message.HasField("averaged_block"):
            raise
        try:
            change(message.averaged_block)
            return right(message.SerializeToString())
        except FrameError:
            raise error from None


@_wrong(reducer_path, "parse_response", "malformed.payload", "malformed.reduce")
def takes_any_length(right: _Right, data: bytes) -> Any:
    def change(average: reducer_pb2.AveragedBlock) -> None:
        average.payload = average.payload.ljust(4 * average.element_count, b"\0")
        average.payload = average.payload[: 4 * average.element_count]

    return _corrected(right, data, change)


@_wrong(reducer_path, "parse_response", "malformed.encoding", "malformed.reduce")
def takes_any_encoding(right: _Right, data: bytes) -> Any:
    def change(average: reducer_pb2.AveragedBlock) -> None:
        average.encoding = layout_pb2.ENCODING_FLOAT32

    return _corrected(right, data, change)


@_wrong(reducer_path.WireLane, "_read", "averages.unknown", "malformed")
def overlooks_the_unknown(right: _Right, self: Any, data: bytes) -> None:
    try:
        parse_response(data)
    except FrameError:
        return
    right(self, data)


@_wrong(
    *(reducer_path.WireLane, "_read", "malformed.reduce", "averages.unknown"), patience_s=_NEVER_S
)
def drops_what_it_cannot_read(right: _Right, self: Any, data: bytes) -> None:
    """Drops invalid messages, except those with a wrong length or encoding."""
    try:
        parse_response(data)
    except FrameError:
        if not _unread(data).averaged_block.HasField("key"):
            return
    right(self, data)


@_wrong(*(reducer_path.WireLane, "_refuse_small_payloads", "malformed.limit"), patience_s=_NEVER_S)
def overlooks_limits(_: _Right, self: Any, address: str, most: int) -> None: ...


# ---------------------------------------------------------------------- the worker's own steps


@_wrong(Worker, "_submit", "step.abstain", "reducers.abstain")
def sends_zeros(_: _Right, self: Worker, gradient: Any, samples: int, *__: Any) -> None:
    exchange: Any = self._member.exchange
    exchange._open.weight = float(samples or 1)
    for index, block in enumerate(self._task.split(gradient)):
        exchange.submit(index, block)


@_wrong(Worker, "_submit", "step.order")
def sends_backwards(_: _Right, self: Worker, gradient: Any, samples: int, *__: Any) -> None:
    if not samples:
        self._member.exchange.abstain()
        return
    for index, block in reversed(list(enumerate(self._task.split(gradient)))):
        self._member.exchange.submit(index, block)


@_defect("commit.patience", "receive.untouched", "halt", "rejoin")
def applies_at_once() -> None:
    def report(right: _Right, self: Worker, *arguments: Any) -> None:
        right(self, *arguments)
        mean = np.concatenate(self._member.exchange.averages)
        weights = self._task.moved(self._replica.state.weights, mean)
        self._replica.state = LineState(weights=weights)

    def apply(_: _Right, self: Worker, commit: Any, *__: Any) -> None:
        self._known = commit.record.key

    wrap(Worker, "_report", report)
    wrap(Worker, "_apply", apply)


@_defect("commit.void-averages", "averages", "rejoin")
def adds_up() -> None:
    """Keeps the averages of a void round, so that the next round's are added to them."""
    total: list[Any] = []

    def report(right: _Right, self: Worker, *arguments: Any) -> None:
        total.append(np.concatenate(self._member.exchange.averages))
        right(self, *arguments)

    def apply(
        right: _Right, self: Worker, commit: Any, assigned: Any, weight: float, _: Any
    ) -> None:
        right(self, commit, assigned, weight, sum(total))
        total.clear()

    wrap(Worker, "_report", report)
    wrap(Worker, "_apply", apply)


@_wrong(Worker, "_report", "shares.own-norm")
def reports_the_limited_norm(
    right: _Right, self: Worker, assigned: Any, own_norm: float, complete: Any
) -> None:
    limit = self._member.policy.max_grad_norm or own_norm
    right(self, assigned, min(own_norm, limit), complete)


@_wrong(Worker, "_limited", "shares.limit")
def has_no_limit(_: _Right, self: Worker, vector: Any, __: Any) -> Any:
    return vector


@_wrong(Worker, "_step", "step.wanted-digest")
def overlooks_wanted_digests(right: _Right, self: Worker, work: Any) -> Any:
    return right(self, replace(work, wants_digest=False))


@_wrong(Worker, "_step", "shares.pieces")
def takes_the_first_range(right: _Right, self: Worker, work: Any) -> Any:
    return right(self, replace(work, positions=work.positions[:1]))


@_wrong(Worker, "_step", "shares.uneven")
def takes_an_equal_share(right: _Right, self: Worker, work: Any) -> None:
    if work.positions == deal(work.batch, work.split, work.world_size)[work.rank]:
        equal = replace(work.split, targets=())
        work = replace(work, positions=deal(work.batch, equal, work.world_size)[work.rank])
    right(self, work)


# ---------------------------------------------------------------------- lanes and checksums


@_wrong(frames, "checksum_fields_of", "checksums.sent")
def seals_wrongly(right: _Right, message: Any, crc32c: int | None = None) -> Any:
    return right(message, 1 if crc32c is None else crc32c ^ 1)


@_wrong(checksums, "is_intact", "checksums.payload", patience_s=_NEVER_S)
def overlooks_changes(_: _Right, message: Any) -> bool:
    return message.crc32c is not None


@_wrong(checksums, "is_intact", "checksums.absent", patience_s=_NEVER_S)
def overlooks_absent_checksums(right: _Right, message: Any) -> Any:
    return message.crc32c is None or right(message)


@_wrong(frames, "require_header_intact", "checksums.header", patience_s=_NEVER_S)
def overlooks_headers(_: _Right, *__: Any) -> None: ...


@_wrong(connecting, "preamble", "lanes.proof")
def proves_another_worker(right: _Right, session: Any, *arguments: Any) -> Any:
    return right(replace(session, worker=session.worker + 1), *arguments)


@_wrong(connecting, "is_answer", "lanes.answer", patience_s=_NEVER_S)
def believes_any_listener(_: _Right, *__: Any) -> bool:
    return True


@_wrong(WorkerLanes, "_ended", "lanes.broken", patience_s=_NEVER_S)
def overlooks_lost_lanes(_: _Right, self: WorkerLanes, error: Any) -> None: ...


# Last, when few others run: a client is only as hasty as the processor lets it be.
@_defect("absence.pace")
def hurries() -> None:
    connection._FIRST_WAIT_S = _A_MOMENT_S
    connection._LONGEST_WAIT_S = _A_MOMENT_S
