"""Puts a coordinator together: journal, core, gRPC service and metrics of one run."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import grpc.aio
from prometheus_client import CollectorRegistry

from andon.host.telemetry import ExchangeDurations, RefusalCounter
from andon.host.worker_tokens import Withdrawn
from andon.protocol.halts import HaltAnswer, HaltReason
from andon.protocol.limits import clipped
from andon.protocol.messages import BlockFault, BlockFaultKind
from andon.protocol.records import make_term
from andon.protocol.scalars import ScalarNames
from andon_coordinator.config import CoordinatorConfig
from andon_coordinator.core import events
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.sessions import SessionsCore
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.telemetry import LineMetrics, ServedRun, SessionMetrics, Totals
from andon_coordinator.transport.access_control import AccessControl
from andon_coordinator.transport.journal import Journal
from andon_coordinator.transport.outgoing import JoinAnswers, ServicePlaces
from andon_coordinator.transport.registration import ReducerRegistration
from andon_coordinator.transport.service import (
    SERVICE_NAME,
    CoordinatorService,
    server_options,
)
from andon_coordinator.transport.task import LineClock, LineObserver, LineTask, TaskSettings

__all__ = [
    "SERVICE_NAME",
    "Coordinator",
    "CoordinatorFailed",
    "build_coordinator",
    "server_options",
]

_LONGEST_GAP_S = 1.0
"""A process that did not tick for longer was stopped, and could not listen in that time."""


_FAULT_KINDS = {
    BlockFaultKind.NON_FINITE: events.FaultKind.NON_FINITE_GRADIENT,
    BlockFaultKind.INCONSISTENT: events.FaultKind.PROTOCOL,
    BlockFaultKind.NON_FINITE_AVERAGE: events.FaultKind.NON_FINITE_AVERAGE,
    BlockFaultKind.ENCODING_OVERFLOW: events.FaultKind.ENCODING_OVERFLOW,
}


class CoordinatorFailed(Exception):
    """The coordinator failed, or another one took the run over; the log has the details."""


class Coordinator:
    """One run's coordinator: add it to a server, start it, wait, close it."""

    def __init__(
        self,
        task: LineTask,
        service: CoordinatorService,
        access: AccessControl,
        scraped: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """See `build_coordinator`."""
        self._task = task
        self._service = service
        self.access = access
        """Who may see the line, and who may stop it."""
        self._scraped = scraped

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service andon.v1.Coordinator to a server that has not started."""
        self._service.add_to(server)

    def report_newcomers(self, report: Callable[[bool], None]) -> None:
        """Calls `report` now, and at each change: whether the line takes newcomers."""
        self._task.report_newcomers(report)

    async def start(self) -> None:
        """Starts to own the line; call it before the server starts."""
        self._task.start()

    async def close(self) -> None:
        """Ends every stream with UNAVAILABLE, finishes the journal and unlocks it."""
        await self._task.close()

    @property
    def complete(self) -> asyncio.Event:
        """Set once the line is COMPLETE: the run is done and every worker has left."""
        return self._task.complete

    async def wait(self) -> bool:
        """Waits until the line is over: True if it is COMPLETE, False if it was closed first.

        Raises:
            CoordinatorFailed: because of a bug, or because another coordinator took the run over.
        """
        await self._task.over.wait()
        if self._task.failed is not None:
            raise CoordinatorFailed(
                f"the coordinator failed: {self._task.failed}"
            ) from self._task.failed
        return self._task.complete.is_set()

    async def tell_the_rest(self, most_s: float) -> None:
        """Answers late joins of a complete line, for `most_s` at most; see `LineTask`."""
        await self._task.tell_the_rest(most_s)

    def scraped_workers(self) -> Mapping[int, str]:
        """Where each live worker's metrics are, a moment ago; any thread may ask."""
        return self._scraped()

    def scraped_reducers(self) -> Mapping[str, str]:
        """Where the metrics of each registered reducer are, by its address; any thread may ask."""
        return self._task.scraped_reducers

    def folder_searched(self, folder: str, step: int | None, damaged: tuple[str, ...] = ()) -> None:
        """Tells the line what the run's folder has to go on from; it only gives words.

        Args:
            folder: the run's.
            step: of the newest whole checkpoint; None: there is none.
            damaged: what is wrong with each newer one.
        """
        self._task.put(events.FolderSearched(folder, step, damaged))

    def round_faulted(self, fault: BlockFault, senders: tuple[tuple[int, int], ...]) -> None:
        """Tells the line what the reducer of this process saw.

        Args:
            fault: why it stopped a round.
            senders: ranks, and the workers that sent as them, by their session tokens.
        """
        seen = events.Fault(
            kind=_FAULT_KINDS[fault.kind],
            key=fault.key,
            rank=fault.rank,
            block=fault.block,
            element=fault.element,
            value=fault.value,
            message=fault.message,
        )
        self._task.put(events.RoundFaulted(seen, senders))

    def status(self) -> LineSnapshot:
        """What the line is doing now."""
        return self._task.status()

    async def halt(self, reason: str, operator: str) -> None:
        """Halts the line because a person says so.

        Raises:
            LineError: it is halted or complete already, or the coordinator is going away.
        """
        self._task.ask(events.CordPulled(clipped(reason), clipped(operator)))

    async def answer(
        self, halt_id: int, answer: HaltAnswer, worker: int | None, operator: str
    ) -> None:
        """Answers a halt; `worker` is the one to drop, if the answer is DROP.

        Raises:
            LineError: it is not the present halt, it can't be answered so, or the coordinator is
                going away.
        """
        dropped = worker if answer is HaltAnswer.DROP else None
        self._task.ask(events.HaltCleared(halt_id, answer, dropped, clipped(operator)))

    async def drain(self, operator: str) -> None:
        """Ends the run after the current step.

        Raises:
            LineError: the coordinator is going away.
        """
        self._task.ask(events.DrainRequested(clipped(operator)))


def _random_bits() -> int:
    return secrets.randbits(32)


def build_coordinator(
    config: CoordinatorConfig,
    registry: CollectorRegistry,
    secret: bytes,
    refusals: RefusalCounter | None = None,
    exchanges: ExchangeDurations | None = None,
    *,
    observers: Sequence[LineObserver] = (),
) -> Coordinator:
    """Opens the journal, makes a new term durable, and puts the coordinator together.

    Args:
        config: how the coordinator works.
        registry: registers its metrics.
        secret: of session tokens, shared with the reducers of the run.
        refusals: the counter of refusals, if another service of this process shares the registry.
        exchanges: the durations of exchanges, shared with a reducer of this process; on a ring the
            coordinator measures them.
        observers: watch the line, as its metrics do; see `LineObserver`.

    Raises:
        JournalError: the journal can't be opened, or another coordinator has it open.
    """
    settings = config.line_settings()
    journal = Journal.open(config.journal, config.run_id, sync=config.line.journal_sync)
    try:
        if config.resume_from is not None:
            journal.resume_from(config.resume_from)
        history = journal.history
        # The term is durable before anybody can join: no key of it could be issued twice, even if
        # this process dies right after (rule 2).
        term = make_term(history.greatest_term, time.time(), secrets.randbits(32))
        journal.begin_term(term)
        if settings.verify.fraction:
            key = journal.verify_key(secrets.token_bytes(32))
            settings = replace(settings, verify=replace(settings.verify, key=key))
        if config.line.price is not None:
            journal.price(config.line.price)
        counted = journal.counts()
        metrics = LineMetrics(
            registry,
            Totals(
                steps=counted.steps,
                samples=counted.samples,
                halts={HaltReason[name]: number for name, number in counted.halts.items()},
                answers={HaltAnswer[name]: number for name, number in counted.answers.items()},
                departures={name.lower(): n for name, n in counted.departures.items()},
                spikes=Counter(each.action for each in history.spikes),
                verified=history.verified,
            ),
            refusals,
            exchanges,
            ServedRun(
                run_id=config.run_id,
                topology=config.policy.topology,
                encoding=config.policy.encoding,
                answer_encoding=config.policy.answer_encoding,
                local_steps=config.policy.local_steps,
            ),
        )
        sessions = SessionMetrics(registry, counted.sessions)
        journal.wrote = metrics.wrote
        task = LineTask(
            (
                LineCore(settings, term=term, history=history, random_bits=_random_bits),
                SessionsCore(
                    keys=Keys(term, _random_bits),
                    lease_s=config.line.liveness_s,
                    next_halt_id=history.next_halt_id,
                    formed=history.sessions,
                    scalar_names=ScalarNames(history.scalar_names),
                ),
            ),
            journal,
            JoinAnswers(
                run_id=config.run_id,
                secret=secret,
                policy=config.policy,
                liveness=config.liveness,
                compares_blocks=settings.comparison_factor is not None,
            ),
            # Room for each worker's old and new stream, and for peers that never join.
            settings=TaskSettings(
                max_streams=4 * settings.max_workers + 16,
                flush_s=config.join_s,
                announce=config.announce,
                session_happened=sessions.happened,
            ),
            clocks=(LineClock(time.monotonic, _LONGEST_GAP_S), time.time),
            observers=(metrics, *observers),
        )
    except BaseException:
        journal.close()
        raise
    registration = ReducerRegistration(
        task,
        run_id=config.run_id,
        secret=secret if config.registers else b"",
        join_s=config.join_s,
    )
    access = AccessControl(
        run_id=config.run_id,
        run_token=config.token,
        operator_token=config.operator_token,
        viewer_token=config.viewer_token,
        withdrawn=None if config.withdrawn_file is None else Withdrawn(config.withdrawn_file),
    )
    service = CoordinatorService(
        task,
        registration,
        access=access,
        places=ServicePlaces(
            shared_dir=config.shared_dir,
            metrics_url=config.metrics_url,
            tcp_port=config.tcp_port,
        ),
        join_s=config.join_s,
        count=metrics.refused,
    )
    return Coordinator(task, service, access, lambda: metrics.scraped)
