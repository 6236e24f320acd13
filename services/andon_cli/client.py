"""Client: what a line says of itself, and what people ask of it, as plain values.

The console's only place for the line's messages, beside the trial of `andon doctor`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc

from andon.host.access import CLEAR, Access
from andon.host.errors import CommandError, LineRefused, LineUnreachable, WrongRun
from andon.host.keepalive import Keepalive
from andon.host.tls import TlsError, open_aio_channel
from andon.host.tls_diagnosis import diagnose_tls
from andon.protocol.halts import HaltAnswer, HaltEvidence
from andon.protocol.reasons import Reason
from andon.protocol.records import accuracy_of
from andon.protocol.slowness import Slowness
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import session_pb2
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire import conversion, sessions
from andon.wire.slowness import slowness_from_proto
from andon.wire.statuses import details_of
from andon_coordinator.core.machine_time import RunCost

__all__ = [
    "Hardware",
    "LineClient",
    "LineStatus",
    "RankStatus",
    "ReducerStatus",
    "SessionStatus",
    "StepTimes",
    "WorkerStatus",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device, as its worker described it; 0: it does not know the number."""

    kind: str = ""
    name: str = ""
    memory_bytes: int = 0
    cores: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How long the parts of a worker's last step took; the parts overlap."""

    compute_s: float = 0.0
    """From the assignment to the end of the last backward, with `data_s`."""
    exchange_s: float = 0.0
    """From the first chunk sent to the last average received."""
    wait_s: float = 0.0
    """From the end of the last backward to the last average."""
    data_s: float = 0.0
    """It waited for samples."""
    busy_s: float = 0.0
    """Forward and backward alone; 0: it does not measure them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What one worker is doing; `rank` is None if it is not in the present round."""

    worker: int
    rank: int | None = None
    host: str = ""
    device: str = ""
    activity: str = ""
    detail: str = ""
    step: int = 0
    samples_per_second: float = 0.0
    waiting_ratio: float = 0.0
    heartbeat_age_s: float = 0.0
    live: bool = False
    metrics_address: str = ""
    final_digest: str = ""
    hardware: Hardware | None = None
    """None: it described no device, or its coordinator is older than this."""
    share: float = 0.0
    """Its part of the last step's positions, from 0 to 1."""
    micro_batches: int = 0
    """How many micro-batches it was told to make of them; 0: it was left to it."""
    late_records: int | None = None
    """How many records in a row were made without it while it computes; None: it is not late."""
    owed_positions: int = 0
    """How many positions it owes."""
    slow: str = ""
    """What the line does about it because it is slow; empty: nothing."""
    notice: str = ""
    """Why its machine is about to go, or has gone, by its own notice; empty if it gave none."""
    timings: StepTimes | None = None
    """None before its first step, or its coordinator is older than this."""
    step_s: float = 0.0
    """How long its last step took, from the assignment to the commit."""
    slowness: Slowness | None = None
    """Why it was slow the last time that others waited for it; None: they never did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What one rank of a session is doing; `state` is a name such as `in call`."""

    rank: int
    host: str = ""
    device: str = ""
    state: str = ""
    steps: int = 0
    overflows: int = 0
    """Steps whose gradients overflowed, where a gradient scaler expects that."""
    exchange_s: float = 0.0
    exchange_ratio: float = 0.0
    """The part of its time in which a call was open, between its last two reports."""
    bytes: int = 0
    calls: int = 0
    pending: str = ""
    """The call that has been open for longest; empty if none is."""
    pending_s: float = 0.0
    """For how long it has been open."""
    missing: tuple[int, ...] = ()
    """The ranks of which that call misses something."""
    silent_s: float = 0.0
    metrics_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatus:
    """The sessions of a run whose ranks attend; see `andon.v1.SessionStatus`."""

    key: str = ""
    """Empty while ranks are awaited."""
    world_size: int = 0
    awaited: tuple[int, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    age_s: float = 0.0
    formed: int = 0
    last_end: str = ""
    """Why the session before ended, as `rank_lost`; empty if it had no end."""
    last_culprit: int | None = None
    last_message: str = ""


@dataclass(frozen=True, slots=True)
class ReducerStatus:
    """A reducer and how many elements it averages. The coordinator's own has no address."""

    address: str
    elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """Who writes the run's checkpoints, where, and which one was last; as in `andon.v1`."""

    writer: int | None = None
    host: str = ""
    folder: str = ""
    every: int = 0
    step: int = 0
    last: str = ""
    overdue: int = 0
    elsewhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationStatus:
    """How much of a run was computed twice before it was committed; as in `andon.v1`."""

    fraction: float
    steps: int = 0
    grains: int = 0
    differences: int = 0
    convicted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LineStatus:
    """What a line is doing; `state` is a name such as `RUNNING`."""

    run_id: str
    state: str
    step: int = 0
    attempt: int = 0
    epoch: int = 0
    position: int = 0
    loss: float | None = None
    total_steps: int | None = None
    live: int = 0
    participating: int = 0
    expect_workers: int = 0
    workers: tuple[WorkerStatus, ...] = ()
    halt: HaltEvidence | None = None
    samples: int = 0
    correct: int | None = None
    """Correct samples in the last step; None if nobody counts them."""
    samples_per_second: float = 0.0
    exchange_s: float = 0.0
    hidden_ratio: float = 0.0
    metrics_url: str = ""
    waiting_for: str = ""
    stop_reason: str = ""
    """Why the run is over, or ends after the current step; empty if it goes on."""
    expect_reducers: int = 1
    reducers: tuple[ReducerStatus, ...] = ()
    checkpoints: CheckpointStatus | None = None
    """None if no worker was ever able to write one."""
    schedule: str = ""
    schedule_note: str = ""
    """Why the schedule is that one, if the line chose it."""
    fragments: int = 0
    """In how many parts workers exchange the model; 0: always as a whole."""
    cost: RunCost = field(default_factory=RunCost)
    """What the run has taken so far; 0 s and no price of a service that does not count it."""
    noise_scale: float | None = None
    """Of the gradients, in samples; None if it is not known."""
    mean: str = ""
    """Which mean gradients have, `WEIGHTED` or `TRIMMED`; empty: the service does not say."""
    trimmed: int | None = None
    """How many of each element's contributions the last step's mean left out at each end; 0 if they
    were too few. None: the line trims nothing, or made no step."""
    grain: int = 0
    """Positions of a grain, if bits are the same on any number of workers; else 0."""
    one_arithmetic: bool = False
    """Whether all live workers have stated one arithmetic."""
    verification: VerificationStatus | None = None
    """None if no step is drawn."""
    session: SessionStatus | None = None
    """The run's sessions; None if its workers train on a line."""
    slowness: tuple[Slowness, ...] = ()
    """Who was slow last and why, the oldest first, without stacks."""
    tcp_port: int = 0
    """The port of the TCP lanes of the coordinator's own reducer; 0: it offers none."""

    @property
    def accuracy(self) -> float | None:
        """The share of correct samples in the last step, from 0 to 1; None: nobody counts."""
        return accuracy_of(self.correct, self.samples)

    @property
    def uneven(self) -> bool:
        """Whether workers get unequal work, or their devices differ so that they might."""
        live = [each for each in self.workers if each.live]
        shares = [each.share for each in live if each.share]
        devices = {each.hardware.name for each in live if each.hardware} - {""}
        # Equal shares differ by one sample if they don't divide the batch.
        apart = (max(shares, default=0.0) - min(shares, default=0.0)) * self.samples
        return (
            self.schedule not in ("", "every-step")
            or apart > 1.5
            or (len(devices) > 1 and bool(self.schedule_note))
        )

    @property
    def shared(self) -> bool:
        """Whether reducers in other processes average parts of the model."""
        return self.expect_reducers > 1 or any(each.address for each in self.reducers)


class LineClient:
    """Asks the coordinator at one address. Use it as an async context manager."""

    def __init__(self, address: str, *, run_id: str = "", access: Access = CLEAR) -> None:
        """Connects when it is first asked something; `run_id` empty: whichever run is there.

        Raises:
            CommandError: a certificate or a token can't be used, or would be sent in the clear.
        """
        self.address = address
        self._run_id = run_id
        self._tls = access.tls_dir
        # Read tokens now, so that a missing file is an error before anything is sent.
        self._asks = access.metadata(address)
        self._operates = access.metadata(address, operates=True)
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            *Keepalive().client_options(),
        ]
        try:
            self._channel = open_aio_channel(address, options, access.tls_dir)
        except TlsError as error:
            raise CommandError(str(error)) from error
        self._stub = CoordinatorStub(self._channel)

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def status(self, timeout_s: float = 5.0) -> LineStatus:
        """What the line is doing now.

        Raises:
            LineUnreachable: nobody serves a line there, or not in time.
            WrongRun: another run is served there.
        """
        try:
            # The generated stubs type the synchronous calls only.
            answer = await self._stub.GetStatus(  # type: ignore[misc]
                pb.GetStatusRequest(run_id=self._run_id), timeout=timeout_s, metadata=self._asks
            )
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from error
        return _line(answer.status)

    async def watch(self) -> AsyncIterator[LineStatus]:
        """Statuses of the line, now and at each change, until the service ends the stream.

        Raises:
            LineUnreachable: nobody serves a line there, or the service went away.
            WrongRun: another run is served there.
        """
        request = pb.WatchStatusRequest(run_id=self._run_id)
        stream = self._stub.WatchStatus(request, metadata=self._asks)
        try:
            async for answer in stream:  # type: ignore[attr-defined]  # as above
                yield _line(answer.status)
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from error
        finally:
            stream.cancel()

    async def halt(self, reason: str, operator: str, timeout_s: float = 10.0) -> HaltEvidence:
        """Stops the line. Returns the halt as every worker sees it.

        Raises:
            LineRefused: the line is halted or complete already.
            LineUnreachable, WrongRun: as in `status`.
        """
        request = pb.PullCordRequest(run_id=self._run_id, reason=reason, operator=operator)
        try:
            answer = await self._stub.PullCord(  # type: ignore[misc]
                request, timeout=timeout_s, metadata=self._operates
            )
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from error
        return conversion.evidence_from_proto(answer.halt)

    async def resume(
        self,
        halt_id: int,
        answer: HaltAnswer,
        *,
        worker: int | None = None,
        operator: str = "",
        timeout_s: float = 10.0,
    ) -> LineStatus:
        """Answers a halt. Returns the status after it.

        Raises:
            LineRefused: that halt is not the present one, or can't be answered so.
            LineUnreachable, WrongRun: as in `status`.
        """
        request = pb.ClearHaltRequest(
            run_id=self._run_id,
            halt_id=halt_id,
            answer=conversion.enum_to_proto(answer),
            worker=worker or 0,
            operator=operator,
        )
        try:
            cleared = await self._stub.ClearHalt(  # type: ignore[misc]
                request, timeout=timeout_s, metadata=self._operates
            )
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from error
        return _line(cleared.status)

    async def drain(self, operator: str, timeout_s: float = 10.0) -> LineStatus:
        """Ends the run after the current step. Returns the status after it.

        Raises:
            LineUnreachable, WrongRun: as in `status`.
        """
        request = pb.DrainRequest(run_id=self._run_id, operator=operator)
        try:
            answer = await self._stub.Drain(  # type: ignore[misc]
                request, timeout=timeout_s, metadata=self._operates
            )
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from error
        return _line(answer.status)

    async def _error_of(self, error: grpc.aio.AioRpcError) -> CommandError:
        detail = error.details() or error.code().name.lower()
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return LineRefused(f"the line at {self.address} refuses: {detail}")
        # gRPC reports every failed handshake as UNAVAILABLE. Connect once more to find out why.
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            trouble = await asyncio.to_thread(diagnose_tls, self.address, self._tls)
            if trouble:
                return LineUnreachable(trouble)
        reason = details_of(error).reason
        if reason is Reason.WRONG_RUN:
            return WrongRun(f"another run is served at {self.address}: {detail}")
        if reason is Reason.OPERATOR_REFUSED:
            return LineRefused(
                f"the line at {self.address} refuses: {detail}; `andon status` shows what it does"
            )
        if reason is not None and reason.retry_s is None:
            return LineRefused(f"the line at {self.address} refuses: {detail}: {reason.remedy}")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return LineUnreachable(
                f"what listens at {self.address} is not a coordinator of Andon: check the port"
            )
        return LineUnreachable(
            f"no line is served at {self.address} ({detail}): start one there with `andon run` "
            "or `andon serve`, or correct the address"
        )


