"""Statuses: how a call that can't go on is ended."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from andon.protocol.reasons import Reason
from andon.wire.statuses import status_of
from andon_reducer.core.effects import Refusal

__all__ = ["Refused", "abort"]


class Refused(Exception):
    """A call can't go on."""

    def __init__(self, reason: Reason, message: str) -> None:
        """Carries the refusal up to the end of the call."""
        super().__init__(message)
        self.refusal = Refusal(reason, message)


async def abort(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal) -> NoReturn:
    """Ends a call with the status of a refusal."""
    await context.abort_with_status(status_of(refusal.reason, refusal.message))
    raise AssertionError("abort_with_status returned")
