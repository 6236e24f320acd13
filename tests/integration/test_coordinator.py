"""The coordinator behind a real gRPC server, with scripted workers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from andon import tokens, wire
from andon.halts import HaltReason
from andon.records import RecordKind
from andon.terms import Liveness, Policy, RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_coordinator.app import (
    Coordinator,
    CoordinatorFailed,
    build_coordinator,
    server_options,
)
from andon_coordinator.config import CoordinatorConfig
from andon_coordinator.core.effects import AcceptJoin, Effect, LineState
from andon_coordinator.core.events import Event
from andon_coordinator.core.line import Line
from andon_coordinator.core.status import LineStatus
from andon_coordinator.transport.clock import LineClock
from andon_coordinator.transport.journal import Journal, JournalLocked
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.service import CoordinatorService
from andon_coordinator.transport.task import LineTask, TaskSettings
from andon_coordinator.transport.testing import ScriptedWorker, small_layout
from andon_coordinator.transport.welcome import Welcome

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

RUN = "7f3a"
SECRET = b"secret of the tests"
PLAN = RunPlan(global_batch=5, dataset_size=12, seed=3)


SCRIPT = """
import asyncio, sys
from andon.terms import RunPlan
from andon_coordinator.transport.service import CoordinatorService
from andon_coordinator.transport.task import LineTask, TaskSettings
from andon_coordinator.transport.testing import ScriptedWorker
async def main():
    plan = RunPlan(global_batch=5, dataset_size=12, seed=3)
    worker = ScriptedWorker(sys.argv[1], run_id=sys.argv[2], plan=plan, slot=1)
    await worker.join()
    while True:
        message = await worker.receive()
        if message.WhichOneof("message") == "shard_assignment":
            print("assigned", flush=True)
        else:
            await worker.obey(message)
asyncio.run(main())
"""
"""A worker in a process of its own: it says when it is assigned work, and does none."""


GIL_HOLDER = """
import asyncio, ctypes, sys
from andon.terms import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.service import CoordinatorService
from andon_coordinator.transport.task import LineTask, TaskSettings
from andon_coordinator.transport.testing import ScriptedWorker
async def main():
    plan = RunPlan(global_batch=5, dataset_size=12, seed=3)
    worker = ScriptedWorker(sys.argv[1], run_id=sys.argv[2], plan=plan, slot=0)
    await worker.join()
    ctypes.PyDLL(None).sleep(2)
    await worker.send(heartbeat=pb.Heartbeat(sequence=7))
    print((await worker.call.read()).heartbeat_answer.sequence, flush=True)
asyncio.run(main())
"""
"""A worker in a process of its own that holds the interpreter's lock for two seconds."""


@dataclass
class Served:
    """A coordinator that serves, and how to reach it."""

    coordinator: Coordinator
    address: str
    stub: Any
    registry: CollectorRegistry

    def worker(self, slot: int | None = None, **fields: Any) -> ScriptedWorker:
        return ScriptedWorker(self.address, **{"run_id": RUN, "plan": PLAN, "slot": slot, **fields})

    async def workers(self, count: int = 2) -> list[ScriptedWorker]:
        workers = [self.worker(slot) for slot in range(count)]
        for worker in workers:
            await worker.join()
        return workers

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def config_in(folder: Path, **fields: Any) -> CoordinatorConfig:
    defaults = {
        "run_id": RUN,
        "journal": folder / "journal.sqlite",
        "expect_workers": 2,
        "policy": Policy(max_steps=3),
        "liveness": Liveness(lease_s=30.0),
    }
    return CoordinatorConfig(**{**defaults, **fields})


def serving(config: CoordinatorConfig) -> contextlib.AbstractAsyncContextManager[Served]:
    registry = CollectorRegistry()
    return served_by(build_coordinator(config, registry, SECRET), config, registry)


@contextlib.asynccontextmanager
async def served_by(
    coordinator: Coordinator, config: CoordinatorConfig, registry: CollectorRegistry
) -> AsyncIterator[Served]:
    server = grpc.aio.server(options=server_options(config.liveness))
    coordinator.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await coordinator.start()
    await server.start()
    address = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Served(coordinator, address, CoordinatorStub(channel), registry)
    finally:
        await coordinator.close()
        await server.stop(1.0)


