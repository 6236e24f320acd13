"""Reasons: why a service ended a call with an error, as in its `google.rpc.ErrorInfo`.

A reason's name is stable, so that programs may decide by it. docs/errors has a page for each.
"""

from __future__ import annotations

import enum
from typing import Self

__all__ = ["DOMAIN", "Reason"]

DOMAIN = "andon"
"""The domain of every ErrorInfo."""


class Reason(enum.StrEnum):
    """Why a call ended; the value is the `reason` of its ErrorInfo."""

    code: str
    """Name of the gRPC status of every call that ends with this reason."""
    remedy: str
    """What to do about it, in one line."""
    retry_s: float | None
    """Seconds after which the same call may be tried again; None: trying again can't help."""

    def __new__(cls, value: str, code: str, remedy: str, retry_s: float | None = None) -> Self:
        """A member with its status, remedy and retry delay."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.code, member.remedy, member.retry_s = code, remedy, retry_s
        return member

    INVALID_MESSAGE = (
        "INVALID_MESSAGE",
        "INVALID_ARGUMENT",
        "fix the client: what it sent breaks a MUST of the protocol",
    )
    WRONG_RUN = (
        "WRONG_RUN",
        "NOT_FOUND",
        "name the run that is served there, or ask at another address",
    )
    LAYOUT_DIFFERS = (
        "LAYOUT_DIFFERS",
        "FAILED_PRECONDITION",
        "give all workers the same model: the metadata says which part differs",
    )
    PLAN_DIFFERS = (
        "PLAN_DIFFERS",
        "FAILED_PRECONDITION",
        "start all workers with the same script and the same arguments",
    )
    DATASET_TOO_SMALL = (
        "DATASET_TOO_SMALL",
        "FAILED_PRECONDITION",
        "use fewer workers, or more samples",
    )
    VERSION = (
        "VERSION",
        "FAILED_PRECONDITION",
        "install the same version of Andon at both ends",
    )
    CAPABILITY = (
        "CAPABILITY",
        "FAILED_PRECONDITION",
        "use a client that has the capability which the line needs",
    )
    SLOT = (
        "SLOT",
        "ALREADY_EXISTS",
        "ask for a free slot, or end the process that has this one",
    )
    FULL = (
        "FULL",
        "FAILED_PRECONDITION",
        "serve the line with a greater --max-workers",
    )
    COMPLETE = (
        "COMPLETE",
        "FAILED_PRECONDITION",
        "the run is over: start another one",
    )
    DROPPED = (
        "DROPPED",
        "FAILED_PRECONDITION",
        "ask an operator; a new process may join, with a token that is not the dropped worker's",
    )
    SAME_BITS = (
        "SAME_BITS",
        "FAILED_PRECONDITION",
        "leave out what the message names, or train without same bits",
    )
    ARITHMETIC_DIFFERS = (
        "ARITHMETIC_DIFFERS",
        "FAILED_PRECONDITION",
        "give the worker what the message names, or serve the line with --arithmetic tell",
    )
    OTHER_USE = (
        "OTHER_USE",
        "FAILED_PRECONDITION",
        "serve another run: one run is for workers of lines or for ranks of sessions",
    )
    WORLD_DIFFERS = (
        "WORLD_DIFFERS",
        "FAILED_PRECONDITION",
        "start all ranks with the same number of ranks",
    )
    TOKEN = (
        "TOKEN",
        "UNAUTHENTICATED",
        "use the secret of this run",
    )
    OPERATOR_TOKEN = (
        "OPERATOR_TOKEN",
        "PERMISSION_DENIED",
        "use the operators' token: the run's is not enough",
    )
    OPERATOR_REFUSED = (
        "OPERATOR_REFUSED",
        "FAILED_PRECONDITION",
        "look at the line's status: it can't do this now",
    )
    REGISTRATION_OFF = (
        "REGISTRATION_OFF",
        "FAILED_PRECONDITION",
        "serve the line with the --secret-file that the reducer has",
    )
    NOT_OFFERED = (
        "NOT_OFFERED",
        "FAILED_PRECONDITION",
        "use an operation and encodings that the reducer offers",
    )
    TOO_LARGE = (
        "TOO_LARGE",
        "RESOURCE_EXHAUSTED",
        "send smaller messages",
    )
    TOO_MANY_STREAMS = (
        "TOO_MANY_STREAMS",
        "RESOURCE_EXHAUSTED",
        "end streams that are not used, and try again",
        1.0,
    )
    MEMORY_LIMIT = (
        "MEMORY_LIMIT",
        "RESOURCE_EXHAUSTED",
        "try again when others have finished, or give the service more memory",
        1.0,
    )
    PEER_GONE = (
        "PEER_GONE",
        "ABORTED",
        "report it: the coordinator begins another transfer",
    )
    REJOIN_NEEDED = (
        "REJOIN_NEEDED",
        "ABORTED",
        "open a new stream",
        0.0,
    )
    SERVICE_LEAVING = (
        "SERVICE_LEAVING",
        "UNAVAILABLE",
        "try again, at once and then with back-off",
        0.0,
    )
    INTERNAL = (
        "INTERNAL",
        "INTERNAL",
        "read the service's log, and report the defect",
        1.0,
    )
