"""Errors of the control plane: each kind has one reason, which has one gRPC status.

What went wrong inside is logged and never sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc

from andon.protocol.reasons import Reason
from andon.wire.statuses import status_of as packed
from andon_coordinator.core.effects import JoinRefusal

__all__ = [
    "InternalError",
    "InvalidMessage",
    "JoinRefused",
    "LineError",
    "OperatorRefused",
    "OperatorTokenWrong",
    "Overloaded",
    "ProofWrong",
    "RegistrationOff",
    "RejoinNeeded",
    "ServiceLeaving",
    "TokenWrong",
    "TooLarge",
    "VersionDiffers",
    "WrongRun",
    "status_of",
]


class LineError(Exception):
    """What ends a call with a status other than OK."""

    kind: ClassVar[Reason]

    @property
    def reason(self) -> Reason:
        """Why; it decides the status that the call ends with."""
        return self.kind

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata of its ErrorInfo."""
        return {}


class InvalidMessage(LineError):
    """A peer broke a MUST of the protocol."""

    kind = Reason.INVALID_MESSAGE


class WrongRun(LineError):
    """Another run is served here."""

    kind = Reason.WRONG_RUN


class OperatorRefused(LineError):
    """What a person asks for can't be done now."""

    kind = Reason.OPERATOR_REFUSED


class RegistrationOff(LineError):
    """This line takes no reducers but the one of its own process."""

    kind = Reason.REGISTRATION_OFF


class VersionDiffers(LineError):
    """A reducer speaks another version of the protocol."""

    kind = Reason.VERSION


class TokenWrong(LineError):
    """A call shows no token of this line."""

    kind = Reason.TOKEN


class ProofWrong(TokenWrong):
    """A reducer does not have the run's secret."""


class OperatorTokenWrong(LineError):
    """A call that only operators may make does not show their token."""

    kind = Reason.OPERATOR_TOKEN


class RejoinNeeded(LineError):
    """The stream is over, and the worker (or reducer) must come again."""

    kind = Reason.REJOIN_NEEDED


class Overloaded(LineError):
    """More streams are open than the line could ever use."""

    kind = Reason.TOO_MANY_STREAMS


class TooLarge(LineError):
    """A message has more of something than there may be."""

    kind = Reason.TOO_LARGE


class ServiceLeaving(LineError):
    """The coordinator is going away; a worker joins again elsewhere or later."""

    kind = Reason.SERVICE_LEAVING


class InternalError(LineError):
    """The coordinator failed; its log says how."""

    kind = Reason.INTERNAL


class JoinRefused(LineError):
    """The line refuses a join, for the refusal's reason."""

    def __init__(self, refusal: JoinRefusal) -> None:
        """Speaks for `refusal`."""
        super().__init__(refusal.message)
        self.refusal = refusal

    @property
    def reason(self) -> Reason:
        """The refusal's reason."""
        return self.refusal.reason

    @property
    def metadata(self) -> Mapping[str, str]:
        """What differs, at the worker and on the line."""
        return {
            "component": self.refusal.component,
            "mine": self.refusal.mine,
            "theirs": self.refusal.theirs,
        }


def status_of(error: LineError) -> grpc.Status:
    """The gRPC status of an error, with its ErrorInfo in the trailers."""
    return packed(error.reason, str(error), error.metadata)
