"""Defects: each changes one behaviour of the real worker and names the check that must find it.

A defect patches classes of its own process, which is forked only for it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
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
from andon_trainer.exchange.star import reducer_path, star
from andon_trainer.exchange.star.bulk_stream import BulkStream
from andon_trainer.exchange.star.tcp import WorkerLanes
from andon_trainer.place.membership import Membership
from chaos.model import LineState
from chaos.worker import Worker
from conformance.breaking import wrap

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


_GRADIENT_TAG = 2 << 3 | 2
_NEVER_S = 6.0
_A_MOMENT_S = 0.005


def _change_joins(change: Callable[[pb.Join], None]) -> None:
    def around(original: Any) -> Any:
        def changed(joining: Any) -> pb.Join:
            join: pb.Join = original(joining)
            change(join)
            return join

        return changed

    wrap(control, "join_to", around)


def _ignore(case: str) -> None:
    def around(original: Any) -> Any:
        return lambda message: None if message.WhichOneof("message") == case else original(message)

    wrap(control, "event_from", around)


def _turn_the_digest() -> None:
    def change(join: pb.Join) -> None:
        join.layout.digest = join.layout.digest[::-1]

    _change_joins(change)


def _be_silent() -> None:
    wrap(Heartbeats, "run", lambda _: lambda self, every_s: None)


def _insist() -> None:
    wrap(control, "refusal_from", lambda original: lambda error: None)


def _send_twice() -> None:
    def around(original: Any) -> Any:
        def send(self: BulkStream, frame: Callable[[], bytes]) -> None:
            original(self, frame)
            original(self, lambda: data if (data := frame())[0] == _GRADIENT_TAG else b"")

        return send

    wrap(BulkStream, "send", around)


def _name_the_round_before() -> None:
    def around(original: Any) -> Any:
        def late(*arguments: Any) -> Any:
            message = original(*arguments)
            return replace(message, key=Key(message.key.term, message.key.round - 1))

        return late

    wrap(reducer_path, "_gradient", around)


def _be_ready_at_once() -> None:
    def around(original: Any) -> Any:
        def hurry(self: Collector, message: AveragedBlock, current: Any, **more: Any) -> None:
            current.missing = min(current.missing, message.count)
            original(self, message, current, **more)

        return hurry

    wrap(Collector, "_average", around)


def _send_zeros() -> None:
    def submit(self: Worker, gradient: Any, samples: int, step: int) -> None:
        exchange: Any = self._member.exchange
        exchange._open.weight = float(samples or 1)
        for index, block in enumerate(self._task.split(gradient)):
            exchange.submit(index, block)

    wrap(Worker, "_submit", lambda _: submit)


def _apply_at_once() -> None:
    def around(original: Any) -> Any:
        def report(self: Worker, *arguments: Any) -> None:
            original(self, *arguments)
            mean = np.concatenate(self._member.exchange.averages)
            weights = self._task.moved(self._replica.state.weights, mean)
            self._replica.state = LineState(weights=weights)

        return report

    def apply(self: Worker, commit: Any, *_: Any) -> None:
        self._known = commit.record.key

    wrap(Worker, "_report", around)
    wrap(Worker, "_apply", lambda _: apply)


def _add_up() -> None:
    """Keeps the averages of a void round, so that the next round's are added to them."""
    total: list[Any] = []

    def keep(original: Any) -> Any:
        def report(self: Worker, *arguments: Any) -> None:
            total.append(np.concatenate(self._member.exchange.averages))
            original(self, *arguments)

        return report

    def apply_all(original: Any) -> Any:
        def apply(self: Worker, commit: Any, assigned: Any, total_weight: float, mean: Any) -> None:
            original(self, commit, assigned, total_weight, sum(total))
            total.clear()

        return apply

    wrap(Worker, "_report", keep)
    wrap(Worker, "_apply", apply_all)


def _believe_any_weight() -> None:
    def around(original: Any) -> Any:
        def believe(self: Collector, message: AveragedBlock, current: Any, **more: Any) -> None:
            first = current.total_weight
            told = message if first is None else replace(message, total_weight=first)
            original(self, told, current, **more)

        return believe

    wrap(Collector, "_average", around)


def _keep_stale_rounds_to_itself() -> None:
    def around(original: Any) -> Any:
        def receive(self: Collector, message: Any, **more: Any) -> None:
            if not isinstance(message, StaleRound):
                original(self, message, **more)

        return receive

    wrap(Collector, "receive", around)


