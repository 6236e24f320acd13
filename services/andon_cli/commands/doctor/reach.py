"""Reach: whether a line can be reached from here: its host, its port, its health, its services.

Only asks; a run that is there is not disturbed.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from andon.host.access import CLEAR, Access
from andon.host.errors import CommandError, UsageError
from andon.host.tls import KEY, TlsError, open_aio_channel, read_identity, readable_by_others
from andon.host.tls_diagnosis import check_own_certificate, diagnose_tls
from andon_cli.client import LineClient, LineStatus
from andon_cli.commands.doctor.findings import Finding, fail, ok, warn
from andon_cli.drawing.texts import halted_line

__all__ = ["check_access", "check_lanes", "check_line", "judge_status"]

_PATIENCE_S = 5.0
_PREAMBLE_BYTES = 64
_SERVICE = "andon.v1.Coordinator"


async def check_line(address: str, access: Access = CLEAR) -> list[Finding]:
    """Runs one check after another, up to the first that fails."""
    unreachable = await _knock(address)
    if unreachable is not None:
        return [unreachable]
    trouble = await asyncio.to_thread(diagnose_tls, address, access.tls_dir)
    if trouble:
        return [fail("tls", trouble, "see docs/security.md")]
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with open_aio_channel(address, options, access.tls_dir) as channel:
        findings = await _health(channel, address)
        if findings[-1].level != "fail":
            findings += await _services(channel, address)
    if findings[-1].level == "fail":
        return findings
    try:
        async with LineClient(address, access=access) as client:
            status = await client.status()
    except CommandError as error:
        return [
            *findings,
            fail("line", f"the coordinator does not answer ({error})", "see its log"),
        ]
    reached = [await _reach(each.address) for each in status.reducers if each.address]
    lanes = await check_lanes(address.rpartition(":")[0], status.tcp_port)
    return [*findings, judge_status(status), *lanes, *reached]


async def check_lanes(host: str, port: int) -> list[Finding]:
    """Whether gradients can take TCP lanes from here, and what happens if not.

    Shows the listener a preamble of zeros: it hangs up without a byte, and nobody notices.

    Args:
        host: as the line was reached, which is where its lanes are.
        port: that of its lanes; 0: it offers none.
    """
    if not port:
        return [ok("lanes", "the service offers no TCP lanes: gradients travel over gRPC")]
    where = f"{host}:{port}"
    unreachable = await _knock(where, "lanes")
    if unreachable is None and not await _hangs_up(host.strip("[]"), port):
        unreachable = fail("lanes", f"what listens at {where} is no listener of TCP lanes", "-")
    if unreachable is None:
        return [ok("lanes", f"{where} can be reached: gradients take TCP lanes")]
    return [
        warn(
            "lanes",
            f"no TCP lanes from here: {unreachable.fact}",
            "training works, and gradients travel over gRPC, which takes more processor time; open "
            "the port to this host (the service's --tcp-port fixes its number)",
        )
    ]


async def _hangs_up(host: str, port: int) -> bool:
    """Whether a listener answers a preamble that proves nothing as one of lanes does."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(bytes(_PREAMBLE_BYTES))
            said = await reader.read(1)
            writer.close()
    except ConnectionResetError:
        return True
    except (OSError, TimeoutError):
        return False
    return not said


def judge_status(status: LineStatus) -> Finding:
    """The finding on the status of a line that was reached."""
    said = f"run {status.run_id} is {status.state} at step {status.step}, {status.live} live"
    if status.halt is not None:
        evidence = halted_line(status.halt).rstrip(".")
        return warn("line", f"run {status.run_id}: {evidence}", "answer it with `andon resume`")
    return ok("line", said)


async def _reach(address: str) -> Finding:
    """Checks whether a reducer can be reached, as every worker must be able to."""
    unreachable = await _knock(address, "reducer")
    if unreachable is not None:
        return unreachable
    return ok("reducer", f"{address} can be reached")