def run(story: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(story, 40)

    asyncio.run(limited())


async def first_round(workers: list[ScriptedWorker]) -> list[pb.ShardAssignment]:
    """Takes workers from their joins to the assignments of the first round."""

    async def to_assignment(worker: ScriptedWorker) -> pb.ShardAssignment:
        while True:
            message = await worker.receive()
            if message.WhichOneof("message") == "shard_assignment":
                return message.shard_assignment
            await worker.obey(message)

    return await asyncio.gather(*(to_assignment(worker) for worker in workers))


async def code_of(call: Awaitable[Any]) -> grpc.StatusCode:
    """The code that a call ends with; the connection may go before the details come."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
    """The status and ErrorInfo that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(caught.value)
    assert status is not None, caught.value
    assert status.details[0].Unpack(info)
    assert info.domain == "andon"
    return caught.value.code(), info


def test_two_workers_found_train_and_complete(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            workers = await served.workers()
            await asyncio.gather(*(worker.work() for worker in workers))
            assert await served.coordinator.wait()

            assert served.coordinator.status().state is LineState.COMPLETE
            kinds = [each.record.kind for each in workers[0].committed]
            assert (
                kinds
                == [wire.enum_to_proto(RecordKind.FOUND)]
                + [wire.enum_to_proto(RecordKind.STEP)] * 3
            )
            assert [each.record.step for each in workers[1].committed] == [1, 2, 3]
            assert workers[1].committed[-1].stop_reason == "steps"
            assert workers[1].committed[-1].loss == 1.0
            assert served.metric("andon_steps_committed_total") == 3
            assert served.metric("andon_samples_committed_total") == 5 + 5 + 2
            assert served.metric("andon_step_attempts_total", cause="first") == 3

    run(story())

    with JournalReader(tmp_path / "journal.sqlite") as journal:
        assert journal.steps() == 3
        assert journal.losses() == [1.0, 1.0, 1.0]
        assert journal.samples() == 12
        assert journal.digests() == {0: bytes(32).hex(), 1: bytes(32).hex()}
        assert [gone.reason for gone in journal.departures()] == ["COMPLETE", "COMPLETE"]
        assert journal.run().plan == PLAN


def test_f_dp_002_every_position_is_in_exactly_one_record(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, policy=Policy(max_steps=7))) as served:
            await asyncio.gather(*(worker.work() for worker in await served.workers()))

    run(story())

    with JournalReader(tmp_path / "journal.sqlite") as journal:
        assert journal.steps() == 7
        assert journal.ledger_faults() == []


def test_ranks_follow_launch_slots_not_who_joins_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            second, first = served.worker(1), served.worker(0)
            await second.join()
            await first.join()
            assignments = await first_round([first, second])

            assert [each.rank for each in assignments] == [0, 1]
            assert list(assignments[0].roster) == [0, 1]
            assert [
                [(part.start, part.stop) for part in each.positions] for each in assignments
            ] == [[(0, 3)], [(3, 5)]]

    run(story())


def test_join_is_answered_with_all_that_a_worker_needs(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, policy=Policy(chunk_elements=77))) as served:
            accepted = await served.worker(1, layout=small_layout(9)).join()

            assert accepted.worker == 1
            assert tokens.verify(SECRET, RUN, 1, accepted.session_token)
            (share,) = accepted.reducers
            assert (share.address, share.start_element, share.stop_element) == ("", 0, 9)
            assert accepted.policy.chunk_elements == 77
            assert wire.liveness_from_proto(accepted.liveness).lease_s == 30.0
            assert accepted.standing == pb.STANDING_FRESH
            assert accepted.term == served.coordinator.status().term

    run(story())


