"""Statuses: one for each reason, and details that come back as they were sent."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

import grpc
import pytest

from andon.protocol.reasons import Reason
from andon.v1 import coordinator_pb2 as pb
from andon.wire.statuses import ErrorDetails, details_of, status_of

RETRYABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL}


@dataclass
class Ended:
    """A call that ended with a status."""

    status: Any

    def code(self) -> grpc.StatusCode:
        return cast(grpc.StatusCode, self.status.code)

    def details(self) -> str:
        return str(self.status.details)

    def trailing_metadata(self) -> Any:
        return self.status.trailing_metadata


def received_details(status: grpc.Status) -> ErrorDetails:
    return details_of(cast(grpc.RpcError, Ended(status)))


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_comes_back_as_it_was_sent(reason: Reason) -> None:
    status = status_of(reason, "what happened", {"component": "w", "mine": "", "theirs": "[4]"})

    assert (status.code, status.details) == (grpc.StatusCode[reason.code], "what happened")
    details = received_details(status)
    assert details.reason is reason
    assert details.metadata == {"component": "w", "theirs": "[4]"}
    assert details.wait_s == (reason.retry_s or 0.0)


def test_every_reason_to_refuse_a_join_of_the_protocol_is_a_reason() -> None:
    named = {name.removeprefix("REASON_") for name, _ in pb.Reason.items()}

    assert named - {"UNSPECIFIED"} <= {reason.name for reason in Reason}


def test_names_are_what_error_info_allows_and_remedies_are_one_line() -> None:
    for reason in Reason:
        assert reason == reason.name
        assert reason.isupper()
        assert len(reason) <= 63
        assert reason.remedy
        assert "\n" not in reason.remedy


def test_only_statuses_that_pass_may_be_tried_again() -> None:
    for reason in Reason:
        code = grpc.StatusCode[reason.code]
        passes = code in RETRYABLE or code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert passes or reason.retry_s is None, reason


def test_a_status_without_details_of_ours_gives_empty_details() -> None:
    @dataclass
    class Bare:
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
        details: str = "gone"
        trailing_metadata: Any = ()

    assert received_details(cast(grpc.Status, Bare())) == ErrorDetails()
    contradicting = status_of(Reason.INTERNAL, "x").trailing_metadata
    assert (
        received_details(cast(grpc.Status, Bare(trailing_metadata=contradicting))) == ErrorDetails()
    )


def test_a_reason_of_a_newer_version_keeps_its_name() -> None:
    assert ErrorDetails("NOVEL").reason is None
    assert ErrorDetails("FULL").reason is Reason.FULL


@pytest.mark.parametrize("letter", ["x", "%", "\n", "é", "\U0001f600"])
def test_long_texts_do_not_outgrow_the_trailers_as_they_are_sent(letter: str) -> None:
    long = letter * 100_000

    status = status_of(Reason.MEMORY_LIMIT, long, {"component": long, "mine": long, "theirs": long})

    ((_, value),) = status.trailing_metadata
    assert isinstance(value, bytes)
    sent = len(quote(status.details)) + len(base64.b64encode(value))
    assert sent < 7 * 1024  # of 8 KiB that peers take; the other trailers are short