def _install_anything() -> None:
    wrap(PartialState, "is_right", lambda _: property(lambda self: True))


def _be_born_again() -> None:
    def around(original: Any) -> Any:
        def connect(self: Connection, joining: Any) -> Any:
            return original(self, replace(joining, incarnation=secrets.randbits(63) + 1))

        return connect

    wrap(Connection, "connect", around)


def _hide_what_is_held() -> None:
    _change_joins(lambda join: join.ClearField("held_key"))


def _hurry() -> None:
    connection._FIRST_WAIT_S = _A_MOMENT_S
    connection._LONGEST_WAIT_S = _A_MOMENT_S


def _send_backwards() -> None:
    def submit(self: Worker, gradient: Any, samples: int, step: int) -> None:
        if not samples:
            self._member.exchange.abstain()
            return
        for index, block in reversed(list(enumerate(self._task.split(gradient)))):
            self._member.exchange.submit(index, block)

    wrap(Worker, "_submit", lambda _: submit)


def _work_for_any_parent() -> None:
    def around(original: Any) -> Any:
        def take_work(self: WorkerState) -> Any:
            if self._waiting is not None:
                self._waiting = replace(self._waiting, parent=self.head)
            return original(self)

        return take_work

    wrap(WorkerState, "take_work", around)


def _overlook_the_unknown() -> None:
    def around(original: Any) -> Any:
        def read(self: Any, data: bytes) -> None:
            try:
                parse_response(data)
            except FrameError:
                return
            original(self, data)

        return read

    wrap(reducer_path.WireLane, "_read", around)


def _stay_on_the_stream() -> None:
    def end(self: Any) -> None:
        self._open = None
        self._collector.end()

    wrap(star.StarExchange, "end", lambda _: end)


def _miss_a_reducer() -> None:
    """Sends all chunks to the map's first reducer."""

    def around(original: Any) -> Any:
        def chunks(*arguments: Any) -> Any:
            lanes = original(*arguments)
            first, *others = lanes
            merged = [sorted(itertools.chain(*each)) for each in zip(*lanes.values(), strict=True)]
            return {first: merged, **{other: [[] for _ in merged] for other in others}}

        return chunks

    wrap(star, "chunks_by_address", around)


def _change_responses(change: Callable[[reducer_pb2.AveragedBlock], None]) -> None:
    """Changes an invalid response until it is valid."""

    def around(original: Any) -> Any:
        def parse(data: bytes) -> Any:
            try:
                return original(data)
            except FrameError as error:
                message = reducer_pb2.ReduceResponse()
                with suppress(DecodeError):
                    message.ParseFromString(data)
                if not message.HasField("averaged_block"):
                    raise
                try:
                    change(message.averaged_block)
                    return original(message.SerializeToString())
                except FrameError:
                    raise error from None

        return parse

    wrap(reducer_path, "parse_response", around)


def _take_any_length() -> None:
    def change(average: reducer_pb2.AveragedBlock) -> None:
        average.payload = average.payload.ljust(4 * average.element_count, b"\0")
        average.payload = average.payload[: 4 * average.element_count]

    _change_responses(change)


def _scale_by_all_digits() -> None:
    """Leaves a scale with more digits than the 16 that it may have."""

    def around(original: Any) -> Any:
        def encode(numbers: Any, encoding: Encoding, *more: Any) -> memoryview:
            payload = bytearray(original(numbers, encoding, *more))
            if encoding is Encoding.INT8_BLOCK:
                payload[0] |= 1
            return memoryview(payload)

        return encode

    wrap(values, "encode", around)


def _take_any_encoding() -> None:
    def change(average: reducer_pb2.AveragedBlock) -> None:
        average.encoding = layout_pb2.ENCODING_FLOAT32

    _change_responses(change)


def _drop_what_cannot_be_read() -> None:
    """Drops invalid messages, except those with a wrong length or encoding."""

    def around(original: Any) -> Any:
        def read(self: Any, data: bytes) -> None:
            try:
                parse_response(data)
            except FrameError:
                message = reducer_pb2.ReduceResponse()
                with suppress(DecodeError):
                    message.ParseFromString(data)
                if not message.averaged_block.HasField("key"):
                    return
            original(self, data)

        return read

    wrap(reducer_path.WireLane, "_read", around)


def _overlook_limits() -> None:
    name = "_refuse_small_payloads"
    wrap(reducer_path.WireLane, name, lambda _: lambda self, address, most: None)


