"""`andon serve --role reducer`: one process with a reducer, health, reflection and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from andon.host.errors import ExitCode, LineRefused, UsageError
from andon.host.logs import LogEvent
from andon.host.metrics import MetricsEndpoint
from andon.host.settings import at_port
from andon.host.telemetry import RefusalCounter, new_registry
from andon.host.tether import tie_to_parent
from andon.protocol.run_settings import Liveness
from andon_coordinator.app import server_options
from andon_reducer import app as reducer_app
from andon_reducer.app import ReducerApp, build_reducer
from andon_reducer.transport.registration import ReducerOffer, RegistrationRefused, stay_registered
from andon_server.process import Interrupts, greet, logging_to
from andon_server.serving import (
    end,
    guarded_server,
    host_in,
    identity_of,
    introducing,
    listen,
    metrics_endpoint,
    read_secret,
    reducer_config,
    tcp_listener,
    warn_of_other_name,
)
from andon_server.settings import ServeConfig

__all__ = ["address_for_workers", "serve_reducer"]

_log = logging.getLogger(__name__)


async def serve_reducer(config: ServeConfig) -> int:
    """Serves a reducer until a signal, or until the run is over if so configured.

    Raises:
        CommandError: a port is taken, or the line refuses this reducer.
    """
    if config.parent_pid is not None and not tie_to_parent(config.parent_pid, signal.SIGTERM):
        return ExitCode.INTERRUPTED
    secret = read_secret(config.secret_file)
    with (
        logging_to(None, quiet=config.announce, form=config.log_format),
        Interrupts() as interrupts,
    ):
        async with _serving(config, secret) as (address, metrics, reducer):
            host = host_in(address)
            metrics_url = metrics.url(host)
            announcement = {
                "address": address,
                "metrics_url": metrics_url,
                "coordinator": config.coordinator,
                "pid": os.getpid(),
            }
            greeting = (
                f"reducer {address}  metrics {metrics_url}  for the line at {config.coordinator}"
            )
            text = json.dumps(announcement) if config.announce else greeting
            greet(text, needed=config.announce)
            offer = ReducerOffer(
                coordinator=config.coordinator,
                address=address,
                secret=secret,
                run_id=config.run_id,
                # Prometheus reaches the metrics under the name by which workers reach the reducer.
                metrics_address=f"{host}:{metrics.port}",
                tls=config.access.tls_dir,
            )
            await _until_over(config, offer, reducer, interrupts)
            interrupts.let_next_kill()
    return ExitCode.COMPLETE


async def _until_over(
    config: ServeConfig, offer: ReducerOffer, reducer: ReducerApp, interrupts: Interrupts
) -> None:
    """Stays registered until a signal, or until the run ends if so configured."""

    def tell(run_id: str) -> None:
        _log.info(LogEvent("registered", run=run_id, address=offer.address))

    registering = asyncio.create_task(
        stay_registered(offer, reducer.announced, until_complete=config.until_complete, tell=tell)
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
    config: ServeConfig, secret: bytes
) -> AsyncIterator[tuple[str, MetricsEndpoint, ReducerApp]]:
    """Serves while entered. Yields the address for workers, the metrics, and the reducer."""
    registry = new_registry()
    refusals = RefusalCounter(registry)
    async with AsyncExitStack() as stack:
        identity = identity_of(config.access, registry)
        options = server_options(Liveness(lease_s=config.line.liveness_s))
        server, admission = guarded_server(options, config.limits, refusals)
        port = listen(server, config.bind, config.line_port, "the reducer", identity)
        metrics = stack.enter_context(metrics_endpoint(config, registry))
        stack.push_async_callback(end, server)
        stack.callback(admission.leave)
        settings = reducer_config(config.limits, config.shared_dir, config.connections)
        if (listener := tcp_listener(config, identity)) is not None:
            stack.callback(listener.close)
        reducer = build_reducer(settings, registry, secret, refusals, listener=listener)
        stack.push_async_callback(reducer.close)
        reducer.add_to(server)
        await stack.enter_async_context(introducing(server, (reducer_app.SERVICE_NAME,)))
        await server.start()
        address = address_for_workers(config, port)
        warn_of_other_name(config, address)
        yield address, metrics, reducer


def address_for_workers(config: ServeConfig, port: int) -> str:
    """Where workers reach the reducer that listens on `port`, as host:port.

    Raises:
        UsageError: the address can't be found out.
    """
    if config.advertise:
        return at_port(config.advertise, port)
    if config.bind.strip("[]") in ("0.0.0.0", "::"):
        return f"{_host_towards(config.coordinator)}:{port}"
    return f"{config.bind}:{port}"


def _host_towards(coordinator: str) -> str:
    """This host's address on the way to the coordinator. Nothing is sent.

    Raises:
        UsageError: there is no such host, or no way to it.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connecting a datagram socket only picks the route, and with it our own address.
            probe.connect(place)
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"there is no way to {coordinator} ({error.strerror}): check the name, or say by "
            "--advertise HOST where workers reach this reducer"
        ) from error
    return f"[{found}]" if ":" in found else found
