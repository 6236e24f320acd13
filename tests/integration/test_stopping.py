"""SIGTERM to a service: all peers are informed, the journal is complete, and the exit code is 0."""

from __future__ import annotations

import signal
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry

from andon.protocol import tokens
from andon.protocol.layout import Layout
from andon.protocol.messages import OpenRound
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire.frames import frame_request
from andon_coordinator.app import build_coordinator, server_options
from andon_coordinator.transport.reader import JournalReader
from andon_server.serving import GRACE_S
from chaos.reducers import SECRET, Reducer
from hostile.http2 import DATA, HALF_CLOSE, HEADERS, PREFACE, SETTINGS, Connection, frame
from integration.harness import Service, on_line, start_worker
from integration.served import RUN, config_in, refused
from integration.served import SECRET as SESSION_SECRET
from integration.strangers import REDUCE, TRAIN, Refused, Stranger, end_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

LEAVING = "UNAVAILABLE SERVICE_LEAVING"
GOES_AWAY = [
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    LEAVING,
]
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
PATIENCE_S = 60


@contextmanager
def watched(address: str) -> Iterator[Any]:
    """A watch of the process's health that has received SERVING once."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        states = [next(watch).status]
        yield watch, states


@contextmanager
def stuck_watch(address: str) -> Iterator[None]:
    """A watch of the process's health by a client that never reads."""
    stuck, no_window = Connection(address, polite=False), struct.pack(">HI", 4, 0)
    stuck.send(PREFACE + frame(SETTINGS, 0, 0, no_window))
    stuck.send(frame(DATA, HALF_CLOSE, stuck.open("/grpc.health.v1.Health/Watch"), bytes(5)))
    said = stuck.socket.makefile("rb")
    while (head := said.read(9))[3] != HEADERS:
        said.read(int.from_bytes(head[:3], "big"))
    try:
        yield
    finally:
        said.close()
        stuck.close()


def told(watch: Any) -> list[Any]:
    """The remaining answers of a watch, and how it ends."""
    seen: list[Any] = []
    try:
        for answer in watch:
            seen.append(answer.status)
    except grpc.RpcError as error:
        seen.append(str(Refused.of(error)))
    return seen


def stranger_at(service: Service) -> Stranger:
    return Stranger(service.address, service.run_id, Layout(()), RunPlan(global_batch=1))


def test_a_service_that_is_told_to_end_tells_everybody_and_leaves_a_whole_journal(
    tmp_path: Path,
) -> None:
    with Service(tmp_path / "run", 2) as service, ExitStack() as stack:
        stranger = stranger_at(service)
        watch, states = stack.enter_context(watched(service.address))
        worker, worker_hears = stack.enter_context(stranger.call(TRAIN))
        worker.put(stranger.join(launch_slot=0).SerializeToString())
        accepted = pb.TrainResponse.FromString(next(worker_hears)).join_accepted
        bulk, bulk_hears = stack.enter_context(stranger.call(REDUCE))
        bulk.put(frame_request(OpenRound(service.run_id, 0, accepted.session_token)))
        next(bulk_hears)
        endless, learner_hears = stack.enter_context(stranger.call(REFLECTION))
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        endless.put(asked.SerializeToString())
        next(learner_hears)
        _, nobody_hears = stack.enter_context(stranger.call(TRAIN))
        channel = stack.enter_context(grpc.insecure_channel(service.address))
        people = CoordinatorStub(channel).WatchStatus(pb.WatchStatusRequest(), timeout=PATIENCE_S)
        next(people)

        service.process.send_signal(signal.SIGTERM)

        states += told(watch)
        ends = [
            str(end_of(call)) for call in (worker_hears, bulk_hears, learner_hears, nobody_hears)
        ]
        code = service.process.wait(PATIENCE_S)
        shown = end_of(people)
        with JournalReader(service.journal) as journal:
            faults = journal.ledger_faults()

    assert states == GOES_AWAY
    assert ends == [LEAVING, LEAVING, LEAVING, LEAVING]
    assert shown.code is grpc.StatusCode.OK
    assert (code, faults) == (0, [])
    assert "Traceback" not in (service.folder / "service.log").read_text()
    assert said_by(service) == ""


