"""A worker's membership on a real line, without a model: numbers are averaged between two steps."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from andon.host.manifest import CheckpointFacts
from andon.protocol.capabilities import LEARNING, SAME_BITS
from andon.protocol.grains import TREE_VERSION
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.records import Cursor, Key, PositionRange
from andon.protocol.run_settings import RunPlan
from andon.testing import ScriptedWorker
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.v1.halt_pb2 import HALT_REASON_PROTOCOL_VIOLATION
from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.reader import JournalReader
from andon_trainer.config import LineConfig
from andon_trainer.core.events import Assigned, Event
from andon_trainer.core.reports import NO_DIGEST, LeaveReport, StepReport, Timings
from andon_trainer.errors import LineHalted, WorkerDropped
from andon_trainer.exchange.control.control import ControlStream
from andon_trainer.exchange.control.giving import StateGiver
from andon_trainer.exchange.control.translation import event_from
from andon_trainer.place.candidate import Candidate
from andon_trainer.place.membership import Membership
from andon_trainer.telemetry import Telemetry
from integration.harness import Service, wait_until
from integration.state_moves import NoState

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

LAYOUT = Layout((Block(BlockKind.OTHER, "b", (Component("w", (4,)),)),))
PLAN = RunPlan(global_batch=4, dataset_size=64)
CHECKPOINT = CheckpointFacts(
    head=Key(1 << 32, 7), step=3, cursor=Cursor(0, 12), digest="", plan=PLAN, pacing=b"known"
)


@dataclass
class Pair:
    """Two workers that resume from one checkpoint, each on its own thread."""

    service: Service
    members: list[Membership]
    threads: ThreadPoolExecutor

    def scalar_all_reduce(self, worker: int, value: float) -> Future[tuple[float, float, int]]:
        return self.threads.submit(self.members[worker].scalar_all_reduce, value, 1.0)

    def halt(self) -> int:
        with grpc.insecure_channel(self.service.address) as channel:
            pulled = CoordinatorStub(channel).PullCord(pb.PullCordRequest(), timeout=10)
        number: int = pulled.halt.id
        return number

    def answer(self, halt_id: int, answer: pb.HaltAnswer, worker: int | None = None) -> None:
        with grpc.insecure_channel(self.service.address) as channel:
            request = pb.ClearHaltRequest(halt_id=halt_id, answer=answer, worker=worker)
            CoordinatorStub(channel).ClearHalt(request, timeout=10)


def member_of(service: Service, slot: int, plan: RunPlan = PLAN, **more: Any) -> Membership:
    """A worker that has not joined yet."""
    config = LineConfig(
        address=service.address,
        run_id=service.run_id,
        launch_slot=slot,
        on_halt="raise" if more else "wait",
    )
    options = more or {"origin": CHECKPOINT}
    candidate = Candidate(
        layout=LAYOUT, plan=plan, replica=NoState(), device=("cpu", "none", 0, 1), **options
    )
    return Membership(config, candidate, Telemetry(config))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    one_will_do = ("--min-workers", "1", "--max-workers", "3")
    with (
        Service(tmp_path / "run", 2, *one_will_do) as service,
        ThreadPoolExecutor(2) as threads,
    ):
        members = [member_of(service, slot) for slot in range(2)]
        for member in members:
            member.join()
        yield Pair(service, members, threads)
        for member in members:
            member.leave(LeaveReport(reason="INTERRUPTED", final_step=3))


def test_a_mean_is_the_same_for_all_though_the_line_is_halted_and_samples_are_skipped_meanwhile(
    pair: Pair,
) -> None:
    first = pair.scalar_all_reduce(0, 1.0)
    pair.answer(pair.halt(), pb.HALT_ANSWER_SKIP)
    second = pair.scalar_all_reduce(1, 4.0)

    assert (first.result(20), second.result(20)) == ((2.5, 2.0, 2), (2.5, 2.0, 2))

    halt = pair.halt()
    both = pair.scalar_all_reduce(0, 6.0), pair.scalar_all_reduce(1, 8.0)
    pair.answer(halt, pb.HALT_ANSWER_RETRY)

    assert [each.result(20) for each in both] == [(7.0, 2.0, 2)] * 2


def test_a_donor_goes_on_though_a_newcomer_only_claims_to_have_its_state(pair: Pair) -> None:
    newcomer = ScriptedWorker(
        pair.service.address, run_id=pair.service.run_id, plan=PLAN, slot=2, layout=LAYOUT
    )

    async def claim() -> list[Future[Assigned]]:
        await newcomer.join()
        rounds = [pair.threads.submit(member.next_round) for member in pair.members]
        await newcomer.report((await newcomer.expect("state_transfer")).state_transfer)
        await newcomer.reset()
        return rounds

    rounds = asyncio.run(claim())

    assert len({each.result(20).key for each in rounds}) == 1


def test_the_worker_that_newcomers_get_their_state_from_gets_ready_for_that(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: list[int] = []
    monkeypatch.setattr(
        StateGiver, "get_ready", lambda giver: ready.append(giver._link.joined.worker)
    )

    rounds = [pair.threads.submit(member.next_round) for member in pair.members]

    assert {each.result(20).step for each in rounds} == {4}
    assert ready == [0]


def test_a_worker_that_computes_hears_of_a_halt_between_two_local_steps(pair: Pair) -> None:
    rounds = [pair.threads.submit(member.next_round) for member in pair.members]
    assert len({each.result(20).key for each in rounds}) == 1
    assert all(member.look() for member in pair.members)

    pair.halt()
    while any(member.look() for member in pair.members):
        pass  # The halt is on its way; the test's own time limit bounds this.

    assert [member.look() for member in pair.members] == [False, False]


def test_a_script_that_caught_what_ended_its_training_does_not_wait_to_compare_its_last_weights(
    tmp_path: Path,
) -> None:
    with Service(tmp_path / "run", 2, "--min-workers", "1") as service, ThreadPoolExecutor(2) as at:
        members = [member_of(service, slot, origin=CHECKPOINT) for slot in range(2)]
        for member in members:
            member.join()
        pair = Pair(service, members, at)

        halt = pair.halt()

        for member in members:
            with pytest.raises(LineHalted):
                member.next_round()
            with pytest.raises(LineHalted):
                member.compare(NO_DIGEST)

        pair.answer(halt, pb.HALT_ANSWER_DROP, worker=1)

        with pytest.raises(WorkerDropped):
            members[1].next_round()
        with pytest.raises(WorkerDropped):
            members[1].compare(NO_DIGEST)
        for member in members:
            member.leave(LeaveReport(reason="INTERRUPTED", final_step=0))


def test_a_script_that_left_a_step_in_the_middle_and_loops_again_holds_nobody_up(
    pair: Pair,
) -> None:
    def interrupted(member: Membership) -> None:
        samples = sum(map(len, member.next_round().positions))
        assert member.begin(float(samples))
        member.exchange.submit(0, np.ones(4, np.float32))
        _step(member)  # An exception came between, and the script caught it.

    first, second = pair.members
    before = first.position.step
    steps = [pair.threads.submit(interrupted, first), pair.threads.submit(_step, second)]

    for each in steps:
        each.result(20)
    assert first.position.head == second.position.head
    assert first.position.step == second.position.step == before + 1


def _step(member: Membership, *, attends: bool = False, stop_reason: str = "") -> None:
    """One step without a model, from its assignment to its commit; again if it is void.

    `attends`: the worker takes the round for one that it only attends, once all was sent.
    """
    while True:
        assigned = member.next_round()
        samples = sum(map(len, assigned.positions))
        averages = None
        if member.begin(float(samples)):
            member.exchange.submit(0, np.ones(4, np.float32))
            averages = member.await_averages()
        if averages is None:
            continue
        member._state.assigned = replace(assigned, attends=attends)
        member.report(
            StepReport(
                key=assigned.key,
                loss_sum=float(samples),
                stop_reason=stop_reason,
                weight=float(samples),
                samples=samples,
                timings=Timings(compute_s=0.0, exchange_s=0.0, wait_s=0.0),
                total_weight=averages.total_weight,
                world_size=averages.world_size,
            )
        )
        if member.await_commit() is not None:
            return


def _steps(pair: Pair, count: int) -> None:
    def steps(member: Membership) -> None:
        for _ in range(count):
            _step(member)

    for done in [pair.threads.submit(steps, member) for member in pair.members]:
        done.result(50)


def test_a_step_of_a_worker_that_goes_straight_on_is_one_control_message_each_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, heard = Counter[str](), Counter[str]()
    requests = ControlStream.report_step

    def counted(stream: ControlStream, report: StepReport) -> None:
        sent["step_ready"] += 1
        requests(stream, report)

    def asked(stream: ControlStream, *_: object) -> None:
        sent["request_work"] += 1

    def listened(message: pb.TrainResponse, *, fragments: int) -> Event | None:
        heard[message.WhichOneof("message") or ""] += message.HasField("heartbeat_answer") ^ 1
        return event_from(message, fragments=fragments)

    _steps(pair, 3)  # Their habit is known from the second one on.
    monkeypatch.setattr(ControlStream, "report_step", counted)
    monkeypatch.setattr(ControlStream, "request_work", asked)
    monkeypatch.setattr("andon_trainer.exchange.control.control.event_from", listened)
    _steps(pair, 5)

    assert sent == {"step_ready": 10}
    assert +heard == {"step_committed": 10}


def test_a_script_that_averages_a_number_after_all_waits_for_nobody_who_has_gone_on(
    pair: Pair,
) -> None:
    _steps(pair, 3)

    ahead = pair.threads.submit(_step, pair.members[1])
    mean = pair.scalar_all_reduce(0, 3.0).result(20)
    _step(pair.members[0])

    ahead.result(20)
    assert mean == (3.0, 1.0, 1)
    assert {member.position.step for member in pair.members} == {7}


def test_a_worker_that_was_away_is_where_the_line_is_before_its_script_begins_an_epoch(
    pair: Pair,
) -> None:
    stays, away = pair.members
    _steps(pair, 2)
    back = threading.Event()

    def train_alone() -> None:
        while not back.is_set():
            _step(stays)

    away._link.control._call.cancel()
    training = pair.threads.submit(train_alone)
    while stays.position.cursor.epoch == 0:
        assert not training.done(), training.result()  # The test's own time limit bounds this.
    away.catch_up()
    epoch = away.position.cursor.epoch
    away.catch_up()
    back.set()
    _step(away)  # The work that came with the state.

    training.result(20)
    assert epoch >= 1
    assert (away.position.cursor, away.position.head) == (
        stays.position.cursor,
        stays.position.head,
    )


def test_a_learner_opens_its_exchange_before_a_round_needs_it_and_nobody_hears_if_that_breaks(
    tmp_path: Path,
) -> None:
    last_step = 2**31

    def train(member: Membership) -> None:
        while member.position.step < last_step:
            _step(member)

    flags = ("--min-workers", "1", "--max-workers", "2")
    with (
        Service(tmp_path / "run", 1, *flags) as service,
        ThreadPoolExecutor(1) as threads,
    ):
        stays, learner = (member_of(service, slot, capabilities=(LEARNING,)) for slot in range(2))
        stays.join()
        training = threads.submit(train, stays)
        service.await_status(lambda line: line.step > 3)
        learner.join()
        service.await_status(lambda line: line.step > learner.position.step + 2)
        _step(learner)
        assert learner._conversation.attending.learning
        exchange: Any = learner._driver._route.exchange
        assert exchange.is_open
        exchange._reducers[0].lane._stream._call.cancel()
        wait_until(lambda: not exchange.is_open)
        while learner._conversation.attending.learning:
            _step(learner)
        last_step = learner.position.step + 3
        train(learner)
        training.result(20)
        for member in (stays, learner):
            member.leave(LeaveReport(reason="INTERRUPTED", final_step=last_step))
    with JournalReader(service.journal) as reader:
        told = [each.text for each in reader.run_events() if each.kind is RunEventKind.ATTEMPT]
    assert told == []


def test_an_assignment_that_cuts_a_grain_halts_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(message: pb.TrainResponse, *, fragments: int) -> Event | None:
        event = event_from(message, fragments=fragments)
        if isinstance(event, Assigned):
            return replace(event, positions=(PositionRange(0, 3),))
        return event

    monkeypatch.setattr("andon_trainer.exchange.control.control.event_from", cut)
    plan = replace(PLAN, grain=2, tree=TREE_VERSION)
    with Service(tmp_path / "run", 1, "--same-bits") as service:
        member = member_of(service, 0, plan, capabilities=(SAME_BITS,))
        member.join()

        with pytest.raises(LineHalted, match="not whole grains"):
            member.next_round()

        evidence = service.status().halt
    assert evidence.reason == HALT_REASON_PROTOCOL_VIOLATION
    assert evidence.step == 1
    assert "the coordinator's" in evidence.message


@pytest.mark.parametrize("attends", [False, True])
def test_only_who_takes_part_hears_that_its_script_may_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, attends: bool
) -> None:
    with Service(tmp_path / "run", 1, "--may-stop", "operators") as service:
        member = member_of(service, 0, capabilities=())
        member.join()

        # Nobody asks whoever attends.
        _step(member, attends=attends, stop_reason="enough")

        member.leave(LeaveReport(reason="INTERRUPTED", final_step=1))
    assert ("only operators may end it" in caplog.text) is not attends
