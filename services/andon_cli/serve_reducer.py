"""`andon serve --role reducer`: one process with a reducer, health, reflection and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import CollectorRegistry

from andon.host.telemetry import RefusalCounter
from andon.host.tether import tie_to_parent
from andon.protocol.run_settings import Liveness
from andon_cli.interrupts import Interrupts
from andon_cli.reducer_config import ReducerConfig
from andon_coordinator.app import server_options
from andon_reducer import app as reducer_app
from andon_reducer.app import build_reducer
from andon_reducer.transport.registration import Offer, RegistrationRefused, stay_registered
from andon_server.errors import ExitCode, LineRefused
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

__all__ = ["serve_reducer"]

_log = logging.getLogger(__name__)


async def serve_reducer(config: ReducerConfig) -> int:
    """Serves a reducer until it is told to end, or the run is over if so configured.

    Raises:
        ConsoleError: a port is taken, or the line does not take this reducer.
    """
    if config.parent_pid is not None and not tie_to_parent(config.parent_pid, signal.SIGTERM):
        return ExitCode.INTERRUPTED
    secret = read_secret(config.secret_file)
    with logging_to(None, quiet=config.announce), Interrupts() as interrupts:
        async with _serving(config, secret) as (address, metrics):
            metrics_url = metrics.url(reachable(config.bind))
            told = {
                "address": address,
                "metrics_url": metrics_url,
                "coordinator": config.coordinator,
                "pid": os.getpid(),
            }
            greeting = (
                f"reducer {address}  metrics {metrics_url}  for the line at {config.coordinator}"
            )
            print(json.dumps(told) if config.announce else greeting, flush=True)
            offer = Offer(
                coordinator=config.coordinator,
                address=address,
                secret=secret,
                run_id=config.run_id,
                # Who reaches the reducer under a name reaches its metrics under that name, too.
                metrics_address=f"{address.rpartition(':')[0]}:{metrics.port}",
                tls=config.access.tls,
            )
            await _until_over(config, offer, interrupts)
            interrupts.let_next_kill()
    return ExitCode.COMPLETE


async def _until_over(config: ReducerConfig, offer: Offer, interrupts: Interrupts) -> None:
    """Stays on the map until a signal, or the end of the run if that is the end."""

    def tell(run_id: str) -> None:
        _log.info("on the map of run %s as %s", run_id, offer.address)

    registering = asyncio.create_task(
        stay_registered(offer, until_complete=config.until_complete, tell=tell)
    )
    stopping = asyncio.create_task(interrupts.first.wait())
    try:
        await asyncio.wait({registering, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if registering.done():
            registering.result()
    except RegistrationRefused as refused:
        raise LineRefused(str(refused)) from refused
    finally:
        registering.cancel()
        stopping.cancel()
        await asyncio.gather(registering, stopping, return_exceptions=True)


@asynccontextmanager
async def _serving(
    config: ReducerConfig, secret: bytes
) -> AsyncIterator[tuple[str, MetricsEndpoint]]:
    """Serves while it is entered: where workers reach it, and its metrics."""
    registry = CollectorRegistry()
    refusals = RefusalCounter(registry)
    async with AsyncExitStack() as stack:
        identity = stack.enter_context(identified(config.access, registry))
        options = server_options(Liveness(lease_s=config.liveness_s))
        server = guarded_server(options, config.limits, refusals)
        port = listen(server, config.bind, config.port, "the reducer", identity)
        metrics = stack.enter_context(MetricsEndpoint(config.bind, config.metrics_port, registry))
        stack.push_async_callback(server.stop, GRACE_S)
        settings = reducer_settings(config.limits, config.shared_dir)
        reducer = build_reducer(settings, registry, secret, refusals)
        stack.push_async_callback(reducer.close)
        reducer.add_to(server)
        await stack.enter_async_context(introducing(server, (reducer_app.SERVICE_NAME,)))
        await server.start()
        yield config.address(port), metrics
