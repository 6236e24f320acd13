"""The coordinator on a real gRPC server: lost workers, lost coordinators, and who looks on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from andon.host.process import own_process
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.app import CoordinatorFailed
from andon_coordinator.transport import service
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.service import CoordinatorService
from andon_coordinator.transport.task import LineTask
from integration.served import (
    RUN,
    code_of,
    config_in,
    end_of,
    first_round,
    refused,
    serving,
    until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

SCRIPT = """
import asyncio, sys
from andon.protocol.run_settings import RunPlan
from andon_coordinator.transport.service import CoordinatorService
from andon_coordinator.transport.task import LineTask, TaskSettings
from andon.testing import ScriptedWorker
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


GIL_HOLDER = """
import asyncio, ctypes, sys
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.service import CoordinatorService
from andon_coordinator.transport.task import LineTask, TaskSettings
from andon.testing import ScriptedWorker
async def main():
    plan = RunPlan(global_batch=5, dataset_size=12, seed=3)
    worker = ScriptedWorker(sys.argv[1], run_id=sys.argv[2], plan=plan, slot=0)
    await worker.join()
    ctypes.PyDLL(None).sleep(4)  # Two leases.
    await worker.send(heartbeat=pb.Heartbeat(sequence=7))
    print((await worker.call.read()).heartbeat_answer.sequence, flush=True)
asyncio.run(main())
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a process; it stays in the process table."""
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


async def test_killed_process_is_known_to_be_gone_at_once(tmp_path: Path) -> None:
    # The grace period is longer than this test, so only a process known to be gone is lost.
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


@pytest.mark.skipif(not own_process().host, reason="/proc is not Linux's, or hidden")
async def test_a_killed_process_is_gone_before_its_connections_are(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    # As long as the kernel frees the memory of a killed process, its connections stay. Here they
    # stay for good, since they are this process's.
    async with serving(config_in(tmp_path, rejoin_grace_s=1000.0)) as served:
        survivor, killed = served.worker(0), served.worker(1)
        await survivor.join()
        await killed.join(process=pb.ProcessPlace(host=own_process().host, id=child.pid))
        await first_round([survivor, killed])

        _kill(child)

        await survivor.expect("round_voided")


async def test_a_process_that_dies_as_its_join_is_read_keeps_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, joins = CoordinatorService._joining, LineTask.join
    read, tried = asyncio.Event(), asyncio.Event()

    async def reads_late(service: CoordinatorService, message: Any) -> Any:
        read.set()
        # As `asyncio.wait_for` does in Python 3.11 if a message and the cancellation come together.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await reads(service, message)

    def then_joins(task: LineTask, *arguments: Any) -> None:
        joins(task, *arguments)
        tried.set()

    async with serving(config_in(tmp_path)) as served:
        monkeypatch.setattr(CoordinatorService, "_joining", reads_late)
        monkeypatch.setattr(LineTask, "join", then_joins)
        dead = served.worker(0, incarnation=7)
        joining = asyncio.create_task(dead.join())
        await read.wait()
        dead.call.cancel()
        await tried.wait()
        monkeypatch.undo()
        await asyncio.wait({joining})

        accepted = await served.worker(0, incarnation=8).join()

    assert joining.cancelled() or joining.exception() is not None
    assert accepted.worker == 0


async def test_worker_of_a_half_closed_stream_may_come_back(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, rejoin_grace_s=1000.0)) as served:
        survivor, other = await served.workers()
        await first_round([survivor, other])

        await other.call.done_writing()

        await survivor.expect("round_voided")
        assert await other.call.code() is grpc.StatusCode.OK
    with JournalReader(tmp_path / "journal.sqlite") as journal:
        assert journal.departures() == []


async def test_stopped_process_loses_its_lease_and_one_that_only_says_nothing_does_not(
    tmp_path: Path,
) -> None:
    async with serving(config_in(tmp_path, liveness_s=2.0)) as served:
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


async def test_worker_that_holds_the_interpreter_lock_is_not_taken_for_dead(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, liveness_s=2.0)) as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", GIL_HOLDER, served.address, RUN),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"7\n"
        await process.wait()


async def test_term_above_a_workers_greater_one_is_durable_before_use(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path)) as served:
        seen = served.coordinator.status().term + 2**32
        workers = [served.worker(slot) for slot in range(2)]
        for worker in workers:
            await worker.join(greatest_term=seen)
        assignments = await first_round(workers)

        assert assignments[0].key.term > seen
    with JournalReader(tmp_path / "journal.sqlite") as journal:
        assert journal.terms()[-1] == assignments[0].key.term


async def test_coordinator_that_was_taken_over_closes_every_stream(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path)) as served:
        worker = served.worker(0)
        await worker.join()
        with sqlite3.connect(tmp_path / "journal.sqlite") as other:
            other.execute("INSERT INTO terms VALUES (?, 0)", ("f" * 16,))
        other.close()

        (answer,) = await asyncio.gather(served.worker(1).join(), return_exceptions=True)

        # Refused if what the first join had still to write has shown it already.
        if not isinstance(answer, pb.JoinAccepted):
            assert isinstance(answer, grpc.aio.AioRpcError)
            assert answer.code() is grpc.StatusCode.UNAVAILABLE
        assert await code_of(end_of(worker.call)) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(CoordinatorFailed, match="took the run over"):
            await served.coordinator.wait()
        assert await code_of(served.worker(0).join()) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(served.stub.Drain(pb.DrainRequest())) is grpc.StatusCode.UNAVAILABLE


async def test_a_complete_line_waits_for_those_who_may_still_come_and_for_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async with serving(config_in(tmp_path, liveness_s=1.5, max_workers=3)) as served:
        tell = served.coordinator.tell_the_rest
        workers = await served.workers()
        away = served.worker(2)
        await away.join()
        await asyncio.sleep(1.2)  # More than two heartbeats: it is stopped, or cut off.
        away.call.cancel()
        joining = served.stub.Train()
        await until(lambda: served.coordinator._task._streams.undecided == 3)
        await asyncio.gather(*(worker.work() for worker in workers))
        assert await served.coordinator.wait()
        telling = asyncio.create_task(tell(30.0))
        await until(lambda: "end_awaits_workers lost=2 joining=1" in caplog.text)

        assert not telling.done()
        assert (await refused(away.join()))[1].reason == "COMPLETE"
        assert not telling.done()
        await joining.write(pb.TrainRequest(join=pb.Join(run_id=RUN, protocol_version=1)))
        await refused(joining.read())
        await asyncio.wait_for(telling, 10)

        await tell(30.0)

    with JournalReader(tmp_path / "journal.sqlite") as journal:
        messages = [gone.message for gone in journal.departures()]
    assert any(re.fullmatch(r"silent for \d+ s", each) for each in messages), messages
    assert caplog.text.count("end_awaits_workers") == 1
    assert "workers_not_told" not in caplog.text


async def test_what_happens_while_a_watcher_does_not_look_is_shown_to_it_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_WATCH_EVERY_S", 3600.0)
    monkeypatch.setattr(LineTask, "look_s", 0.2)

    async with serving(config_in(tmp_path)) as served:
        await first_round(await served.workers())
        watch = served.stub.WatchStatus(pb.WatchStatusRequest(run_id=RUN))
        assert (await watch.read()).status.state == pb.LINE_STATE_RUNNING

        await served.stub.PullCord(pb.PullCordRequest(reason="loss looks odd"))
        while (await watch.read()).status.state != pb.LINE_STATE_HALTED:
            pass
        await served.coordinator.close()

        await end_of(watch)
        assert await watch.code() is grpc.StatusCode.OK