async def _knock(address: str, check: str = "line") -> Finding | None:
    """Opens a TCP connection, to tell apart the causes that gRPC calls UNAVAILABLE."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(_PATIENCE_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except TimeoutError:
        why = f"{address} does not answer within {_PATIENCE_S:.0f} s"
        remedy = "a firewall drops the packets, or the host is down: open the port to this host"
    except socket.gaierror:
        why = f"there is no host {host}"
        remedy = "check the name, or pass the host's IP address"
    except ConnectionRefusedError:
        why = f"nothing listens at {address}"
        remedy = "start the line there (`andon serve --bind 0.0.0.0 --tls DIR`), or check the port"
        if check == "reducer":
            remedy = "start it again, with --advertise if workers know its host by another name"
    except OSError as error:
        why = f"{address} can't be reached ({error.strerror})"
        remedy = "check the network between the hosts"
    else:
        writer.close()
        return None
    return fail(check, why, remedy)


async def _health(channel: grpc.aio.Channel, address: str) -> list[Finding]:
    stub = health_pb2_grpc.HealthStub(channel)
    times = []
    answer = None
    try:
        for _ in range(5):
            began = time.perf_counter()
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE_S)
            times.append(time.perf_counter() - began)
    except grpc.aio.AioRpcError as error:
        why = f"what listens at {address} does not report gRPC health ({error.code().name.lower()})"
        return [fail("health", why, "it is another program: check the port")]
    assert answer is not None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return [
            fail("health", f"{address} is {name}", "it is shutting down: wait for the next one")
        ]
    middle = sorted(times)[len(times) // 2] * 1000
    return [ok("health", f"{address} is SERVING, {middle:.1f} ms for a small message and back")]


async def _services(channel: grpc.aio.Channel, address: str) -> list[Finding]:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            await call.done_writing()
            answer = await call.read()
    except (grpc.aio.AioRpcError, TimeoutError):
        # A server without reflection may still be a coordinator: its status will show.
        return [
            warn("services", f"{address} lists no services", "only grpcurl and the like need that")
        ]
    finally:
        call.cancel()
    if answer is grpc.aio.EOF:
        return [
            warn("services", f"{address} lists no services", "only grpcurl and the like need that")
        ]
    names = {service.name for service in answer.list_services_response.service}
    if _SERVICE not in names:
        why = f"{address} serves no {_SERVICE}"
        remedy = "it is another program, a reducer, or an older Andon: check the port"
        return [fail("services", why, remedy)]
    served = sorted(name for name in names if name.startswith("andon."))
    return [ok("services", f"{address} serves {' and '.join(served)}")]


_DAY_S = 86_400
_SOON_DAYS = 14


def check_access(access: Access) -> list[Finding]:
    """Checks the certificates and tokens that were given, if any were."""
    findings = [] if access.tls_dir is None else _certificates(access.tls_dir)
    for name, path, read in (
        ("token", access.token_file, lambda: access.run_token),
        ("operator token", access.operator_token_file, lambda: access.operator_token),
        ("viewer token", access.viewer_token_file, lambda: access.viewer_token),
    ):
        if path is not None:
            findings.append(_token(name, path, read))
    return findings


def _certificates(folder: Path) -> list[Finding]:
    try:
        identity = read_identity(folder)
    except TlsError as error:
        return [fail("tls", f"{folder} can't be used", str(error))]
    findings = []
    if identity.key is not None and readable_by_others(folder / KEY):
        findings.append(
            warn("tls", f"every user may read {folder / KEY}", f"chmod 600 {folder / KEY}")
        )
    if identity.pair is None or identity.ca is None:
        lacks = "tls.crt" if identity.pair is None else "ca.crt"
        why = (
            f"{folder} has no {lacks}: it works for {'clients' if identity.ca else 'servers'} only"
        )
        return [*findings, warn("tls", why, "make all three files with `andon certs`")]
    own = check_own_certificate(folder)
    if own.problem:
        return [*findings, fail("tls", own.problem, "see docs/security.md")]
    days = int(((own.valid_until_s or 0.0) - time.time()) // _DAY_S)
    said = f"{folder} holds a certificate and its CA, valid for {days} more days"
    if days < _SOON_DAYS:
        return [*findings, warn("tls", said, "make new ones with `andon certs --renew`")]
    return [*findings, ok("tls", said)]


def _token(name: str, path: Path, read: Callable[[], bytes]) -> Finding:
    try:
        read()
    except UsageError as error:
        return fail(name, f"{path} can't be used", str(error))
    if readable_by_others(path):
        return warn(name, f"every user may read {path}", f"chmod 600 {path}")
    return ok(name, f"{path} holds one")