def _line(message: pb.LineStatus) -> LineStatus:
    return LineStatus(
        run_id=message.run_id,
        state=_name(pb.LineState, message.state, "LINE_STATE_"),
        step=message.step,
        attempt=message.attempt,
        epoch=message.cursor.epoch,
        position=message.cursor.position,
        loss=message.loss if message.HasField("loss") else None,
        total_steps=message.total_steps if message.HasField("total_steps") else None,
        live=message.live,
        participating=message.participating,
        expect_workers=message.expect_workers,
        workers=tuple(_worker(worker) for worker in message.workers),
        halt=conversion.evidence_from_proto(message.halt) if message.HasField("halt") else None,
        samples=message.samples,
        correct=message.correct if message.HasField("correct") else None,
        samples_per_second=message.samples_per_second,
        exchange_s=message.exchange_s,
        hidden_ratio=message.hidden_ratio,
        metrics_url=message.metrics_url,
        waiting_for=message.waiting_for,
        stop_reason=message.stop_reason,
        expect_reducers=message.expect_reducers,
        reducers=tuple(ReducerStatus(each.address, each.elements) for each in message.reducers),
        checkpoints=_checkpoints(message.checkpoints) if message.HasField("checkpoints") else None,
        schedule=message.schedule,
        schedule_note=message.schedule_note,
        grain=message.grain,
        one_arithmetic=message.one_arithmetic,
        fragments=message.fragments,
        cost=_cost(message.cost),
        noise_scale=message.noise_scale if message.HasField("noise_scale") else None,
        mean=_name(pb.MeanKind, message.mean, "MEAN_KIND_") if message.mean else "",
        trimmed=message.trimmed if message.HasField("trimmed") else None,
        verification=_verification(message.verification)
        if message.HasField("verification")
        else None,
        session=_session(message.session) if message.HasField("session") else None,
        slowness=tuple(map(slowness_from_proto, message.slowness)),
        tcp_port=message.tcp_port,
    )


