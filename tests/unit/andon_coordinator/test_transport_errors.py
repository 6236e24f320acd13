"""Every error that a peer may see has a status and a stable reason: the table is complete."""

from __future__ import annotations

import base64
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.core.effects import Refusal, RefusalReason
from andon_coordinator.transport import errors


def info_of(error: errors.LineError) -> error_details_pb2.ErrorInfo:
    ((key, value),) = errors.status_of(error).trailing_metadata
    assert key == "grpc-status-details-bin"
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(info)
    return info


def kinds() -> list[type[errors.LineError]]:
    return errors.LineError.__subclasses__()


def test_every_refusal_has_a_status() -> None:
    assert set(errors.JOIN_REFUSALS) == set(RefusalReason)


def test_refusals_are_those_of_the_protocol() -> None:
    prefix = "REFUSAL_REASON_"
    named = {
        name.removeprefix(prefix): number
        for name, number in pb.RefusalReason.items()
        if number != pb.REFUSAL_REASON_UNSPECIFIED
    }

    assert named == {reason.name: reason.value for reason in RefusalReason}


def test_every_kind_of_error_has_a_status_that_is_not_ok_and_a_reason_of_its_own() -> None:
    assert all(kind.code is not grpc.StatusCode.OK for kind in kinds())
    assert len({kind.reason for kind in kinds()}) == len(kinds())
    assert all(kind.reason.isupper() and len(kind.reason) <= 63 for kind in kinds())


@pytest.mark.parametrize(
    "kind",
    [kind for kind in kinds() if kind is not errors.JoinRefused],
    ids=lambda kind: kind.reason,
)
def test_status_carries_code_message_and_error_info(kind: type[errors.LineError]) -> None:
    status = errors.status_of(kind("what happened"))

    assert (status.code, status.details) == (kind.code, "what happened")
    info = info_of(kind("what happened"))
    assert (info.domain, info.reason) == ("andon", kind.reason)


@pytest.mark.parametrize("reason", RefusalReason, ids=lambda reason: reason.name)
def test_refusal_carries_its_reason_and_what_differs(reason: RefusalReason) -> None:
    refusal = Refusal(reason=reason, message="no", component="w", mine="[5]", theirs="[4]")

    error = errors.JoinRefused(refusal)

    assert errors.status_of(error).code is errors.JOIN_REFUSALS[reason]
    info = info_of(error)
    assert (info.domain, info.reason) == ("andon", reason.name)
    assert dict(info.metadata) == {"component": "w", "mine": "[5]", "theirs": "[4]"}


@pytest.mark.parametrize("letter", ["x", "%", "\n", "é", "\U0001f600"])
def test_long_texts_do_not_outgrow_the_trailers_as_they_are_sent(letter: str) -> None:
    long = letter * 100_000
    refusal = Refusal(
        reason=RefusalReason.LAYOUT_DIFFERS, message=long, component=long, mine=long, theirs=long
    )

    status = errors.status_of(errors.JoinRefused(refusal))

    ((_, value),) = status.trailing_metadata
    assert isinstance(value, bytes)
    sent = len(quote(status.details)) + len(base64.b64encode(value))
    assert sent < 7 * 1024  # of 8 KiB that peers take; the other trailers are short
