"""Statuses: a reason as a gRPC status with its details, and back.

The details are a `google.rpc.ErrorInfo`, and a `google.rpc.RetryInfo` if a client should wait
before it tries again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from andon.protocol.limits import clipped
from andon.protocol.reasons import DOMAIN, Reason

__all__ = ["FINAL_CODES", "ErrorDetails", "details_of", "is_final", "status_of"]

_MAX_DIFFERENCE_BYTES = 500
"""The most bytes of one text of metadata: all trailers together must stay below 8 KiB."""

FINAL_CODES = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
}
"""Statuses after which trying again can't help, if no reason says otherwise."""


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What a peer said about the error with which it ended a call."""

    name: str = ""
    """The reason's name, which this version may not know; empty if the peer is not Andon's."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Names and values that the reason refers to, such as what differs."""
    wait_s: float = 0.0
    """Seconds to wait at least before trying again."""

    @property
    def reason(self) -> Reason | None:
        """The reason, if this version knows it."""
        return Reason.__members__.get(self.name)


def status_of(
    reason: Reason, message: str, metadata: Mapping[str, str] | None = None
) -> grpc.Status:
    """The status of `reason`, for `abort_with_status`. Long texts are clipped, empty left out."""
    differing = {
        name: clipped(text, _MAX_DIFFERENCE_BYTES)
        for name, text in (metadata or {}).items()
        if text
    }
    info, retry = any_pb2.Any(), any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=differing))
    details = [info]
    if reason.retry_s:
        waiting = error_details_pb2.RetryInfo()
        waiting.retry_delay.FromMilliseconds(int(1000 * reason.retry_s))
        retry.Pack(waiting)
        details.append(retry)
    number = code_pb2.Code.Value(reason.code)
    status = status_pb2.Status(code=number, message=clipped(message), details=details)
    mapped: grpc.Status = rpc_status.to_status(status)
    return mapped


def details_of(error: grpc.RpcError) -> ErrorDetails:
    """The details of a call's error; empty ones if the peer is not Andon's."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the details contradict the call's own status
        status = None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    name, metadata, wait_s = "", {}, 0.0
    # Other details, and those of other domains, come from proxies and gRPC itself.
    for detail in status.details if status is not None else ():
        if detail.Unpack(info) and info.domain == DOMAIN:
            name, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            wait_s = max(0.0, retry.retry_delay.ToMilliseconds() / 1000)
    return ErrorDetails(name, metadata, wait_s)


def is_final(error: grpc.RpcError) -> bool:
    """Whether trying again can't help: as the reason says, or else as the code does."""
    reason = details_of(error).reason
    return error.code() in FINAL_CODES if reason is None else reason.retry_s is None