def _pass_over_what_cannot_be() -> None:
    def around(original: Any) -> Any:
        def event(message: pb.TrainResponse) -> Any:
            try:
                return original(message)
            except WireError:
                return None

        return event

    wrap(control, "event_from", around)


def _believe_any_welcome() -> None:
    def around(original: Any) -> Any:
        def accepted(response: pb.TrainResponse) -> Any:
            welcome = response.join_accepted
            try:
                return original(response)
            except WireError:
                welcome.policy.Clear()
                welcome.policy.encoding = layout_pb2.ENCODING_FLOAT32
                welcome.policy.chunk_elements = 3
                welcome.join_status = pb.JOIN_STATUS_BEHIND
                return original(response)

        return accepted

    wrap(control, "accepted_from", around)


def _take_any_key() -> None:
    def around(original: Any) -> Any:
        def receive(self: Collector, message: Any, **more: Any) -> None:
            if isinstance(message, AveragedBlock) and self._open is not None:
                message = replace(message, key=self._open.key)
            original(self, message, **more)

        return receive

    wrap(Collector, "receive", around)


def _believe_any_void() -> None:
    def around(original: Any) -> Any:
        def voided(self: WorkerState, event: Voided) -> Any:
            mine = self.assigned
            return original(self, event if mine is None else replace(event, key=mine.key))

        return voided

    wrap(WorkerState, "_voided", around)


def _change_welcomes(change: Callable[[Joining, Joined], Joined]) -> None:
    def around(original: Any) -> Any:
        def join(self: control.ControlStream, joining: Joining) -> Joined:
            return change(joining, original(self, joining))

        return join

    wrap(control.ControlStream, "join", around)


def _overlook_halts() -> None:
    """Ignores the halt in the answer to Join."""

    def around(original: Any) -> Any:
        return lambda response: replace(original(response), halt=None)

    wrap(control, "accepted_from", around)


def _believe_to_be_in_sync() -> None:
    _change_welcomes(
        lambda joining, joined: replace(joined, head=joining.head) if joined.in_sync else joined
    )


def _found_by_anybody() -> None:
    def around(original: Any) -> Any:
        def applies(self: WorkerState, record: Record) -> bool:
            founds = record.kind is RecordKind.INITIAL and self.head is None
            return founds or original(self, record)

        return applies

    wrap(WorkerState, "_applies", around)


def _forget_the_cursor() -> None:
    def around(original: Any) -> Any:
        return lambda self, asked: original(self, replace(asked, cursor=self.cursor))

    wrap(WorkerState, "installed", around)


def _keep_its_streams() -> None:
    """Keeps the exchange and the session token of its first Join for the whole process."""
    first: list[bytes] = []

    def change(joining: Joining, joined: Joined) -> Joined:
        first.append(joined.session_token)
        return replace(joined, session_token=first[0])

    def around(original: Any) -> Any:
        def rejoin(self: Any) -> None:
            self.exchange.close = lambda: None
            original(self)
            del self.exchange.close

        return rejoin

    _change_welcomes(change)
    wrap(Membership, "_rejoin", around)


def _leave_in_silence() -> None:
    wrap(control.ControlStream, "leave", lambda _: lambda self, departure: None)


def _wait_for_its_state() -> None:
    """A transfer continues after the control stream has ended."""
    wrap(control.ControlStream, "at_end", lambda _: lambda self, transfer_id, act: None)


def _tell_too_late() -> None:
    def failed(self: WorkerState, event: Any) -> Any:
        mine = self.assigned is not None and event.key == self.assigned.key
        return [ReportFault(event)] if mine and self.phase is not RoundPhase.NONE else []

    wrap(WorkerState, "_failed", lambda _: failed)


def _overlook_overflows() -> None:
    def around(original: Any) -> Any:
        return lambda self, commit: original(self, replace(commit, overflow=False))

    wrap(WorkerState, "_committed", around)


def _lose_nothing() -> None:
    def around(original: Any) -> Any:
        return lambda report: original(replace(report, loss_sum=0.0))

    wrap(control, "ready_to", around)


def _change_reports(change: Callable[[Any], Any]) -> None:
    wrap(control, "ready_to", lambda original: lambda report: original(change(report)))


def _take_the_first_range() -> None:
    def around(original: Any) -> Any:
        return lambda self, work: original(self, replace(work, positions=work.positions[:1]))

    wrap(Worker, "_step", around)


