"""The coordinator behind a real gRPC server: no mistake, a peer's or its own, spreads."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.reasons import Reason
from andon.testing import small_layout
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion, layouts
from andon_coordinator.app import (
    Coordinator,
    CoordinatorFailed,
)
from andon_coordinator.config import CoordinatorConfig
from andon_coordinator.core.effects import AcceptJoin, Effect
from andon_coordinator.core.events import CordPulled, Event
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.transport.access_control import AccessControl
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.outgoing import ServicePlaces
from andon_coordinator.transport.registration import ReducerRegistration
from andon_coordinator.transport.service import CoordinatorService
from andon_coordinator.transport.streams import WorkerStream
from andon_coordinator.transport.task import LineTask
from hostile.http2 import DATA, HALF_CLOSE, PREFACE, Connection, frame, grpc_message, window
from integration.served import (
    PLAN,
    RUN,
    config_in,
    end_of,
    refused,
    run,
    served_by,
    serving,
    task_of,
    until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


class Defective:
    """An observer with a bug: it fails once a worker is accepted, or a person pulls the cord."""

    def observe(self, event: Event, done: Sequence[Effect], now: float) -> None:
        if isinstance(event, CordPulled) or any(isinstance(each, AcceptJoin) for each in done):
            raise RuntimeError("a secret of the inside")

    def tick(self, status: LineSnapshot) -> None:
        """Does nothing."""


def failing_task(config: CoordinatorConfig) -> LineTask:
    """A task with such an observer."""
    return task_of(LineTask, config, (Defective(),))


async def test_whoever_asks_hears_that_the_coordinator_failed(tmp_path: Path) -> None:
    task = failing_task(config_in(tmp_path))
    reducer = task.open_registration()
    task.start()

    reasons = []
    for who in ("the first", "the second"):
        with pytest.raises(LineError) as told:
            task.ask(CordPulled("", who))
        reasons.append(told.value.reason)
        await asyncio.wait_for(task.over.wait(), 30)
    await task.close()

    assert reasons == [Reason.INTERNAL, Reason.SERVICE_LEAVING]
    assert reducer.error is not None


async def test_internal_error_ends_every_stream_and_reveals_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_in(tmp_path)
    task = failing_task(config)
    registration = ReducerRegistration(task, run_id=RUN, secret=b"", join_s=30.0)
    access = AccessControl(run_id=RUN)
    coordinator = Coordinator(
        task,
        CoordinatorService(
            task,
            registration,
            access=access,
            places=ServicePlaces(),
            join_s=30.0,
            count=lambda reason: None,
        ),
        access,
    )
    async with served_by(coordinator, config, CollectorRegistry()) as served:
        worker = served.worker(0)
        await worker.join()

        code, info = await refused(worker.receive())

        assert (code, info.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        with pytest.raises(CoordinatorFailed):
            await served.coordinator.wait()

    assert "a secret of the inside" in caplog.text


async def test_streams_beyond_the_limit_end_the_oldest_that_did_not_join(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, expect_workers=1)) as served:
        limit = 4 * 1 + 16
        calls = [served.stub.Train() for _ in range(limit)]
        for call in calls:
            await call.wait_for_connection()
        await served.stub.GetStatus(pb.GetStatusRequest())

        assert (await served.worker(0).join()).worker == 0

        ends = [asyncio.create_task(refused(end_of(call))) for call in calls]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        code, info = done.pop().result()
        assert (code, info.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_STREAMS",
        )
        assert sum(call.done() for call in calls) == 1
        for each in ends:
            each.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_stream_that_never_joins_gives_its_place_back(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, expect_workers=1, join_s=0.2)) as served:
        silent = [served.stub.Train() for _ in range(4 * 1 + 16)]
        for call in silent:
            code, info = await refused(end_of(call))
            assert (code, info.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_MESSAGE",
            )
            assert await call.details() == "no join came within 0.2 s"

        assert (await served.worker(0).join()).worker == 0


async def test_worker_that_does_not_read_is_cut_off_and_the_others_go_on(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, rejoin_grace_s=0.0)) as served:
        # The window does not grow: answers to heartbeats fill it, and then the queue.
        deaf = served.worker(0, options=(("grpc.http2.bdp_probe", 0),))
        await deaf.join()

        while served.coordinator.status().live == 1:
            await deaf.send(heartbeat=pb.Heartbeat(sequence=2**64 - 1))

        await asyncio.gather(*(worker.work() for worker in await served.workers()))
        assert await served.coordinator.wait()
        code, info = await refused(end_of(deaf.call))
        assert (code, info.reason) == (grpc.StatusCode.ABORTED, "REJOIN_NEEDED")


async def test_worker_that_half_closed_and_does_not_read_does_not_keep_its_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async with serving(config_in(tmp_path, join_s=0.2, rejoin_grace_s=0.0)) as served:
        join = pb.Join(
            run_id=RUN,
            protocol_version=PROTOCOL_VERSION,
            layout=layouts.layout_to_proto(small_layout()),
            plan=conversion.plan_to_proto(PLAN),
        )
        message = grpc_message(pb.TrainRequest(join=join).SerializeToString())
        deaf = Connection(served.address, polite=False)
        deaf.send(PREFACE + window(0))
        stream = deaf.open("/andon.v1.Coordinator/Train")
        deaf.send(frame(DATA, HALF_CLOSE, stream, message))

        while "does not read its stream" not in caplog.text:
            deaf.answer()  # It answers pings too, so its connection lives.
            await asyncio.sleep(0.01)

        assert served.coordinator.status().live == 0
        # Without a window a message can't leave. Once there is one, the call ends as it should.
        deaf.send(window(2**16))
        while not deaf.ended(stream):
            deaf.answer()
            await asyncio.sleep(0.01)
        deaf.close()
    assert "ExecuteBatchError" not in caplog.text


def test_a_refused_join_leaves_no_ring_that_would_hold_its_message(tmp_path: Path) -> None:
    def kept() -> list[WorkerStream]:
        return [each for each in gc.get_objects() if type(each) is WorkerStream]

    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            await served.worker(0).join()
            gc.collect()
            # Held here: nothing new has the id of one of them. What another test left behind may be
            # freed at any moment: to count would compare with a number that does not stay.
            before = kept()
            known = set(map(id, before))
            for other in ({"run_id": "other"}, {"layout": small_layout(5)}):
                await refused(served.worker(1, **other).join())
            intruder = served.stub.Train()
            await intruder.write(pb.TrainRequest(join=pb.Join(run_id=RUN)))
            await refused(end_of(intruder))
            await until(lambda: all(id(each) in known for each in kept()))

    gc.disable()  # What is freed now is freed because nothing refers to it.
    try:
        run(story())
    finally:
        gc.enable()
