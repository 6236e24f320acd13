"""The coordinator on a real gRPC server: it forms, trains, halts and completes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from andon.protocol import tokens
from andon.protocol.records import RecordKind
from andon.testing import small_layout
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_coordinator.core.effects import LineState
from andon_coordinator.transport import service
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.task import LineTask
from integration.served import (
    PLAN,
    RUN,
    SECRET,
    config_in,
    end_of,
    first_round,
    refused,
    serving,
    until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


async def test_two_workers_bootstrap_train_and_complete(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path)) as served:
        workers = await served.workers()
        await asyncio.gather(*(worker.work() for worker in workers))
        assert await served.coordinator.wait()

        assert served.coordinator.status().state is LineState.COMPLETE
        kinds = [each.record.kind for each in workers[0].committed]
        assert (
            kinds
            == [conversion.enum_to_proto(RecordKind.INITIAL)]
            + [conversion.enum_to_proto(RecordKind.STEP)] * 3
        )
        assert [each.record.step for each in workers[1].committed] == [1, 2, 3]
        assert workers[1].committed[-1].stop_reason == "steps"
        assert workers[1].committed[-1].loss == 1.0
        assert served.metric("andon_steps_committed_total") == 3
        assert served.metric("andon_samples_committed_total") == 5 + 5 + 2
        assert served.metric("andon_step_attempts_total", cause="first") == 3

    with JournalReader(tmp_path / "journal.sqlite") as journal:
        assert journal.steps() == 3
        assert journal.losses() == [1.0, 1.0, 1.0]
        assert journal.samples() == 12
        assert journal.digests() == {0: bytes(32).hex(), 1: bytes(32).hex()}
        assert [gone.reason for gone in journal.departures()] == ["COMPLETE", "COMPLETE"]
        assert journal.run().plan == PLAN


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
        assert "silent for 1 s" in [gone.message for gone in journal.departures()]
    assert caplog.text.count("end_awaits_workers") == 1
    assert "workers_not_told" not in caplog.text


async def test_ranks_follow_launch_slots_not_who_joins_first(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path)) as served:
        second, first = served.worker(1), served.worker(0)
        await second.join()
        await first.join()
        assignments = await first_round([first, second])

        assert [each.rank for each in assignments] == [0, 1]
        assert list(assignments[0].roster) == [0, 1]
        assert [[(part.start, part.stop) for part in each.positions] for each in assignments] == [
            [(0, 3)],
            [(3, 5)],
        ]


async def test_join_is_answered_with_all_that_a_worker_needs(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, chunk_elements=77)) as served:
        accepted = await served.worker(1, layout=small_layout(9)).join()

        assert accepted.worker == 1
        assert tokens.session_serial(SECRET, RUN, 1, accepted.session_token) is not None
        (share,) = accepted.reducers
        assert (share.address, share.start_element, share.stop_element) == ("", 0, 9)
        assert accepted.policy.chunk_elements == 77
        assert conversion.liveness_from_proto(accepted.liveness).lease_s == 30.0
        assert accepted.join_status == pb.JOIN_STATUS_FRESH
        assert accepted.term == served.coordinator.status().term


async def test_heartbeat_is_answered(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path)) as served:
        worker = served.worker(0)
        await worker.join()

        beat = pb.Heartbeat(sequence=41, activity=pb.ACTIVITY_BUSY, detail="upload")
        await worker.send(heartbeat=beat)

        assert (await worker.call.read()).heartbeat_answer.sequence == 41
        (shown,) = (await served.stub.GetStatus(pb.GetStatusRequest())).status.workers
        assert (shown.activity, shown.detail) == (pb.ACTIVITY_BUSY, "upload")


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