def _take_an_equal_share() -> None:
    def around(original: Any) -> Any:
        def step(self: Worker, work: Any) -> None:
            if work.positions == deal(work.batch, work.split, work.world_size)[work.rank]:
                equal = replace(work.split, targets=())
                share = deal(work.batch, equal, work.world_size)[work.rank]
                work = replace(work, positions=share)
            original(self, work)

        return step

    wrap(Worker, "_step", around)


def _count_what_was_kept() -> None:
    """Reports the samples of its share, whether or not it computed them."""

    def change(report: Any) -> Any:
        return replace(report, timings=replace(report.timings, computed=report.samples))

    _change_reports(change)


def _report_the_limited_norm() -> None:
    def around(original: Any) -> Any:
        def report(self: Worker, assigned: Any, own_norm: float, complete: Any) -> None:
            limit = self._member.policy.max_grad_norm or own_norm
            original(self, assigned, min(own_norm, limit), complete)

        return report

    wrap(Worker, "_report", around)


def _prove_another_worker() -> None:
    def around(original: Any) -> Any:
        def forged(session: Any, nonce: bytes, direction: Any) -> Any:
            return original(replace(session, worker=session.worker + 1), nonce, direction)

        return forged

    wrap(connecting, "preamble", around)


def _believe_any_listener() -> None:
    wrap(connecting, "is_answer", lambda _: lambda *_: True)


def _overlook_lost_lanes() -> None:
    wrap(WorkerLanes, "_ended", lambda _: lambda self, error: None)


def _seal_wrongly() -> None:
    def around(original: Any) -> Any:
        return lambda message, crc32c=None: original(message, 1 if crc32c is None else crc32c ^ 1)

    wrap(frames, "checksum_fields_of", around)


def _overlook_changes() -> None:
    wrap(checksums, "is_intact", lambda _: lambda message: message.crc32c is not None)


def _overlook_absent_checksums() -> None:
    def around(original: Any) -> Any:
        return lambda message: message.crc32c is None or original(message)

    wrap(checksums, "is_intact", around)


def _keep_to_itself_what_was_corrupt() -> None:
    def around(original: Any) -> Any:
        def receive(self: Collector, message: Any, **more: Any) -> None:
            if isinstance(message, RoundAborted):
                message = replace(message, corrupt=None)
            original(self, message, **more)

        return receive

    wrap(Collector, "receive", around)


def _overlook_headers() -> None:
    wrap(frames, "require_header_intact", lambda _: lambda *_: None)


def _overlook_wanted_digests() -> None:
    def around(original: Any) -> Any:
        return lambda self, work: original(self, replace(work, wants_digest=False))

    wrap(Worker, "_step", around)


