"""`andon serve`: one process with the coordinator, the reducer, health, reflection and metrics."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from andon.host.telemetry import ExchangeDurations, RefusalCounter
from andon.host.tether import tie_to_parent
from andon.protocol.encoding import Encoding
from andon.protocol.run_settings import Liveness, Policy, Topology
from andon_cli.config import ServeConfig
from andon_cli.interrupts import Interrupts
from andon_cli.runs import JOURNAL, ServiceAddress, make_run_dir
from andon_coordinator import app as coordinator_app
from andon_coordinator.app import Coordinator, build_coordinator, server_options
from andon_coordinator.config import CoordinatorConfig
from andon_coordinator.transport.store import JournalError
from andon_reducer import app as reducer_app
from andon_reducer.app import build_reducer
from andon_server.errors import ConsoleError, ExitCode
from andon_server.health import HealthService
from andon_server.hosts import reachable
from andon_server.logs import logging_to
from andon_server.metrics import MetricsEndpoint
from andon_server.secret import read_secret
from andon_server.serving import (
    GRACE_S,
    guarded_server,
    identified,
    introducing,
    listen,
    reducer_settings,
)

__all__ = ["serve"]


async def serve(config: ServeConfig) -> int:
    """Serves a line until it is told to end, or until it is complete if so configured.

    Raises:
        ConsoleError: a port is taken, or the journal can't be used.
    """
    if config.parent_pid is not None and not tie_to_parent(config.parent_pid, signal.SIGTERM):
        return ExitCode.INTERRUPTED
    make_run_dir(config.run_dir)
    with (
        logging_to(config.run_dir / "service.log", quiet=config.announce),
        Interrupts() as interrupts,
    ):
        async with _serving(config) as (coordinator, address):
            address.write(config.run_dir)
            print(address.to_json() if config.announce else _greeting(config, address), flush=True)
            await _until_over(coordinator, interrupts, until_complete=config.until_complete)
            interrupts.let_next_kill()
    return ExitCode.COMPLETE


async def _until_over(
    coordinator: Coordinator, interrupts: Interrupts, *, until_complete: bool
) -> None:
    """Waits for a signal, for the coordinator's failure, or for the line to be complete."""
    over = asyncio.create_task(coordinator.wait())
    stopping = asyncio.create_task(interrupts.first.wait())
    try:
        await asyncio.wait({over, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            over.result()  # Raises if the coordinator failed.
            if not until_complete:
                await stopping
    finally:
        over.cancel()
        stopping.cancel()


@asynccontextmanager
async def _serving(config: ServeConfig) -> AsyncIterator[tuple[Coordinator, ServiceAddress]]:
    """Serves while it is entered; what was started last is stopped first."""
    registry, secret = CollectorRegistry(), read_secret(config.secret_file)
    refusals, exchanges = RefusalCounter(registry), ExchangeDurations(registry)
    host = reachable(config.bind)
    async with AsyncExitStack() as stack:
        identity = stack.enter_context(identified(config.access, registry))
        options = server_options(Liveness(lease_s=config.liveness_s))
        server = guarded_server(options, config.limits, refusals)
        port = listen(server, config.bind, config.port, "the line", identity)
        metrics = stack.enter_context(MetricsEndpoint(config.bind, config.metrics_port, registry))
        stack.push_async_callback(server.stop, GRACE_S)
        services = [coordinator_app.SERVICE_NAME]
        if config.role == "all":
            shares = reducer_settings(config.limits, config.shared_dir)
            reducer = build_reducer(shares, registry, secret, refusals, exchanges)
            stack.push_async_callback(reducer.close)
            reducer.add_to(server)
            services.append(reducer_app.SERVICE_NAME)
        settings = _settings(config, metrics.url(host))
        # On a ring nothing of a step goes over the reducer.
        rings = exchanges if config.topology is Topology.RING else None
        coordinator = _coordinator(settings, registry, secret, refusals, rings)
        stack.push_async_callback(coordinator.close)
        metrics.discover(config.run_id, coordinator.scraped_workers, coordinator.scraped_reducers)
        coordinator.add_to(server)
        health = await stack.enter_async_context(introducing(server, services))
        coordinator.tell_newcomers(partial(_tell, health))
        await coordinator.start()
        await server.start()
        yield (
            coordinator,
            ServiceAddress(
                address=f"{host}:{port}",
                metrics_url=metrics.url(host),
                run_id=config.run_id,
                journal=str((config.run_dir / JOURNAL).absolute()),
                pid=os.getpid(),
            ),
        )


def _tell(health: HealthService, wanted: bool) -> None:  # noqa: FBT001 - told by position
    health.set(coordinator_app.SERVICE_NAME, ready=wanted)


def _settings(config: ServeConfig, metrics_url: str) -> CoordinatorConfig:
    return CoordinatorConfig(
        run_id=config.run_id,
        journal=config.run_dir / JOURNAL,
        journal_sync=config.journal_sync,
        expect_workers=config.expect_workers,
        min_workers=config.min_workers,
        max_workers=config.max_workers,
        expect_reducers=config.expect_reducers,
        own_reducer=config.role == "all",
        registers=config.secret_file is not None,
        policy=Policy(
            chunk_elements=config.limits.chunk_elements,
            encoding=Encoding[config.encoding.upper()],
            digest_every=config.digest_every,
            max_steps=config.max_steps,
            gradient_norm=config.grad_norm_spike is not None,
            topology=config.topology,
        ),
        loss_spike=config.loss_spike,
        gradient_norm_spike=config.grad_norm_spike,
        liveness=Liveness(lease_s=config.liveness_s),
        forming_timeout_s=config.forming_timeout_s,
        straggler_timeout_s=config.straggler_timeout_s,
        resume_from=config.resume_from,
        join_s=config.limits.first_message_s,
        metrics_url=metrics_url,
        token=config.access.run_token,
        operator_token=config.access.operator_token,
    )


def _coordinator(
    settings: CoordinatorConfig,
    registry: CollectorRegistry,
    secret: bytes,
    refusals: RefusalCounter,
    exchanges: ExchangeDurations | None,
) -> Coordinator:
    try:
        return build_coordinator(settings, registry, secret, refusals, exchanges)
    except JournalError as error:
        raise ConsoleError(str(error)) from error


def _greeting(config: ServeConfig, address: ServiceAddress) -> str:
    count, reducers = config.expect_workers, config.expect_reducers
    more = "" if reducers == 1 and config.role == "all" else f" and {reducers} reducers"
    return (
        f"run {address.run_id}  coordinator {address.address}  metrics {address.metrics_url}  "
        f"waiting for {count} worker{'' if count == 1 else 's'}{more}"
    )
