"""The error of the control plane: what ends a call with a status other than OK.

What went wrong inside the coordinator is logged and never sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from andon.protocol.reasons import Reason
from andon.wire import statuses
from andon_coordinator.core.join_answers import JoinRefusal

__all__ = ["LineError"]


class LineError(Exception):
    """Ends a call; its reason decides the gRPC status."""

    def __init__(
        self, reason: Reason, message: str, metadata: Mapping[str, str] | None = None
    ) -> None:
        """`message` is for people: whose fault, the fact, the remedy. `metadata` adds details."""
        super().__init__(message)
        self.reason = reason
        self.metadata = metadata or {}

    @classmethod
    def of(cls, refusal: JoinRefusal) -> LineError:
        """The error that refuses a join."""
        return cls(
            refusal.reason,
            refusal.message,
            {"component": refusal.component, "mine": refusal.mine, "theirs": refusal.theirs},
        )

    def forget_frames(self) -> None:
        """Forgets the frames that it was raised through. Call it before the error is kept.

        These frames hold the peer's message, which may have megabytes. The object that keeps the
        error is in one of them, so both would live until Python looks for reference cycles.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None

    @property
    def status(self) -> grpc.Status:
        """The gRPC status, with its ErrorInfo in the trailers."""
        return statuses.status_of(self.reason, str(self), self.metadata)