def test_heartbeat_is_answered(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            worker = served.worker(0)
            await worker.join()

            beat = pb.Heartbeat(sequence=41, activity=pb.ACTIVITY_BUSY, detail="upload")
            await worker.send(heartbeat=beat)

            assert (await worker.call.read()).heartbeat_answer.sequence == 41
            (shown,) = (await served.stub.GetStatus(pb.GetStatusRequest())).status.workers
            assert (shown.activity, shown.detail) == (pb.ACTIVITY_BUSY, "upload")

    run(story())


def test_lost_stream_voids_the_round_and_the_worker_gets_the_next_attempt(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            survivor, lost = await served.workers()
            before, _ = await first_round([survivor, lost])

            await lost.reset()
            voided = (await survivor.expect("round_voided")).round_voided
            assert voided.key == before.key

            again = replace(lost)
            assert (await again.join()).standing == pb.STANDING_IN_SYNC
            await again.ask()
            after = (await survivor.expect("shard_assignment")).shard_assignment
            assert wire.key_from_proto(after.key) > wire.key_from_proto(before.key)
            assert after.attempt == 1
            assert after.batch == before.batch
            await survivor.ready(after)
            await asyncio.gather(survivor.work(), again.work())

            assert await served.coordinator.wait()
            assert served.metric("andon_step_attempts_total", cause="stream_lost") == 1
            assert served.metric("andon_recovery_seconds_count") == 1

    run(story())


def test_killed_process_is_known_to_be_gone_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        # No grace would end within this test: only a process known to be gone is lost.
        async with serving(config_in(tmp_path, rejoin_grace_s=1000.0)) as served:
            survivor = served.worker(0)
            await survivor.join()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SCRIPT, served.address, RUN, stdout=asyncio.subprocess.PIPE
            )
            await first_round([survivor])
            assert process.stdout is not None
            assert await process.stdout.readline() == b"assigned\n"

            process.send_signal(signal.SIGKILL)

            await survivor.expect("round_voided")
            await process.wait()
        with JournalReader(tmp_path / "journal.sqlite") as journal:
            (gone,) = journal.departures()
            assert (gone.worker, gone.reason) == (1, "LOST")

    run(story())


def test_half_closed_stream_may_be_a_blip(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, rejoin_grace_s=1000.0)) as served:
            survivor, other = await served.workers()
            await first_round([survivor, other])

            await other.call.done_writing()

            await survivor.expect("round_voided")
            assert await other.call.code() is grpc.StatusCode.OK
        with JournalReader(tmp_path / "journal.sqlite") as journal:
            assert journal.departures() == []

    run(story())