def _verification(message: pb.VerificationStatus) -> VerificationStatus:
    return VerificationStatus(
        fraction=message.fraction,
        steps=message.steps,
        grains=message.grains,
        differences=message.differences,
        convicted=tuple(message.convicted),
    )


def _cost(message: pb.RunCost) -> RunCost:
    return RunCost(
        machine_seconds=message.machine_seconds,
        price_per_hour=message.price_per_hour if message.HasField("price_per_hour") else None,
        currency=message.currency,
        cost=message.cost if message.HasField("cost") else None,
        samples_per_unit=message.samples_per_unit if message.HasField("samples_per_unit") else None,
        tokens_per_unit=message.tokens_per_unit if message.HasField("tokens_per_unit") else None,
    )


def _session(message: session_pb2.SessionStatus) -> SessionStatus:
    key = conversion.optional_key_from_proto(message.key)
    last = message.last if message.HasField("last") else None
    return SessionStatus(
        key="" if key is None else str(key),
        world_size=message.world_size,
        awaited=tuple(message.awaited),
        ranks=tuple(_rank(each) for each in message.ranks),
        age_s=message.age_s,
        formed=message.formed,
        last_end=""
        if last is None
        else _name(session_pb2.SessionEnd, last.end, "SESSION_END_").lower(),
        last_culprit=last.culprit if last is not None and last.HasField("culprit") else None,
        last_message="" if last is None else last.message,
    )


