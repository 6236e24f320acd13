"""Session tokens at a reducer: the newest join of a worker counts, and no older one."""

from __future__ import annotations

import pytest

from andon.protocol import tokens
from andon.protocol.reasons import Reason
from andon_reducer.transport.sessions import Sessions
from andon_reducer.transport.status import Refused

SECRET, RUN = b"secret of the tests", "7f3a"


def token(worker: int, term: int, stream: int) -> bytes:
    return tokens.session_token(SECRET, RUN, worker, (term, stream))


def test_a_worker_may_open_several_streams_with_its_token() -> None:
    sessions = Sessions(SECRET)

    sessions.admit(RUN, 1, token(1, 5, 3))
    sessions.admit(RUN, 1, token(1, 5, 3))


@pytest.mark.parametrize("newer", [(5, 4), (6, 1)], ids=["a later join", "another term"])
def test_a_token_of_a_dead_predecessor_opens_nothing_once_another_has_the_slot(
    newer: tuple[int, int],
) -> None:
    sessions = Sessions(SECRET)
    sessions.admit(RUN, 1, token(1, 5, 3))
    sessions.admit(RUN, 1, token(1, *newer))

    with pytest.raises(Refused, match="joined again since") as caught:
        sessions.admit(RUN, 1, token(1, 5, 3))

    assert caught.value.refusal.reason is Reason.TOKEN


def test_slots_and_runs_are_told_apart() -> None:
    sessions = Sessions(SECRET)
    sessions.admit(RUN, 1, token(1, 9, 9))

    sessions.admit(RUN, 2, token(2, 5, 3))
    sessions.admit("99aa", 1, tokens.session_token(SECRET, "99aa", 1, (5, 3)))


def test_a_forged_token_does_not_push_the_right_one_out() -> None:
    sessions = Sessions(SECRET)
    forged = tokens.session_token(b"another secret of tests", RUN, 1, (9, 9))
    with pytest.raises(Refused, match="is not worker 1's"):
        sessions.admit(RUN, 1, forged)

    sessions.admit(RUN, 1, token(1, 5, 3))
