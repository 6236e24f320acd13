"""The calls of a group whose ranks share memory: what a rank makes after one of them has failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from andon.protocol.peer_calls import CallKind
from andon.protocol.sessions import RankFault, SessionEnd
from andon_trainer.core.peer_work import Work
from andon_trainer.peers.host_calls import HostCalls
from andon_trainer.peers.memory import can_share
from andon_trainer.peers.memory_calls import run
from unit.andon_trainer.neighbours import RANKS, Array, Closed, opened, view, work

pytestmark = pytest.mark.skipif(
    not can_share(), reason="memory is shared on Linux, with the compiled part: apt-get install gcc"
)

FLOAT32: Any = np.float32


class Group:
    """A group whose session goes on for a moment after a fault, as until the service has it."""

    def __init__(self) -> None:
        self.faults: list[RankFault] = []

    @property
    def stopped(self) -> bool:
        return bool(self.faults)

    def look(self, awaited: Sequence[int]) -> None:
        raise TimeoutError(f"{awaited} never come")

    def ended(self, call: object) -> None:
        raise AssertionError(f"{call} ended")

    def faulty(self, _: object, fault: RankFault) -> None:
        self.faults.append(fault)


class Begun:
    """A call that was begun."""

    def __init__(self, asked: Work) -> None:
        self.work = asked

    def done(self) -> bool:
        return False


def summed(values: Array, gate: Closed | None) -> Work:
    return work(CallKind.ALL_REDUCE, ([values], [values]), reduction="sum", gate=gate)


def test_a_rank_whose_value_is_not_finite_makes_no_further_call(tmp_path: Path) -> None:
    """Its neighbour would take what the next call gives for what it waits for."""
    memories = opened(tmp_path, 2)
    group, spoilt = Group(), np.full(40, np.nan, np.float32)
    calls = HostCalls(cast("Any", group), memories[1], RANKS[1], "calls")
    first = Begun(summed(spoilt, Closed(FLOAT32)))
    second = Begun(summed(np.ones(4, np.int32), None))
    for call in (first, second):
        calls.begin(cast("Any", call), awaited=True)

    for call in (first, second):
        calls.help(cast("Any", call), None)
    calls.close()

    [fault] = group.faults
    assert (fault.end, fault.culprit) == (SessionEnd.NON_FINITE, RANKS[1])

    def still(_: tuple[int, ...]) -> None:
        raise TimeoutError

    values = np.ones(40, np.float32)
    with pytest.raises(TimeoutError):
        run(memories[0], summed(values, Closed(FLOAT32)), 0, still)
    assert view(values) == view(np.ones(40, np.float32))
