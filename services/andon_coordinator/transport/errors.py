"""Errors of the control plane, and the one table that maps them to gRPC status.

Every error that a peer sees has a `google.rpc.ErrorInfo` of domain "andon": its reason is stable,
its metadata holds what differs. What went wrong inside is logged and never sent.
"""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from andon.texts import clipped
from andon_coordinator.core.effects import Refusal, RefusalReason

__all__ = [
    "DOMAIN",
    "JOIN_REFUSALS",
    "EnlistingOff",
    "InternalError",
    "InvalidMessage",
    "JoinRefused",
    "LineError",
    "OperatorRefused",
    "Overloaded",
    "ProofWrong",
    "RejoinNeeded",
    "ServiceLeaving",
    "TooLarge",
    "VersionDiffers",
    "WrongRun",
    "status_of",
]

DOMAIN = "andon"

_MAX_DIFFERENCE_BYTES = 500
"""Bytes of one text of what differs: trailers, percent-encoded, must stay below 8 KiB."""


class LineError(Exception):
    """What ends a call with a status other than OK."""

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]

    @property
    def status_code(self) -> grpc.StatusCode:
        """The status that the call ends with."""
        return self.code

    @property
    def status_reason(self) -> str:
        """The reason of its ErrorInfo."""
        return self.reason

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of its ErrorInfo."""
        return {}


class InvalidMessage(LineError):
    """A peer broke a MUST of the protocol."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_MESSAGE"


class WrongRun(LineError):
    """Another run is served here."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "WRONG_RUN"


class OperatorRefused(LineError):
    """What a person asks for can't be done now."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "OPERATOR_REFUSED"


class EnlistingOff(LineError):
    """This line takes no reducers but the one of its own process."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ENLISTING_OFF"


class VersionDiffers(LineError):
    """A reducer speaks another version of the protocol."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "VERSION"


class ProofWrong(LineError):
    """A reducer does not have the run's secret."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "TOKEN"


class RejoinNeeded(LineError):
    """The stream is over, and the worker (or reducer) must come again."""

    code = grpc.StatusCode.ABORTED
    reason = "REJOIN_NEEDED"


class Overloaded(LineError):
    """More streams are open than the line could ever use."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_STREAMS"


class TooLarge(LineError):
    """A message has more of something than there may be."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_LARGE"


class ServiceLeaving(LineError):
    """The coordinator is going away; a worker joins again elsewhere or later."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SERVICE_LEAVING"


class InternalError(LineError):
    """The coordinator failed; its log says how."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"


JOIN_REFUSALS: dict[RefusalReason, grpc.StatusCode] = {
    RefusalReason.WRONG_RUN: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.LAYOUT_DIFFERS: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.PLAN_DIFFERS: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.DATASET_TOO_SMALL: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.CAPABILITY: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.SLOT: grpc.StatusCode.ALREADY_EXISTS,
    RefusalReason.FULL: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    RefusalReason.COMPLETE: grpc.StatusCode.FAILED_PRECONDITION,
}
"""The status of each reason to refuse a join; the reason's name is that of its ErrorInfo."""


class JoinRefused(LineError):
    """The line refuses a join. Status and reason are those of the refusal."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "JOIN_REFUSED"

    def __init__(self, refusal: Refusal) -> None:
        """Speaks for `refusal`."""
        super().__init__(refusal.message)
        self.refusal = refusal

    @property
    def status_code(self) -> grpc.StatusCode:
        """The status of the refusal's reason."""
        return JOIN_REFUSALS[self.refusal.reason]

    @property
    def status_reason(self) -> str:
        """The refusal's reason."""
        return self.refusal.reason.name

    @property
    def metadata(self) -> dict[str, str]:
        """What differs, at the worker and on the line."""
        differing = {
            "component": self.refusal.component,
            "mine": self.refusal.mine,
            "theirs": self.refusal.theirs,
        }
        return {
            name: clipped(text, _MAX_DIFFERENCE_BYTES) for name, text in differing.items() if text
        }


def status_of(error: LineError) -> grpc.Status:
    """The gRPC status of an error, with its ErrorInfo in the trailers."""
    info = error_details_pb2.ErrorInfo(
        reason=error.status_reason, domain=DOMAIN, metadata=error.metadata
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    number = code_pb2.Code.Value(error.status_code.name)
    status = status_pb2.Status(code=number, message=clipped(str(error)), details=[detail])
    mapped: grpc.Status = rpc_status.to_status(status)
    return mapped