def test_f_dp_003_fault_halts_everybody_with_evidence(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            workers = await served.workers()
            assignments = await first_round(workers)

            fault = pb.Fault(
                key=assignments[0].key,
                kind=pb.FAULT_KIND_NON_FINITE_GRADIENT,
                rank=1,
                block=0,
                element=2,
                value="nan",
            )
            await workers[0].send(fault=fault)

            for worker in workers:
                evidence = (await worker.expect("halt")).halt.evidence
                assert (evidence.worker, evidence.step) == (1, 1)
                assert (evidence.parameter, list(evidence.element)) == ("weight", [2])
                assert evidence.value == "nan"
            label = HaltReason.NON_FINITE_GRADIENT.label
            assert served.metric("andon_jidoka_halts_total", reason=label) == 1
            assert (await served.stub.GetStatus(pb.GetStatusRequest())).status.halt == evidence

    run(story())

    with JournalReader(tmp_path / "journal.sqlite") as journal:
        (halt,) = journal.halts()
        assert (halt.evidence.worker, halt.evidence.parameter) == (1, "weight")
        assert halt.answer is None
        assert journal.steps() == 0


def test_cord_is_pulled_watched_and_cleared(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            workers = await served.workers()
            await first_round(workers)
            watch = served.stub.WatchStatus(pb.WatchStatusRequest(run_id=RUN))
            assert (await watch.read()).status.state == pb.LINE_STATE_RUNNING

            request = pb.PullCordRequest(reason="loss looks odd", operator="ann")
            halt = (await served.stub.PullCord(request)).halt

            assert "loss looks odd" in halt.message
            for worker in workers:
                assert (await worker.expect("halt")).halt.evidence.id == halt.id
            while (await watch.read()).status.state != pb.LINE_STATE_HALTED:
                pass
            code, info = await refused(served.stub.PullCord(pb.PullCordRequest()))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert info.reason == "OPERATOR_REFUSED"
            wrong = pb.ClearHaltRequest(halt_id=halt.id + 1, answer=pb.HALT_ANSWER_RETRY)
            assert (await refused(served.stub.ClearHalt(wrong)))[0] is code

            right = pb.ClearHaltRequest(
                halt_id=halt.id, answer=pb.HALT_ANSWER_RETRY, operator="bob"
            )
            await served.stub.ClearHalt(right)

            for worker in workers:
                assert (await worker.expect("resume")).resume.halt_id == halt.id
            while (await watch.read()).status.state != pb.LINE_STATE_RUNNING:
                pass
            await asyncio.gather(*(worker.work() for worker in workers))
            assert await served.coordinator.wait()
            watch.cancel()

    run(story())

    with JournalReader(tmp_path / "journal.sqlite") as journal:
        (halt,) = journal.halts()
        assert (halt.answer.name if halt.answer else None, halt.operator) == ("RETRY", "bob")


def test_drain_ends_the_run_after_the_present_step(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, policy=Policy())) as served:
            workers = await served.workers()
            assignments = await first_round(workers)

            await served.stub.Drain(pb.DrainRequest(run_id=RUN, operator="ann"))
            for worker, assignment in zip(workers, assignments, strict=True):
                await worker.ready(assignment)
            await asyncio.gather(*(worker.work() for worker in workers))

            assert await served.coordinator.wait()
            assert served.coordinator.status().step == 1

    run(story())


def test_operators_of_another_run_are_told_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            for call in (
                served.stub.GetStatus(pb.GetStatusRequest(run_id="other")),
                served.stub.PullCord(pb.PullCordRequest(run_id="other")),
                served.stub.ClearHalt(pb.ClearHaltRequest(run_id="other")),
                served.stub.Drain(pb.DrainRequest(run_id="other")),
                served.stub.WatchStatus(pb.WatchStatusRequest(run_id="other")).read(),
            ):
                code, info = await refused(call)
                assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "WRONG_RUN")

    run(story())


