"""The error of the control plane carries its reason, and with it a status."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from andon.protocol.reasons import Reason
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.core.join_answers import JoinRefusal
from andon_coordinator.transport.errors import LineError

REASONS = [
    Reason[name.removeprefix("REASON_")]
    for name, number in pb.Reason.items()
    if number != pb.REASON_UNSPECIFIED
]


def info_of(error: LineError) -> error_details_pb2.ErrorInfo:
    ((key, value),) = error.status.trailing_metadata
    assert key == "grpc-status-details-bin"
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(info)
    return info


@pytest.mark.parametrize("reason", REASONS)
def test_status_carries_code_message_and_error_info(reason: Reason) -> None:
    error = LineError(reason, "what happened")

    assert (error.status.code, error.status.details) == (
        grpc.StatusCode[reason.code],
        "what happened",
    )
    info = info_of(error)
    assert (info.domain, info.reason) == ("andon", reason.name)


@pytest.mark.parametrize("reason", REASONS)
def test_refusal_carries_its_reason_and_what_differs(reason: Reason) -> None:
    refusal = JoinRefusal(reason=reason, message="no", component="w", mine="[5]", theirs="[4]")

    error = LineError.of(refusal)

    assert error.status.code is grpc.StatusCode[reason.code]
    info = info_of(error)
    assert (info.domain, info.reason) == ("andon", reason.name)
    assert dict(info.metadata) == {"component": "w", "mine": "[5]", "theirs": "[4]"}
