"""Errors go from one process to another, as launchers such as Ray and multiprocessing send them."""

from __future__ import annotations

import copy
import pickle

import pytest

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Key
from andon.protocol.sessions import SessionEnd, SessionOver
from andon_trainer.errors import (
    AndonError,
    CallTimedOut,
    CheckpointRefused,
    HostLost,
    JoinRefused,
    LineHalted,
    LineLost,
    RunOver,
    SessionEnded,
    WorkerDropped,
)

HALT = HaltEvidence(id=1, reason=HaltReason.NON_FINITE_GRADIENT, step=3, worker=1, value="nan")
OVER = SessionOver(
    key=Key(1, 2),
    end=SessionEnd.RANK_LOST,
    culprit=1,
    culprit_node="beta",
    message="rank 1 on beta is gone",
)
ERRORS = [
    LineHalted(HALT),
    JoinRefused("token", "a wrong token"),
    CheckpointRefused("a torn file"),
    LineLost("no service", "alpha:7070", 12),
    WorkerDropped("dropped", "alpha:7070", 12),
    RunOver("complete", "alpha:7070", 12, 0),
    SessionEnded(OVER),
    CallTimedOut("rank 1 is missing"),
    HostLost("process 1 is gone"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: AndonError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert (str(other), other.exit_code) == (str(error), error.exit_code)
        assert vars(other) == vars(error)


def test_every_error_is_tried() -> None:
    def kinds(of: type[AndonError]) -> set[type[AndonError]]:
        return {of}.union(*(kinds(each) for each in of.__subclasses__()))

    made = {type(error) for error in ERRORS}
    assert {each for each in kinds(AndonError) if each.__module__ == "andon_trainer.errors"} == {
        AndonError,
        *made,
    }