DEFECTS = {
    "turns-the-digest": Defect("join.layout-digest", _turn_the_digest),
    "is-silent": Defect("join.heartbeat", _be_silent),
    "insists": Defect("refusal.final", _insist),
    "installs-anything": Defect("receive.corrupt", _install_anything),
    "sends-twice": Defect("step.once", _send_twice),
    "names-the-round-before": Defect(
        # After a void round, the previous round is that one, and nobody answers it.
        "step.key",
        _name_the_round_before,
        ("receive", "shares", "commit", "averages", "faults", "halt", "rejoin", "lanes.broken"),
    ),
    "is-ready-at-once": Defect(
        "step.patience",
        _be_ready_at_once,
        ("receive", "commit", "averages", "reducers.patience", "halt", "rejoin"),
    ),
    "sends-zeros": Defect("step.abstain", _send_zeros, ("reducers.abstain",)),
    "applies-at-once": Defect(
        "commit.patience", _apply_at_once, ("receive.untouched", "halt", "rejoin")
    ),
    "adds-up": Defect("commit.void-averages", _add_up, ("averages", "rejoin")),
    "overlooks-overflows": Defect("commit.overflow", _overlook_overflows),
    "believes-any-weight": Defect("averages.weight", _believe_any_weight),
    "keeps-stale-rounds": Defect("faults.stale", _keep_stale_rounds_to_itself, patience_s=_NEVER_S),
    "ignores-halts": Defect("halt.silence", lambda: _ignore("halt"), ("malformed.train",)),
    "is-born-again": Defect("rejoin.incarnation", _be_born_again),
    "hides-what-is-held": Defect("rejoin.held", _hide_what_is_held),
    "sends-backwards": Defect("step.order", _send_backwards),
    "works-for-any-parent": Defect(
        "commit.strange-parent", _work_for_any_parent, patience_s=_NEVER_S
    ),
    "overlooks-the-unknown": Defect("averages.unknown", _overlook_the_unknown, ("malformed",)),
    "misses-a-reducer": Defect("reducers.chunks", _miss_a_reducer),
    "stays-on-the-stream": Defect("faults.stream", _stay_on_the_stream, patience_s=_NEVER_S),
    "ignores-shutdown": Defect("shutdown.final", lambda: _ignore("shutdown")),
    "takes-any-key": Defect("averages.key", _take_any_key, patience_s=_NEVER_S),
    "overlooks-limits": Defect("malformed.limit", _overlook_limits, patience_s=_NEVER_S),
    "takes-any-length": Defect("malformed.payload", _take_any_length, ("malformed.reduce",)),
    "scales-by-all-digits": Defect("strips.codes", _scale_by_all_digits),
    "takes-any-encoding": Defect("malformed.encoding", _take_any_encoding, ("malformed.reduce",)),
    "drops-what-it-cannot-read": Defect(
        "malformed.reduce", _drop_what_cannot_be_read, ("averages.unknown",), patience_s=_NEVER_S
    ),
    "passes-over-what-cannot-be": Defect(
        "malformed.train", _pass_over_what_cannot_be, patience_s=_NEVER_S
    ),
    "believes-any-welcome": Defect("malformed.join", _believe_any_welcome, patience_s=_NEVER_S),
    "believes-any-void": Defect("commit.other-void", _believe_any_void, patience_s=_NEVER_S),
    "hides-halts": Defect("halt.reported", lambda: _change_joins(lambda it: it.ClearField("halt"))),
    "overlooks-halts": Defect("halt.joined", _overlook_halts),
    "believes-to-be-in-sync": Defect("rejoin.other-head", _believe_to_be_in_sync),
    "founds-by-anybody": Defect("bootstrap.other", _found_by_anybody, patience_s=_NEVER_S),
    "forgets-the-cursor": Defect("receive.cursor", _forget_the_cursor, ("rejoin.head",)),
    "keeps-its-streams": Defect(
        "rejoin.streams", _keep_its_streams, ("receive", "halt", "bootstrap")
    ),
    "leaves-in-silence": Defect(
        "shutdown.leave", _leave_in_silence, ("leave",), patience_s=_NEVER_S
    ),
    "waits-for-its-state": Defect(
        "receive.cancel", _wait_for_its_state, ("bootstrap.cancel",), patience_s=_NEVER_S
    ),
    "tells-too-late": Defect("faults.held", _tell_too_late),
    "overlooks-wanted-digests": Defect("step.wanted-digest", _overlook_wanted_digests),
    "loses-nothing": Defect("step.loss", _lose_nothing),
    "takes-the-first-range": Defect("shares.pieces", _take_the_first_range),
    "takes-an-equal-share": Defect("shares.uneven", _take_an_equal_share),
    "counts-what-was-kept": Defect("shares.timings", _count_what_was_kept),
    "has-no-limit": Defect(
        "shares.limit", lambda: wrap(Worker, "_limited", lambda _: lambda self, vector, _: vector)
    ),
    "seals-wrongly": Defect("checksums.sent", _seal_wrongly),
    "overlooks-changes": Defect("checksums.payload", _overlook_changes, patience_s=_NEVER_S),
    "overlooks-absent-checksums": Defect(
        "checksums.absent", _overlook_absent_checksums, patience_s=_NEVER_S
    ),
    "keeps-corrupt-to-itself": Defect("checksums.told", _keep_to_itself_what_was_corrupt),
    "overlooks-headers": Defect("checksums.header", _overlook_headers, patience_s=_NEVER_S),
    "proves-another-worker": Defect("lanes.proof", _prove_another_worker),
    "believes-any-listener": Defect("lanes.answer", _believe_any_listener, patience_s=_NEVER_S),
    "overlooks-lost-lanes": Defect("lanes.broken", _overlook_lost_lanes, patience_s=_NEVER_S),
    "reports-the-limited-norm": Defect("shares.own-norm", _report_the_limited_norm),
    # Last, when few others run: a client is only as hasty as the processor lets it be.
    "hurries": Defect("absence.pace", _hurry),
}
"""The defects, by the argument of `judged_numpy.py`."""