def test_refused_join_says_what_differs(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            await served.worker(0).join()

            other_model = served.worker(1, layout=small_layout(5)).join()
            code, info = await refused(other_model)
            assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_DIFFERS")
            assert dict(info.metadata) == {
                "component": "weight",
                "mine": "float32[5]",
                "theirs": "float32[4]",
            }
            code, info = await refused(served.worker(0).join())
            assert (code, info.reason) == (grpc.StatusCode.ALREADY_EXISTS, "SLOT")
            code, info = await refused(served.worker(1, run_id="other").join())
            assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_RUN")

    run(story())


def test_wrong_token_is_unauthenticated(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, token=b"right")) as served:
            code, info = await refused(served.worker(0).join(token=b"wrong"))
            assert (code, info.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN")
            assert (await served.worker(0).join(token=b"right")).worker == 0

    run(story())


@pytest.mark.parametrize(
    "message",
    [
        pb.TrainRequest(),
        pb.TrainRequest(heartbeat=pb.Heartbeat(sequence=1)),
        pb.TrainRequest(join=pb.Join(run_id=RUN)),
    ],
    ids=["no case", "not join", "empty join"],
)
def test_c_wire_002_garbage_first_message_is_refused_and_the_others_go_on(
    tmp_path: Path, message: pb.TrainRequest
) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            workers = await served.workers()

            intruder = served.stub.Train()
            await intruder.write(message)
            code, info = await refused(_end_of(intruder))
            assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")

            await asyncio.gather(*(worker.work() for worker in workers))
            assert await served.coordinator.wait()

    run(story())


def test_c_wire_002_bytes_that_are_no_message_end_their_stream_alone(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            workers = await served.workers()

            async with grpc.aio.insecure_channel(served.address) as channel:
                raw: Any = channel.stream_stream("/andon.v1.Coordinator/Train")()
                await raw.write(b"\xff\xff\xff\xff")
                code, _ = await refused(_end_of(raw))
                assert code is grpc.StatusCode.INVALID_ARGUMENT

            await asyncio.gather(*(worker.work() for worker in workers))
            assert await served.coordinator.wait()

    run(story())


def test_second_join_on_a_stream_ends_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            worker = served.worker(0)
            await worker.join()
            await worker.send(join=pb.Join(run_id=RUN))
            code, _ = await refused(worker.receive())
            assert code is grpc.StatusCode.INVALID_ARGUMENT

    run(story())


def test_worker_that_joins_again_replaces_its_older_stream(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            older = served.worker(0)
            await older.join()

            newer = replace(older)
            assert (await newer.join()).worker == 0

            code, info = await refused(older.receive())
            assert (code, info.reason) == (grpc.StatusCode.ABORTED, "REJOIN_NEEDED")

    run(story())


def test_restart_keeps_the_head_and_takes_a_greater_term(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            workers = await served.workers()
            assignments = await first_round(workers)
            for worker, assignment in zip(workers, assignments, strict=True):
                await worker.ready(assignment)
            for worker in workers:
                assert await worker.obey(await worker.expect("step_committed"))
            term = served.coordinator.status().term
        for worker in workers:
            code, info = await refused(_end_of(worker.call))
            assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_LEAVING")
            await worker.channel.close()

        async with serving(config_in(tmp_path)) as served:
            assert served.coordinator.status().term > term
            assert served.coordinator.status().step == 1
            assert served.metric("andon_steps_committed_total") == 1
            again = [replace(worker, address=served.address) for worker in workers]
            for worker in again:
                accepted = await worker.join()
                assert accepted.standing == pb.STANDING_IN_SYNC
                await worker.ask()
            await asyncio.gather(*(worker.work() for worker in again))
            assert await served.coordinator.wait()
            assert served.metric("andon_steps_committed_total") == 3

    run(story())

    with JournalReader(tmp_path / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        assert len(journal.terms()) == 2


def test_record_that_one_worker_missed_is_sent_again_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            workers = await served.workers()
            assignments = await first_round(workers)
            for worker, assignment in zip(workers, assignments, strict=True):
                await worker.ready(assignment)
            await workers[0].obey(await workers[0].expect("step_committed"))
            held = assignments[1].key
            for worker in workers:
                await worker.reset()

        async with serving(config_in(tmp_path)) as served:
            missed = replace(workers[1], address=served.address)
            accepted = await missed.join(held_key=held)
            assert accepted.standing == pb.STANDING_RECORD_FOLLOWS
            record = (await missed.expect("step_committed")).step_committed
            assert record.record.key == held
            assert record.samples == 5

    run(story())


def test_greater_term_of_a_worker_is_risen_above_durably(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            seen = served.coordinator.status().term + 2**32
            workers = [served.worker(slot) for slot in range(2)]
            for worker in workers:
                await worker.join(greatest_term=seen)
            assignments = await first_round(workers)

            assert assignments[0].key.term > seen
        with JournalReader(tmp_path / "journal.sqlite") as journal:
            assert journal.terms()[-1] == assignments[0].key.term

    run(story())


def test_second_coordinator_of_a_run_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)):
            with pytest.raises(JournalLocked, match="another coordinator"):
                build_coordinator(config_in(tmp_path), CollectorRegistry(), SECRET)

    run(story())


def test_stopped_process_loses_its_lease_and_one_that_only_says_nothing_does_not(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, liveness=Liveness(lease_s=0.6))) as served:
            quiet = served.worker(0)
            await quiet.join()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", SCRIPT, served.address, RUN),
                stdout=asyncio.subprocess.PIPE,
            )
            await first_round([quiet])
            assert process.stdout is not None
            assert await process.stdout.readline() == b"assigned\n"

            process.send_signal(signal.SIGSTOP)

            await quiet.expect("round_voided")
            assert served.coordinator.status().live == 1
            process.kill()
            await process.wait()

    run(story())


def test_worker_that_holds_the_interpreter_lock_is_not_taken_for_dead(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, liveness=Liveness(lease_s=0.6))) as served:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", GIL_HOLDER, served.address, RUN),
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"7\n"
            await process.wait()

    run(story())


def test_coordinator_that_was_taken_over_closes_every_stream(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            worker = served.worker(0)
            await worker.join()
            with sqlite3.connect(tmp_path / "journal.sqlite") as other:
                other.execute("INSERT INTO terms VALUES (?, 0)", ("f" * 16,))
            other.close()

            await served.worker(1).join()

            assert await code_of(_end_of(worker.call)) is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(CoordinatorFailed, match="took the run over"):
                await served.coordinator.wait()
            assert await code_of(served.worker(0).join()) is grpc.StatusCode.UNAVAILABLE
            assert (
                await code_of(served.stub.Drain(pb.DrainRequest())) is grpc.StatusCode.UNAVAILABLE
            )

    run(story())


class Defective:
    """An observer with a mistake: it fails once a worker is accepted."""

    def observe(self, event: Event, done: Sequence[Effect], now: float) -> None:
        if any(isinstance(effect, AcceptJoin) for effect in done):
            raise RuntimeError("a secret of the inside")

    def tick(self, status: LineStatus) -> None:
        """Is content."""


def test_mistake_inside_ends_every_stream_and_tells_nothing_of_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        config = config_in(tmp_path)
        settings = config.line_settings()
        journal = Journal.open(config.journal, RUN)
        journal.begin_term(1)
        line = Line(settings, term=1, history=journal.history, random_bits=lambda: 0)
        welcome = Welcome(
            run_id=RUN, secret=SECRET, policy=settings.policy, liveness=settings.liveness
        )
        task = LineTask(
            line,
            journal,
            welcome,
            settings=TaskSettings(max_streams=1),
            clocks=(LineClock(time.monotonic, 1.0), time.time),
            observer=Defective(),
        )
        coordinator = Coordinator(task, CoordinatorService(task, run_id=RUN, metrics_url=""))
        async with served_by(coordinator, config, CollectorRegistry()) as served:
            worker = served.worker(0)
            await worker.join()

            code, info = await refused(worker.receive())

            assert (code, info.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
            with pytest.raises(CoordinatorFailed):
                await served.coordinator.wait()

    run(story())

    assert "a secret of the inside" in caplog.text


def test_streams_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, expect_workers=1)) as served:
            limit = 4 * 1 + 16
            calls = [served.stub.Train() for _ in range(limit)]
            for call in calls:
                await call.wait_for_connection()
            await served.stub.GetStatus(pb.GetStatusRequest())

            code, info = await refused(served.worker(0).join())

            assert (code, info.reason) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_STREAMS",
            )
            for call in calls:
                call.cancel()

    run(story())


