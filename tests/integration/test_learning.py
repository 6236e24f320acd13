"""A worker that comes to a running line gets its state while the line trains."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.reader import JournalReader
from chaos.reducers import SECRET, Reducer
from integration.harness import Service, Worker, on_line, start_worker, start_workers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SPEC: dict[str, Any] = {"steps": 3000, "slow": [0, 1], "pace_s": 0.04, "stay": 6, "tarries": 4}
EPOCH = 5
"""Steps of an epoch."""
NEWCOMER = 3
SCRIPT = "following.py"
ENDS: dict[str, Any] = {
    **{**SPEC, "steps": 30, "tarries": 1000},
    "awaits": {"slot": NEWCOMER, "step": 12, "each_s": 2.0},
}
"""A run that ends while its newcomer learns: slot 0 waits half a minute in all for that one."""


@dataclass
class Story:
    """A line whose newcomer learns."""

    folder: Path
    service: Service
    members: list[Worker]
    newcomer: Worker

    def await_attending(self) -> None:
        """Waits until the newcomer makes up its first step."""
        self.newcomer.await_true(self.newcomer.out.with_suffix(".attends").exists)

    @property
    def attended(self) -> list[int]:
        """The steps that it made up, without being on the roster."""
        return [step for step, rank, workers in self.newcomer.seen["places"] if rank == workers]

    def assert_alike(self, *members: int) -> None:
        """Checks that its state was that of these members after each step since it came."""
        mine = self.newcomer.seen
        for each in members:
            theirs = self.members[each].seen
            differ = [s for s, digest in mine["states"].items() if theirs["states"][s] != digest]
            assert differ == []
            assert mine["step"] == theirs["step"]
            came = mine["means"][0][0]
            assert mine["means"] == [mean for mean in theirs["means"] if mean[0] >= came]

    def assert_sound(self) -> None:
        """Checks that each position is in one step of the journal."""
        with JournalReader(self.folder / "run" / "journal.sqlite") as journal:
            assert journal.ledger_faults() == []


@contextmanager
def learning(
    folder: Path,
    spec: dict[str, Any],
    members: int,
    *flags: str,
    reducers: int = 0,
    **environment: str,
) -> Iterator[Story]:
    """Starts members, and a newcomer once they have made some steps."""
    flags = ("--min-workers", "1", "--max-workers", "4", *flags)
    if reducers:
        (folder / "secret").write_text(SECRET)
        flags = *flags, "--reducers", str(reducers + 1), "--secret-file", str(folder / "secret")
    with Service(folder / "run", members, *flags) as service, ExitStack() as stack:
        for _ in range(reducers):
            other = Reducer(service.address, folder)
            stack.callback(other.close)
            other.start()
        workers = stack.enter_context(
            start_workers(
                folder, service, spec, members, script=SCRIPT, each=[environment] * members
            )
        )
        service.await_status(lambda line: line.step >= 4)
        where = {**on_line(service, NEWCOMER, 4), **environment}
        newcomer = start_worker(folder, spec, slot=NEWCOMER, script=SCRIPT, **where)
        workers.append(newcomer)
        yield Story(folder, service, workers[:members], newcomer)


@pytest.mark.parametrize(
    ("members", "more", "flags", "reducers", "environment"),
    [
        pytest.param(2, {"gathers": True}, (), 0, {}, id="gathers-in-the-loop-body"),
        pytest.param(
            2, {}, ("--average-buffers",), 0, {"ANDON_TCP": "0"}, id="statistics-over-grpc"
        ),
        pytest.param(2, {}, ("--encoding", "int8"), 1, {}, id="int8-with-two-reducers"),
    ],
)
def test_c_learn_001_a_learners_state_is_that_of_the_others_after_each_step(
    tmp_path: Path,
    members: int,
    more: dict[str, Any],
    flags: tuple[str, ...],
    reducers: int,
    environment: dict[str, str],
) -> None:
    # However slow the members are, it is an epoch behind when it begins.
    spec = {**SPEC, **more, "ahead": EPOCH + 1}
    with learning(tmp_path, spec, members, *flags, reducers=reducers, **environment) as story:
        codes = [each.wait() for each in (*story.members, story.newcomer)]

    assert codes == [0] * (members + 1), story.newcomer.output
    # More than an epoch, with all that is done between two.
    assert len(story.attended) > EPOCH
    story.assert_alike(*range(members))
    story.assert_sound()


def test_c_learn_001_of_a_lone_member_too_it_is_counted_and_told_what_the_line_waited(
    tmp_path: Path,
) -> None:
    with learning(tmp_path, {**SPEC, "ahead": EPOCH + 1}, 1) as story:
        service = story.service
        service.await_status(lambda line: line.participating == 2)
        learnt = service.metric("andon_learning_seconds_count")
        took_s = service.metric("andon_learning_seconds_sum")
        pauses = service.metric("andon_join_pause_seconds_count")
        codes = [story.members[0].wait(), story.newcomer.wait()]

    assert codes == [0, 0], story.newcomer.output
    assert len(story.attended) > EPOCH
    story.assert_alike(0)
    story.assert_sound()
    assert (learnt, pauses) == (1, 0)
    with JournalReader(service.journal) as reader:
        told = [each for each in reader.run_events() if each.kind is RunEventKind.CAUGHT_UP]
    assert [each.worker for each in told] == [NEWCOMER]
    assert told[0].text.startswith(f"learnt the line's state in {took_s:.2f} s; the line ")


def test_c_learn_001_rounds_that_a_lost_worker_made_void_are_made_up_as_they_were(
    tmp_path: Path,
) -> None:
    with learning(tmp_path, SPEC, 2) as story:
        story.await_attending()
        story.members[1].process.kill()
        codes = [story.members[0].wait(), story.newcomer.wait()]

    assert codes == [0, 0], story.newcomer.output
    assert story.attended
    story.assert_alike(0)
    story.assert_sound()


def test_c_learn_001_a_halt_meanwhile_comes_to_a_learner_in_its_turn(tmp_path: Path) -> None:
    with learning(tmp_path, SPEC, 2, ANDON_ON_HALT="wait") as story:
        story.await_attending()
        with grpc.insecure_channel(story.service.address) as channel:
            CoordinatorStub(channel).PullCord(pb.PullCordRequest(operator="test"), timeout=10)
        story.service.clear_halt(story.service.await_halt().id)
        codes = [each.wait() for each in (*story.members, story.newcomer)]

    assert codes == [0, 0, 0], story.newcomer.output
    assert story.attended
    story.assert_alike(0, 1)
    story.assert_sound()


def test_a_run_that_ends_meanwhile_is_made_up_to_its_end(tmp_path: Path) -> None:
    with learning(tmp_path, ENDS, 2) as story:
        codes = [each.wait() for each in (*story.members, story.newcomer)]

    assert codes == [0, 0, 0], story.newcomer.output
    assert story.attended
    story.assert_alike(0, 1)


@pytest.mark.parametrize(
    ("number", "ends"),
    [(signal.SIGKILL, (-9,)), (signal.SIGTERM, (0, 143))],
    ids=["killed", "asked"],
)
def test_a_learner_that_is_killed_or_asked_to_leave_holds_nobody_up(
    tmp_path: Path, number: signal.Signals, ends: tuple[int, ...]
) -> None:
    with learning(tmp_path, {**ENDS, "steps": 40}, 2) as story:
        story.await_attending()
        story.newcomer.process.send_signal(number)
        codes = [each.wait() for each in (*story.members, story.newcomer)]

    assert codes[:2] == [0, 0], story.members[0].output
    assert codes[2] in ends, story.newcomer.output
    assert all(each.seen["step"] == 40 for each in story.members)
    story.assert_sound()
