"""`andon serve`: one process with the coordinator, the reducer, health, reflection and metrics."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry

from andon.host.errors import CommandError, ExitCode, UsageError
from andon.host.telemetry import ExchangeDurations, RefusalCounter, new_registry
from andon.host.tether import tie_to_parent
from andon.host.tls import is_loopback
from andon.host.worker_tokens import Withdrawn, WithdrawnUnreadable
from andon.protocol.announcements import Announcement
from andon.protocol.run_settings import Topology
from andon_coordinator import app as coordinator_app
from andon_coordinator.app import Coordinator, build_coordinator, server_options
from andon_coordinator.config import CoordinatorConfig
from andon_coordinator.core.line_state import LineState
from andon_coordinator.transport.store import JournalError
from andon_coordinator.transport.task import LineObserver
from andon_reducer import app as reducer_app
from andon_reducer.app import ReducerApp, build_reducer
from andon_reducer.core.effects import DataPath
from andon_server.board.app import starting
from andon_server.board.feed import BoardFeed
from andon_server.board.gate import BoardGate
from andon_server.board.history import RunHistory
from andon_server.board.mounting import board_on
from andon_server.board.view import LineFacts
from andon_server.folder_search import search_folder
from andon_server.health import HealthService
from andon_server.process import Interrupts, LinePlace, greet, logging_to
from andon_server.runs import JOURNAL, ServiceAddress, make_run_dir
from andon_server.serve_reducer import serve_reducer
from andon_server.serving import (
    GRACE_S,
    advertised,
    end,
    guarded_server,
    host_in,
    identity_of,
    introducing,
    listen,
    metrics_endpoint,
    reachable,
    read_secret,
    reducer_config,
    tcp_listener,
    warn_of_other_name,
)
from andon_server.settings import ServeConfig
from andon_server.spans import LineSpans, spans_wanted, tracer_provider

__all__ = ["coordinator_config", "serve"]

_TELLING_S = 4.0
"""How long the service of a complete line goes on for workers that may still come.