def test_worker_that_does_not_read_is_cut_off_and_the_others_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, rejoin_grace_s=0.0)) as served:
            # A window that does not grow: answers to heartbeats fill it, then the queue.
            deaf = served.worker(0, options=(("grpc.http2.bdp_probe", 0),))
            await deaf.join()

            while served.coordinator.status().live == 1:
                await deaf.send(heartbeat=pb.Heartbeat(sequence=2**64 - 1))

            await asyncio.gather(*(worker.work() for worker in await served.workers()))
            assert await served.coordinator.wait()
            code, info = await refused(_end_of(deaf.call))
            assert (code, info.reason) == (grpc.StatusCode.ABORTED, "REJOIN_NEEDED")

    run(story())


def test_tally_is_averaged_over_the_workers(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            workers = [served.worker(slot, asks=False) for slot in range(2)]
            for worker in workers:
                await worker.join()
            founder, other = workers
            await founder.obey(await founder.expect("step_committed"))
            await other.obey(await other.expect("state_transfer"))
            await founder.obey(await founder.expect("state_transfer"))

            for worker, value, weight in zip(workers, (1.0, 4.0), (1.0, 2.0), strict=True):
                head = wire.key_to_proto(worker.head)
                await worker.send(tally=pb.Tally(head=head, sequence=0, value=value, weight=weight))

            for worker in workers:
                result = (await worker.expect("tally_result")).tally_result
                assert (result.value, result.weight, result.contributors) == (3.0, 3.0, 2)

    run(story())


async def _end_of(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