def _rank(message: session_pb2.RankStatus) -> RankStatus:
    pending = message.pending if message.HasField("pending") else None
    state = _name(session_pb2.RankState, message.state, "RANK_STATE_")
    return RankStatus(
        rank=message.rank,
        host=message.node_id,
        device=message.device or message.backend,
        state=state.lower().replace("_", " "),
        steps=message.steps,
        overflows=message.overflows,
        exchange_s=message.exchange_s,
        exchange_ratio=message.exchange_ratio,
        bytes=message.bytes,
        calls=message.calls,
        pending="" if pending is None else str(sessions.pending_from_proto(pending)),
        pending_s=0.0 if pending is None else pending.open_s,
        missing=() if pending is None else tuple(pending.missing),
        silent_s=message.silent_s,
        metrics_address=message.metrics_address,
    )


def _checkpoints(message: pb.CheckpointStatus) -> CheckpointStatus:
    return CheckpointStatus(
        writer=message.writer if message.HasField("writer") else None,
        host=message.node_id,
        folder=message.folder,
        every=message.every,
        step=message.last.step,
        last=message.last.folder,
        overdue=message.overdue,
        elsewhere=message.elsewhere,
    )


def _worker(message: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker=message.worker,
        rank=message.rank if message.HasField("rank") else None,
        host=message.node_id,
        device=message.device,
        activity=_name(pb.Activity, message.activity, "ACTIVITY_").lower(),
        detail=message.detail,
        step=message.step,
        samples_per_second=message.samples_per_second,
        share=message.share,
        micro_batches=message.micro_batches,
        late_records=message.late_records if message.HasField("late_records") else None,
        owed_positions=message.owed_positions,
        slow=message.slow,
        notice=message.notice,
        waiting_ratio=message.waiting_ratio,
        heartbeat_age_s=message.heartbeat_age_s,
        live=message.live,
        metrics_address=message.metrics_address,
        final_digest=message.final_digest.hex(),
        hardware=_hardware(message.hardware) if message.HasField("hardware") else None,
        timings=_times(message.timings) if message.HasField("timings") else None,
        step_s=message.step_s,
        slowness=slowness_from_proto(message.slowness) if message.HasField("slowness") else None,
    )


def _times(message: pb.Timings) -> StepTimes:
    return StepTimes(
        compute_s=message.compute_s,
        exchange_s=message.exchange_s,
        wait_s=message.wait_s,
        data_s=message.data_s,
        busy_s=message.busy_s,
    )


def _hardware(message: pb.Device) -> Hardware:
    return Hardware(
        kind=message.kind,
        name=message.name,
        memory_bytes=message.memory_bytes,
        cores=message.cores,
    )


def _name(members: object, number: int, prefix: str) -> str:
    """The name of an enum's value. A newer coordinator may send numbers unknown here."""
    try:
        name: str = members.Name(number)  # type: ignore[attr-defined]  # an enum wrapper has it
    except ValueError:
        return f"UNKNOWN_{number}"
    return name.removeprefix(prefix)