def said_by(service: Service) -> str:
    return service.folder.with_name(f"{service.folder.name}.err").read_text()


def test_a_worker_whose_service_ends_waits_and_goes_on_with_the_next_one(tmp_path: Path) -> None:
    go = tmp_path / "go"
    spec: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 6}
    spec["pauses"] = [{"slot": 0, "step": 3, "until": str(go)}]

    with Service(tmp_path / "run", 1) as service:
        worker = start_worker(tmp_path, spec, slot=0, **on_line(service, 0, 1))
        service.await_status(lambda line: line.step >= 2)
        while not go.with_suffix(".here").exists():
            time.sleep(0.01)
        service.stop()
        code = service.process.wait(PATIENCE_S)
    port = int(service.address.rpartition(":")[2])
    with Service(tmp_path / "run", 1, "--run-id", service.run_id, port=port) as again:
        go.touch()
        worker_code = worker.wait()
        with JournalReader(again.journal) as journal:
            steps = [result.stop_reason for result in journal.results()]

    assert (code, worker_code) == (0, 0), worker.output
    assert steps == ["", "", "", "", "", "steps"]
    assert "Traceback" not in worker.output


def test_a_reducer_that_is_told_to_end_tells_everybody_and_its_coordinator_notices(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    flags = ("--reducers", "2", "--secret-file", str(tmp_path / "secret"))

    with Service(tmp_path / "run", 1, *flags) as service, ExitStack() as stack:
        reducer = Reducer(service.address, tmp_path)
        stack.callback(reducer.close)
        reducer.start()
        service.await_status(lambda line: len(line.reducers) == 2)
        watch, states = stack.enter_context(watched(reducer.address))
        stranger = Stranger(reducer.address, service.run_id, Layout(()), RunPlan(global_batch=1))
        bulk, hears = stack.enter_context(stranger.call(REDUCE))
        token = tokens.session_token(SECRET.encode(), service.run_id, 0)
        bulk.put(frame_request(OpenRound(service.run_id, 0, token)))
        next(hears)

        assert reducer.process is not None
        reducer.signal(signal.SIGTERM)

        states += told(watch)
        end = str(end_of(hears))
        code = reducer.process.wait(PATIENCE_S)
        service.await_status(lambda line: len(line.reducers) == 1)

    assert (states, end, code) == (GOES_AWAY, LEAVING, 0)
    assert (tmp_path / "reducers.txt").read_text() == ""


def test_a_client_that_does_not_read_is_cut_after_the_grace_and_by_a_second_signal_at_once(
    tmp_path: Path,
) -> None:
    ends = []
    for signals in (1, 2):
        with Service(tmp_path / f"run-{signals}", 1) as service, ExitStack() as stack:
            watch, states = stack.enter_context(watched(service.address))
            stack.enter_context(stuck_watch(service.address))
            service.process.send_signal(signal.SIGTERM)
            states += told(watch)
            began = time.monotonic()
            if signals == 2:
                service.process.send_signal(signal.SIGTERM)
            code = service.process.wait(PATIENCE_S)
            ends.append((code, time.monotonic() - began))
            with JournalReader(service.journal) as journal:
                assert journal.ledger_faults() == []
        assert states == GOES_AWAY

    [(patient, patient_s), (hasty, _)] = ends
    assert (patient, hasty) == (0, -signal.SIGTERM)
    # The client used up the grace period: without it, the process ends earlier.
    assert patient_s > GRACE_S / 2


async def test_a_person_is_told_that_the_coordinator_goes_away(tmp_path: Path) -> None:
    coordinator = build_coordinator(config_in(tmp_path), CollectorRegistry(), SESSION_SECRET)
    server = grpc.aio.server(options=server_options())
    coordinator.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = CoordinatorStub(channel)
        await coordinator.close()

        code, info = await refused(stub.PullCord(pb.PullCordRequest(run_id=RUN), timeout=30))

        assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_LEAVING")
    await server.stop(1.0)
