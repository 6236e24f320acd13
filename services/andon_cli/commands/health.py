"""`andon health`: asks a service whether it is SERVING, for the health checks of containers.

Such a check runs every few seconds beside the training. So this module imports only gRPC, and
writes the two short messages of grpc.health.v1 by hand.
"""

from __future__ import annotations

import json

import grpc

from andon.host.errors import CommandError, ExitCode
from andon.host.tls import TlsError, open_channel
from andon.host.tls_diagnosis import diagnose_tls
from andon_cli.questions import HealthConfig
from andon_cli.target import find_target

__all__ = ["show_health"]

_CHECK = "/grpc.health.v1.Health/Check"
_STATES = {
    b"": "UNKNOWN",
    b"\x08\x00": "UNKNOWN",
    b"\x08\x01": "SERVING",
    b"\x08\x02": "NOT_SERVING",
    b"\x08\x03": "SERVICE_UNKNOWN",
}
"""HealthCheckResponse.status, field 1, as it is on the wire."""


def show_health(config: HealthConfig) -> int:
    """Asks once. Returns 0 if the service is SERVING, else 1: container tools know no other code.

    Raises:
        UsageError, LineUnreachable: there is nobody to ask, see `find_target`.
    """
    address = find_target(config.address, config.run).address
    try:
        state, problem = _ask(address, config)
    except CommandError as error:
        state, problem = "UNREACHABLE", str(error)
    if config.format == "json":
        told = {"address": address, "service": config.service, "state": state, "problem": problem}
        print(json.dumps(told))
    else:
        print(problem or f"{state} at {address}")
    return ExitCode.COMPLETE if state == "SERVING" else ExitCode.FAILED


def _request(service: str) -> bytes:
    """HealthCheckRequest. Field 1 is the service; without it, the process is meant."""
    name = service.encode()
    return b"\x0a%c%s" % (len(name), name) if name else b""


def _ask(address: str, config: HealthConfig) -> tuple[str, str]:
    """The state that a service reports, and what is wrong; empty if nothing is."""
    try:
        channel = open_channel(address, [("grpc.enable_http_proxy", 0)], config.access.tls_dir)
    except TlsError as error:
        raise CommandError(str(error)) from error
    with channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            _CHECK, request_serializer=None, response_deserializer=None
        )
        try:
            answer = check(_request(config.service), timeout=config.timeout_s)
            state = _STATES.get(answer, "UNKNOWN")
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNIMPLEMENTED:
                return (
                    "UNKNOWN",
                    f"what listens at {address} does not report health: check the port",
                )
            if code is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN", f"{address} knows no such service: {error.details()}"
            if trouble := diagnose_tls(address, config.access.tls_dir):
                return "UNREACHABLE", trouble
            detail = code.name.lower().replace("_", " ")
            return "UNREACHABLE", (
                f"nothing answers at {address} ({detail}): start it with `andon serve`, or "
                "pass --address"
            )
    if state == "SERVING":
        return state, ""
    if config.service:
        return (
            state,
            f"{state} at {address}: {config.service} takes no new workers, or is shutting down",
        )
    return state, f"{state} at {address}: it is shutting down, or has not started yet"
