"""Serving: what every service has beside its own calls: a port, limits, health, reflection."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from wsgiref.types import WSGIApplication

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as reflection_pb
from prometheus_client import CollectorRegistry

from andon.host.access import Access, token_of
from andon.host.endpoint import EndpointLimits
from andon.host.errors import CommandError, UsageError
from andon.host.logs import LogEvent
from andon.host.metrics import MetricsApp, MetricsEndpoint, MetricsGuard
from andon.host.settings import at_port
from andon.host.telemetry import HandshakeCounter, RefusalCounter
from andon.host.tls import ServerIdentity, TlsError, add_port, host_of
from andon.host.tls_diagnosis import is_for_another_host
from andon.host.web_names import listed_names, own_names
from andon.protocol.tokens import MIN_SECRET_BYTES
from andon.tcp.listening import TcpListener
from andon.v1 import ring_pb2 as _ring_pb2  # noqa: F401 - reflection describes what is imported
from andon_reducer.config import ReducerConfig
from andon_server.admission import Admission
from andon_server.board.app import MAX_VIEWERS
from andon_server.health import SERVICE_NAME, HealthService
from andon_server.limits import Limits, with_descriptors
from andon_server.settings import ServeConfig

__all__ = [
    "GRACE_S",
    "advertised",
    "end",
    "guarded_server",
    "host_in",
    "identity_of",
    "introducing",
    "listen",
    "metrics_endpoint",
    "reachable",
    "read_secret",
    "reducer_config",
    "reflect",
    "tcp_listener",
    "warn_of_other_name",
]

_log = logging.getLogger(__name__)

_CONNECTIONS = 32
"""HTTP connections beside those of viewers: scrapes, pages, and questions."""

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}
"""What listens on every address is reached at these, too."""

_YOUNG_OBJECTS = 50_000
"""So many new objects make Python look for rings among them; by itself it does so after 700.

A message makes dozens of objects, and a large line keeps many alive: with 1,024 workers the looks
took a third of the service's time. They find little, since a step makes no rings.
"""

GRACE_S = 2.0
"""How long open calls have to end when a service stops."""


def guarded_server(
    options: Sequence[tuple[str, int]], limits: Limits, refusals: RefusalCounter
) -> tuple[grpc.aio.Server, Admission]:
    """A server that keeps the limits and counts what it refuses. `options` are gRPC's."""
    limits = with_descriptors(limits)
    gc.set_threshold(_YOUNG_OBJECTS)
    admission = Admission(limits, refusals.of("server"))
    server = grpc.aio.server(
        interceptors=[admission],
        # gRPC takes the last of two equal options: the limits win over a service's own.
        options=[*options, *limits.channel_options()],
    )
    return server, admission


async def end(server: grpc.aio.Server) -> None:
    """Stops a server; its open calls have `GRACE_S` to end.

    A call may come in just that moment. The loop's turn afterwards is for its task: if the loop
    ended before that has begun, gRPC would write an error to the log.
    """
    await server.stop(GRACE_S)
    await asyncio.sleep(0)


def reducer_config(
    limits: Limits, shared_dir: Path | None, connections: int | None = None
) -> ReducerConfig:
    """The configuration of a reducer that keeps the limits."""
    return ReducerConfig(
        max_payload_bytes=limits.max_payload_bytes,
        chunk_elements=limits.chunk_elements,
        shared_dir=shared_dir,
        lane_connections=connections,
        opening_s=limits.first_message_timeout_s,
        limits=limits.reducer,
    )


@asynccontextmanager
async def introducing(
    server: grpc.aio.Server, services: Sequence[str]
) -> AsyncIterator[HealthService]:
    """Answers health checks and reflection for `services`; at the end reports all as going away."""
    health = HealthService(services)
    health.add_to(server)
    reflect(server, (*services, SERVICE_NAME))
    try:
        yield health
    finally:
        await health.leave()


