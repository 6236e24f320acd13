"""Admission: only the token of a worker's newest join counts, and its calls are limited."""

from __future__ import annotations

import pytest

from andon.protocol import tokens
from andon.protocol.reasons import Reason
from andon_reducer.transport.admission import CallLimit, CallRefused, SessionTokens

SECRET, RUN = b"secret of the tests", "7f3a"


def token(worker: int, term: int, stream: int) -> bytes:
    return tokens.session_token(SECRET, RUN, worker, (term, stream))


def test_a_worker_may_open_several_streams_with_its_token() -> None:
    sessions = SessionTokens(SECRET)

    sessions.admit(RUN, 1, token(1, 5, 3))
    sessions.admit(RUN, 1, token(1, 5, 3))


@pytest.mark.parametrize("newer", [(5, 4), (6, 1)], ids=["a later join", "another term"])
def test_a_token_of_a_dead_predecessor_opens_nothing_once_another_has_the_slot(
    newer: tuple[int, int],
) -> None:
    sessions = SessionTokens(SECRET)
    sessions.admit(RUN, 1, token(1, 5, 3))
    sessions.admit(RUN, 1, token(1, *newer))

    with pytest.raises(CallRefused, match="joined again since") as caught:
        sessions.admit(RUN, 1, token(1, 5, 3))

    assert caught.value.refusal.reason is Reason.TOKEN


def test_tokens_of_other_slots_and_runs_are_separate() -> None:
    sessions = SessionTokens(SECRET)
    sessions.admit(RUN, 1, token(1, 9, 9))

    sessions.admit(RUN, 2, token(2, 5, 3))
    sessions.admit("99aa", 1, tokens.session_token(SECRET, "99aa", 1, (5, 3)))


def test_a_forged_token_does_not_push_the_right_one_out() -> None:
    sessions = SessionTokens(SECRET)
    forged = tokens.session_token(b"another secret of tests", RUN, 1, (9, 9))
    with pytest.raises(CallRefused, match="is not worker 1's"):
        sessions.admit(RUN, 1, forged)

    sessions.admit(RUN, 1, token(1, 5, 3))


def test_a_worker_above_its_limit_is_refused_and_others_are_not() -> None:
    limit = CallLimit(1, "streams")

    with limit.count("run", 0):
        with (
            pytest.raises(CallRefused, match="worker 0 has 1 streams") as caught,
            limit.count("run", 0),
        ):
            pass
        with limit.count("run", 1), limit.count("other", 0):
            pass

    assert caught.value.refusal.reason is Reason.TOO_MANY_STREAMS


def test_a_call_that_ends_makes_room_for_another() -> None:
    limit = CallLimit(1, "streams")

    for _ in range(3):
        with limit.count("run", 0):
            pass
