"""Sessions of a process: which groups share one, what it reports, and how it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch

import andon_torch
from andon.protocol.sessions import RankFault, RankReport, SessionEnd
from andon_torch import session as sessions
from andon_torch.gate import GateMode, GradientWatch
from andon_torch.session import NewGroup, TorchSession, group_of, living
from andon_torch.testing import FakeCaller, FakeRanks
from andon_trainer.errors import JoinRefused


@dataclass
class FakeAttending:
    """A control stream that notes what it is told."""

    rank: int = 1
    over: Any = None
    faults: list[RankFault] = field(default_factory=list)
    left: list[bool] = field(default_factory=list)
    source: Callable[[], RankReport] = RankReport

    def report_from(self, source: Callable[[], RankReport]) -> None:
        self.source = source

    def fault(self, fault: RankFault) -> None:
        self.faults.append(fault)

    def leave(self, *, done: bool) -> None:
        self.left.append(done)


@dataclass
class FakeEngine:
    """Groups of ranks in one process."""

    attending: FakeAttending = field(default_factory=FakeAttending)
    made: list[tuple[str, list[int]]] = field(default_factory=list)
    recording: None = None

    def group(self, name: str, places: Sequence[int], watch: GradientWatch) -> FakeCaller:
        self.made.append((name, list(places)))
        return FakeRanks(len(places)).caller(0)

    def report(self) -> RankReport:
        return RankReport(calls=7)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """The engine of a session of ranks 4, 5 and 6, in which this process is."""
    made = FakeEngine()
    session = TorchSession(made, (4, 5, 6), GradientWatch(GateMode.ALL))  # type: ignore[arg-type]
    sessions._living.append(session)
    yield made
    if session in sessions._living:
        sessions._living.remove(session)


def wanted(name: str, *ranks: int) -> NewGroup:
    return NewGroup(
        name=name,
        rank=0,
        ranks=ranks,
        whole=False,
        timeout=timedelta(seconds=1),
        store=torch.distributed.HashStore(),  # type: ignore[attr-defined]  # by a star
    )


def test_groups_of_a_sessions_ranks_share_it(engine: FakeEngine) -> None:
    whole, part = group_of(wanted("0", 4, 5, 6)), group_of(wanted("1", 6, 4))

    assert engine.made == [("0", [0, 1, 2]), ("1", [2, 0])]
    assert (whole.size(), part.size()) == (3, 2)


def test_a_group_that_is_made_again_gets_another_name(engine: FakeEngine) -> None:
    for _ in range(2):
        group_of(wanted("made twice", 4, 5))

    assert [name for name, _ in engine.made] == ["made twice", "made twice#1"]


def test_a_second_session_of_other_ranks_is_refused(engine: FakeEngine) -> None:
    with pytest.raises(JoinRefused, match=r"session of ranks 4, 5, 6, and is to join .* 3, 4"):
        group_of(wanted("0", 3, 4))


def test_an_address_names_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDON_ADDRESS", "127.0.0.1:1")

    with pytest.raises(JoinRefused, match="ranks 0, 2 of the script only: unset it"):
        group_of(wanted("0", 0, 2))


def test_the_last_group_leaves_the_session(engine: FakeEngine) -> None:
    groups = [group_of(wanted(name, 4, 5)) for name in "ab"]

    groups[0].shutdown()
    assert engine.attending.left == []
    groups[1].shutdown()

    assert engine.attending.left == [True]
    assert living() == []


def test_a_group_that_is_destroyed_on_the_way_of_an_error_says_so(engine: FakeEngine) -> None:
    group = group_of(wanted("failing", 4, 5))

    def script() -> None:
        try:
            raise KeyError("a mistake")
        finally:
            group.shutdown()

    with pytest.raises(KeyError):
        script()

    (fault,) = engine.attending.faults
    assert (fault.end, fault.culprit) == (SessionEnd.SCRIPT_FAILED, 1)
    assert "a mistake" in fault.message
    assert engine.attending.left == [False]


def test_sys_exit_without_a_code_is_no_failure(engine: FakeEngine) -> None:
    group = group_of(wanted("leaving", 4, 5))

    def script() -> None:
        try:
            raise SystemExit
        finally:
            group.shutdown()

    with pytest.raises(SystemExit):
        script()

    assert engine.attending.left == [True]


def test_numbers_are_reported_once_with_what_was_exchanged(engine: FakeEngine) -> None:
    andon_torch.log({"loss": torch.tensor(0.5), "rate": 2}, step=3)
    andon_torch.log({"loss": 0.25})

    first, second = engine.attending.source(), engine.attending.source()

    assert first.numbers == (("loss", 3, 0.5), ("rate", 3, 2.0), ("loss", 0, 0.25))
    assert second.numbers == ()
    assert first.calls == 7


def test_what_is_no_number_is_refused(engine: FakeEngine) -> None:
    with pytest.raises(TypeError, match="loss is no number"):
        andon_torch.log({"loss": "small"})


def test_without_a_group_nothing_can_be_logged() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        andon_torch.log({"loss": 1})
