"""Every error that a peer may see has a reason, and with it a status."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from andon.protocol.reasons import Reason
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.core.effects import JoinRefusal
from andon_coordinator.transport import errors

REFUSALS = [
    Reason[name.removeprefix("REASON_")]
    for name, number in pb.Reason.items()
    if number != pb.REASON_UNSPECIFIED
]


def info_of(error: errors.LineError) -> error_details_pb2.ErrorInfo:
    ((key, value),) = errors.status_of(error).trailing_metadata
    assert key == "grpc-status-details-bin"
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(info)
    return info


def kinds() -> list[type[errors.LineError]]:
    return [each for each in errors.LineError.__subclasses__() if each is not errors.JoinRefused]


def test_every_kind_of_error_has_a_reason_of_its_own() -> None:
    assert len({kind.kind for kind in kinds()}) == len(kinds())


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.kind)
def test_status_carries_code_message_and_error_info(kind: type[errors.LineError]) -> None:
    status = errors.status_of(kind("what happened"))

    assert (status.code, status.details) == (grpc.StatusCode[kind.kind.code], "what happened")
    info = info_of(kind("what happened"))
    assert (info.domain, info.reason) == ("andon", kind.kind)


@pytest.mark.parametrize("reason", REFUSALS)
def test_refusal_carries_its_reason_and_what_differs(reason: Reason) -> None:
    refusal = JoinRefusal(reason=reason, message="no", component="w", mine="[5]", theirs="[4]")

    error = errors.JoinRefused(refusal)

    assert errors.status_of(error).code is grpc.StatusCode[reason.code]
    info = info_of(error)
    assert (info.domain, info.reason) == ("andon", reason.name)
    assert dict(info.metadata) == {"component": "w", "mine": "[5]", "theirs": "[4]"}