def reflect(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Describes `services` to clients without .proto files, as grpc.reflection v1 and v1alpha.

    The library serves v1alpha. v1 has the same messages in another package, so that the same
    servicer answers both.
    """
    names = [f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")]
    v1 = descriptor_pb2.FileDescriptorProto()
    reflection_pb.DESCRIPTOR.CopyToProto(v1)
    v1.ClearField("options")
    v1.name = "grpc/reflection/v1/reflection.proto"
    text = text_format.MessageToString(v1).replace("v1alpha", "v1")
    descriptor_pool.Default().Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    servicer = reflection.aio.ReflectionServicer((*services, *names))
    calls = {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb.ServerReflectionResponse.SerializeToString,
        )
    }
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, calls) for name in names)
    )


def identity_of(access: Access, registry: CollectorRegistry) -> ServerIdentity | None:
    """The certificates that a service shows; None: it does not encrypt.

    Raises:
        UsageError: the folder of certificates can't be used.
    """
    handshakes = HandshakeCounter(registry)
    if access.tls_dir is None:
        return None
    try:
        return ServerIdentity(access.tls_dir, handshakes.begun)
    except TlsError as error:
        raise UsageError(str(error)) from error


def listen(
    server: grpc.aio.Server, bind: str, port: int, what: str, identity: ServerIdentity | None = None
) -> int:
    """Makes a server listen, over TLS if it has an identity. Returns the port.

    Raises:
        CommandError: the port is taken.
    """
    try:
        return add_port(server, f"{bind}:{port}", identity)
    except RuntimeError as error:
        raise CommandError(
            f"{what} can't be served on {bind}:{port}: end what listens there, "
            "or pass --port 0 for any free port"
        ) from error


def tcp_listener(config: ServeConfig, identity: ServerIdentity | None) -> TcpListener | None:
    """The port of a reducer's TCP lanes, over TLS if it has an identity; None: it has none.

    Raises:
        CommandError: the port is taken, or the host is not one of this machine's.
    """
    if config.tcp_port is None:
        return None
    try:
        return TcpListener(config.bind, config.tcp_port, identity=identity)
    except OSError as error:
        raise CommandError(
            f"TCP lanes can't be served on {config.bind}:{config.tcp_port} ({error.strerror}): "
            "end what listens there, or pass --tcp-port 0 for any free port"
        ) from error


def metrics_endpoint(
    config: ServeConfig,
    registry: CollectorRegistry,
    identity: ServerIdentity | None = None,
    others: WSGIApplication | None = None,
) -> MetricsEndpoint:
    """The metrics of a service, over HTTP; over TLS on the same port, if it has an identity.

    `others` answers every other path, until something is mounted.

    Raises:
        CommandError: the port is taken, or the host is not one of this machine's.
    """
    try:
        return MetricsEndpoint(
            config.bind,
            config.endpoint_port,
            MetricsApp(registry, _metrics_guard(config), others),
            tls=None if identity is None else identity.web_context,
            limits=EndpointLimits(connections=MAX_VIEWERS + _CONNECTIONS, of_one_host=MAX_VIEWERS),
        )
    except OSError as error:
        raise CommandError(
            f"metrics can't be served on {config.bind}:{config.endpoint_port} ({error.strerror}): "
            "end what listens there, or pass --metrics-port 0 for any free port"
        ) from error


def _metrics_guard(config: ServeConfig) -> MetricsGuard:
    """Who may read the metrics of a service.

    Raises:
        UsageError: a name is none, or the token can't be read.
    """
    try:
        names = listed_names(config.metrics_hosts)
    except ValueError as error:
        raise UsageError(f"--metrics-hosts {error}") from error
    public = host_of(at_port(config.advertise, 0)) if config.advertise else ""
    return MetricsGuard(
        names=own_names(config.bind, public, *names),
        token=token_of(config.metrics_token_file, "", "metrics-token"),
    )


def reachable(bind: str) -> str:
    """The host by which this machine reaches what listens on `bind`."""
    return _LOOPBACK.get(bind, bind)


def advertised(config: ServeConfig, port: int) -> str:
    """Where others reach the line that listens on `port`, as host:port."""
    usual = socket.gethostname() if config.bind in _LOOPBACK else config.bind
    return at_port(config.advertise or usual, port)


def warn_of_other_name(config: ServeConfig, address: str) -> None:
    """Warns if the certificate is not for the name by which others reach this service."""
    host, folder = host_of(address), config.access.tls_dir
    if folder is not None and is_for_another_host(folder, host):
        text = (
            f"others can't reach {address}: the certificate in {folder} is not for {host}. Make "
            f"one that names it (`andon certs {host}`), or give a name that it has by --advertise"
        )
        _log.warning(LogEvent("certificate_for_another_host", text, host=host))


def host_in(address: str) -> str:
    """The host of a host:port, as a URL has it: IPv6 keeps its brackets."""
    return address.rpartition(":")[0]


def read_secret(path: Path | None) -> bytes:
    """The secret that a coordinator shares with its reducers; without a file, a new one.

    White space around it in the file does not count.

    Raises:
        UsageError: the file can't be read, or its secret could be guessed.
    """
    if path is None:
        return secrets.token_bytes(32)
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(
            f"--secret-file {path} can't be read ({error.strerror}): make one with "
            f"`(umask 077; openssl rand -hex 32 > {path})`, and give the same file to every reducer"
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise UsageError(
            f"--secret-file {path} holds {len(secret)} bytes, and {MIN_SECRET_BYTES} are the "
            f"least: make one with `(umask 077; openssl rand -hex 32 > {path})`"
        )
    return secret