A worker that looks for its line tries at least every 3 s.
"""


async def serve(config: ServeConfig) -> int:
    """Serves a line, or a reducer, until a signal; or until the run is over if so configured.

    Raises:
        CommandError: a port is taken, or the journal can't be used.
    """
    if config.role == "reducer":
        return await serve_reducer(config)
    if config.parent_pid is not None and not tie_to_parent(config.parent_pid, signal.SIGTERM):
        return ExitCode.INTERRUPTED
    make_run_dir(config.folder)
    place = LinePlace(config.run_id)
    with (
        logging_to(
            config.folder / "service.log",
            quiet=config.announce,
            form=config.log_format,
            facts=place.facts,
        ),
        Interrupts() as interrupts,
    ):
        async with _serving(config, place) as (coordinator, address):
            if config.until_complete and coordinator.status().state is LineState.COMPLETE:
                # Whoever waits for a greeting would send workers to a service that ends now.
                return ExitCode.COMPLETE
            address.write(config.folder)
            greeting = address.to_json() if config.announce else _greeting(config, address)
            greet(greeting, needed=config.announce)
            await _until_over(coordinator, interrupts, config, address)
            # Closing takes seconds if clients are slow. A second Ctrl-C must not wait for them.
            interrupts.let_next_kill()
    return ExitCode.COMPLETE


async def _until_over(
    coordinator: Coordinator, interrupts: Interrupts, config: ServeConfig, address: ServiceAddress
) -> None:
    """Waits for a signal, for a failure of the coordinator, or for the line to be complete."""
    over = asyncio.create_task(coordinator.wait())
    stopping = asyncio.create_task(interrupts.first.wait())
    telling: asyncio.Task[None] | None = None
    try:
        await asyncio.wait({over, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            return
        complete = over.result()  # raises if the coordinator failed
        if complete:
            address.note_complete(config.folder, time.time())
        # A complete line stays up for people and Prometheus, unless it is part of a run.
        if not config.until_complete:
            await stopping
        elif complete:
            telling = asyncio.create_task(coordinator.tell_the_rest(_TELLING_S))
            await asyncio.wait({stopping, telling}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (over, stopping, telling):
            if task is not None:
                task.cancel()


@asynccontextmanager
async def _serving(
    config: ServeConfig, place: LinePlace
) -> AsyncIterator[tuple[Coordinator, ServiceAddress]]:
    """Serves while entered, and tells `place`. What was started last is stopped first."""
    registry, secret = new_registry(), read_secret(config.secret_file)
    refusals, exchanges = RefusalCounter(registry), ExchangeDurations(registry)
    # The stack closes in reverse: health reports that the process is shutting down, coordinator and
    # reducer end their streams with a reason, and only then does the server cut what is left.
    async with AsyncExitStack() as stack:
        identity = identity_of(config.access, registry)
        # Both ports before the journal: a service that can't start must not begin a term in it.
        metrics = stack.enter_context(metrics_endpoint(config, registry, identity, starting))
        settings = coordinator_config(config)
        server, admission = guarded_server(
            server_options(settings.liveness), config.limits, refusals
        )
        port = listen(server, config.bind, config.line_port, "the line", identity)
        stack.push_async_callback(end, server)
        stack.callback(admission.leave)
        public = advertised(config, port)
        warn_of_other_name(config, public)
        metrics_url = metrics.url(host_in(public))
        services, tcp_port = [coordinator_app.SERVICE_NAME], 0
        announce: Callable[[Announcement], None] | None = None
        reducer: ReducerApp | None = None
        if config.role == "all":
            shares = reducer_config(config.limits, config.shared_dir, config.connections)
            if (listener := tcp_listener(config, identity)) is not None:
                stack.callback(listener.close)
                tcp_port = listener.port
            reducer = build_reducer(shares, registry, secret, refusals, exchanges, listener)
            stack.push_async_callback(reducer.close)
            reducer.add_to(server)
            services.append(reducer_app.SERVICE_NAME)
            # The coordinator of this process announces before it sends: nothing has to wait for it.
            reducer.announced.follow(config.run_id, patience_s=0.0)
            announce = partial(reducer.announced.take, config.run_id)
        feed = BoardFeed(
            facts=_facts(config), paths=lambda: _paths(config, reducer.paths if reducer else ())
        )
        observers: list[LineObserver] = [feed, place, *_spans(config.run_id, stack)]
        settings = replace(settings, metrics_url=metrics_url, tcp_port=tcp_port, announce=announce)
        coordinator = _coordinator(settings, registry, secret, (refusals, exchanges), observers)
        stack.push_async_callback(coordinator.close)
        if reducer is not None:
            reducer.report_faults(config.run_id, coordinator.round_faulted)
        metrics.discover(config.run_id, coordinator.scraped_workers, coordinator.scraped_reducers)
        gate = BoardGate(
            coordinator.access,
            config.board_bind,
            encrypts=identity is not None,
            count=refusals.of("server"),
        )
        history = RunHistory(config.run_id, config.folder)
        outputs = config.folder if config.keeps_output else None
        board = board_on(metrics, coordinator, feed, gate, history, outputs)
        await stack.enter_async_context(board)
        coordinator.add_to(server)
        health = await stack.enter_async_context(introducing(server, services))
        coordinator.report_newcomers(partial(_report_readiness, health))
        # The coordinator owns the line before the first call can arrive.
        await coordinator.start()
        await server.start()
        # On loopback the board answers only to names of this host.
        local, board_host = reachable(config.bind), config.board_bind
        board_url = gate.url(
            board_host if is_loopback(board_host) else host_in(public), metrics.port
        )
        _search_folder(config, coordinator)
        yield (
            coordinator,
            ServiceAddress(
                address=f"{local}:{port}",
                metrics_url=metrics_url,
                board_url=board_url,
                run_id=config.run_id,
                journal=str((config.folder / JOURNAL).absolute()),
                pid=os.getpid(),
                advertised=public,
            ),
        )


def _facts(config: ServeConfig) -> LineFacts:
    """What the board shows beside what the line does."""
    up, down = config.line.encoding, config.line.answer_encoding
    return LineFacts(
        host=socket.gethostname(),
        script=config.script,
        encoding=up if down in ("same", up) else f"{up}, averages {down}",
        keeps_output=config.keeps_output,
        docs_url=config.docs_url and config.docs_url.rstrip("/") + "/",
    )


_PATHS = {
    DataPath.SHARED_MEMORY: "shared memory",
    DataPath.TCP: "TCP lanes",
    DataPath.WIRE: "gRPC",
}


def _paths(config: ServeConfig, taken: Collection[DataPath]) -> list[str]:
    """The ways of gradients in words; those to reducers in other processes are not known here."""
    if config.line.topology is Topology.RING:
        return ["a ring"]
    return [text for path, text in _PATHS.items() if path in taken]


def _search_folder(config: ServeConfig, coordinator: Coordinator) -> None:
    """Says what a run that had begun before can go on from, unless that was chosen already."""
    loop, at_step = asyncio.get_running_loop(), coordinator.status().step
    if not at_step or config.resume_from is not None:
        return

    def report(folder: str, step: int | None, damaged: tuple[str, ...]) -> None:
        with suppress(RuntimeError):  # The service has stopped meanwhile.
            loop.call_soon_threadsafe(coordinator.folder_searched, folder, step, damaged)

    search_folder(config.run_id, config.folder, at_step, report)


def _report_readiness(health: HealthService, ready: bool) -> None:  # noqa: FBT001 - a callback
    health.set(coordinator_app.SERVICE_NAME, ready=ready)


def coordinator_config(config: ServeConfig) -> CoordinatorConfig:
    """The configuration of the coordinator that `andon serve` runs, without its `metrics_url`.

    Raises:
        UsageError: the file of withdrawn tokens can't be used.
    """
    if config.withdrawn_file is not None:
        try:
            Withdrawn(config.withdrawn_file).names()
        except WithdrawnUnreadable as error:
            raise UsageError(f"--withdrawn-file: {error}") from error
    return CoordinatorConfig(
        run_id=config.run_id,
        journal=config.folder / JOURNAL,
        line=config.line,
        expect_workers=config.workers,
        chunk_elements=config.limits.chunk_elements,
        own_reducer=config.role == "all",
        registers=config.secret_file is not None,
        resume_from=config.resume_from,
        join_s=config.limits.first_message_timeout_s,
        shared_dir=config.shared_dir,
        token=config.access.run_token,
        operator_token=config.access.operator_token,
        viewer_token=config.access.viewer_token,
        withdrawn_file=config.withdrawn_file,
    )


def _spans(run_id: str, stack: AsyncExitStack) -> list[LineSpans]:
    """Exports the line's spans until the stack closes, if the environment asks for it."""
    wanted = spans_wanted(os.environ)
    provider = tracer_provider(run_id, os.environ) if wanted else None
    if provider is None:
        return []
    spans = LineSpans(provider.get_tracer("andon"))

    async def close() -> None:
        spans.close()
        # What a collector does not take by then is lost. A daemon: it does not delay the exit.
        sending = threading.Thread(target=provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, GRACE_S)

    stack.push_async_callback(close)
    return [spans]


def _coordinator(
    settings: CoordinatorConfig,
    registry: CollectorRegistry,
    secret: bytes,
    counters: tuple[RefusalCounter, ExchangeDurations],
    observers: Sequence[LineObserver],
) -> Coordinator:
    try:
        return build_coordinator(settings, registry, secret, *counters, observers=observers)
    except JournalError as error:
        raise CommandError(str(error)) from error


def _greeting(config: ServeConfig, address: ServiceAddress) -> str:
    count, reducers = config.workers, config.line.reducers
    more = "" if reducers == 1 and config.role == "all" else f" and {reducers} reducers"
    board = (
        f"board {address.board_url}  " if address.board_url else "no board without --token-file  "
    )
    return (
        f"run {address.run_id}  coordinator {address.advertised}  {board}"
        f"metrics {address.metrics_url}  "
        f"waiting for {count} worker{'' if count == 1 else 's'}{more}"
    )
