"""Statuses: the one table from what is wrong with a call to what gRPC says of it."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from andon_reducer.core.effects import Refusal, RefusalReason

__all__ = ["STATUS", "Refused", "abort"]

STATUS: dict[RefusalReason, grpc.StatusCode] = {
    RefusalReason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalReason.NOT_OFFERED: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalReason.TOO_MANY_STREAMS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalReason.MEMORY_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalReason.TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    RefusalReason.PEER_GONE: grpc.StatusCode.ABORTED,
    RefusalReason.CLOSING: grpc.StatusCode.UNAVAILABLE,
    RefusalReason.INTERNAL: grpc.StatusCode.INTERNAL,
}


class Refused(Exception):
    """A call can't go on."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        """Carries the refusal up to the end of the call."""
        super().__init__(message)
        self.refusal = Refusal(reason, message)


async def abort(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal) -> NoReturn:
    """Ends a call with the status of a refusal, and an ErrorInfo for programs."""
    code = STATUS[refusal.reason]
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(domain="andon", reason=refusal.reason.value))
    status = status_pb2.Status(code=code.value[0], message=refusal.message, details=[info])
    trailer = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, refusal.message, trailer)
    raise AssertionError("abort returned")
