"""Features of all services: health, reflection and refusal metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as rpb

from andon.protocol.layout import Layout
from andon.protocol.reasons import Reason
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2, ring_pb2
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from integration.fixtures.console import andon
from integration.harness import Service
from integration.strangers import REDUCE, TRAIN, Stranger

pytestmark = pytest.mark.integration

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
COORDINATOR, REDUCER = "andon.v1.Coordinator", "andon.v1.Reducer"
BUF = Path(sys.executable).with_name("buf")
VERSIONS = ("v1", "v1alpha")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("services") / "run", 1) as service:
        yield service


@contextmanager
def health_of(service: Service) -> Iterator[Any]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(service.address, options=options) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def asked(name: str) -> Any:
    return health_pb2.HealthCheckRequest(service=name)


def told(watch: Any) -> tuple[list[int], grpc.StatusCode]:
    """All answers of a watch, and how it ended."""
    states = []
    try:
        for answer in watch:
            states.append(answer.status)
    except grpc.RpcError:
        return states, watch.code()
    return states, watch.code()


def reflect(service: Service, version: str, *requests: Any) -> list[Any]:
    with grpc.insecure_channel(service.address) as channel:
        call: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=rpb.ServerReflectionRequest.SerializeToString,
            response_deserializer=rpb.ServerReflectionResponse.FromString,
        )
        return list(call(iter(requests), timeout=30))


def about(service: Service, version: str, symbol: str) -> dict[str, Any]:
    """The files that describe a symbol, by name."""
    [answer] = reflect(service, version, rpb.ServerReflectionRequest(file_containing_symbol=symbol))
    assert answer.original_request.file_containing_symbol == symbol
    assert not answer.HasField("error_response"), (symbol, answer.error_response)
    files = {}
    for data in answer.file_descriptor_response.file_descriptor_proto:
        file = descriptor_pb2.FileDescriptorProto.FromString(data)
        files[file.name] = file
    return files


def buf(service: Service, *arguments: str) -> str:
    command = [str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_health_tells_of_the_process_and_of_each_service_and_knows_no_other(
    service: Service,
) -> None:
    with health_of(service) as health:
        checked = {name: health.Check(asked(name)).status for name in ("", COORDINATOR, REDUCER)}
        listed = {
            name: each.status
            for name, each in health.List(health_pb2.HealthListRequest()).statuses.items()
        }
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(asked("andon.v1.Ring"))
        watch = health.Watch(asked("andon.v1.Ring"))
        first = next(watch).status
        watch.cancel()

    assert checked == listed == dict.fromkeys(("", COORDINATOR, REDUCER), SERVING)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert first == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_a_halt_changes_no_health_and_a_drain_only_that_of_the_coordinator(tmp_path: Path) -> None:
    names = ("", COORDINATOR, REDUCER)

    with Service(tmp_path / "run", 1) as service, health_of(service) as health:
        watches = {name: health.Watch(asked(name)) for name in names}
        first = [next(watches[name]).status for name in names]
        with grpc.insecure_channel(service.address) as channel:
            coordinator = CoordinatorStub(channel)
            halted = coordinator.PullCord(pb.PullCordRequest(reason="test"), timeout=10)
            during = [health.Check(asked(name)).status for name in names]
            coordinator.Drain(pb.DrainRequest(), timeout=10)
        drained = next(watches[COORDINATOR]).status
        after = [health.Check(asked(name)).status for name in names]
        code, said, _ = andon(
            tmp_path, "health", "--address", service.address, "--service", COORDINATOR
        )
        service.stop()
        ends = {name: told(watches[name]) for name in names}

    assert halted.halt.id
    assert first == during == [SERVING, SERVING, SERVING]
    assert drained == NOT_SERVING
    assert after == [SERVING, NOT_SERVING, SERVING]
    assert (code, "takes no new workers" in said) == (1, True)
    # The halt changed no health status, so the coordinator's watch had got its last answer before.
    assert ends == {
        "": ([NOT_SERVING], grpc.StatusCode.UNAVAILABLE),
        COORDINATOR: ([], grpc.StatusCode.UNAVAILABLE),
        REDUCER: ([NOT_SERVING], grpc.StatusCode.UNAVAILABLE),
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_reflection_lists_every_service_and_describes_every_method_and_type(
    service: Service, version: str
) -> None:
    [listed] = reflect(service, version, rpb.ServerReflectionRequest(list_services=""))
    names = {each.name for each in listed.list_services_response.service}

    assert names == {
        COORDINATOR,
        REDUCER,
        "grpc.health.v1.Health",
        *(f"grpc.reflection.{each}.ServerReflection" for each in VERSIONS),
    }
    for name in names:
        files = about(service, version, name)
        assert all(set(file.dependency) <= files.keys() for file in files.values()), name
        defined = {
            f".{file.package}.{message.name}"
            for file in files.values()
            for message in file.message_type
        }
        [described] = [
            each
            for file in files.values()
            for each in file.service
            if f"{file.package}.{each.name}" == name
        ]
        assert described.method
        for method in described.method:
            assert {method.input_type, method.output_type} <= defined, method.name


def test_what_reflection_describes_is_the_protocol(service: Service) -> None:
    for module in (pb, reducer_pb2, ring_pb2):
        written = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(written)
        descriptor = module.DESCRIPTOR
        for name in (*descriptor.message_types_by_name, *descriptor.services_by_name):
            files = about(service, "v1", f"andon.v1.{name}")
            assert files[written.name] == written

    [nothing] = reflect(
        service, "v1", rpb.ServerReflectionRequest(file_containing_symbol="andon.v1.Nothing")
    )
    assert nothing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def _services(module: Any) -> Iterator[str]:
    for service in module.DESCRIPTOR.services_by_name.values():
        yield service.name
        yield from (f"{service.name}.{method.name}" for method in service.methods)


def test_v1_describes_itself_under_its_own_name(service: Service) -> None:
    [file] = about(service, "v1", "grpc.reflection.v1.ServerReflectionResponse").values()

    assert (file.name, file.package) == (
        "grpc/reflection/v1/reflection.proto",
        "grpc.reflection.v1",
    )
    assert "v1alpha" not in str(file)


def test_buf_lists_and_calls_what_is_served_without_a_proto_file(service: Service) -> None:
    url = f"http://{service.address}"

    services = buf(service, "--list-services", url).split()
    methods = buf(service, "--list-methods", url).split()
    status = json.loads(buf(service, "-d", "{}", f"{url}/{COORDINATOR}/GetStatus"))
    health = json.loads(buf(service, f"{url}/grpc.health.v1.Health/Check"))
    refused = buf(service, "-d", '{"runId": "no"}', f"{url}/{COORDINATOR}/GetStatus")

    assert {COORDINATOR, REDUCER, "grpc.reflection.v1.ServerReflection"} <= set(services)
    served = {*_services(pb), *_services(reducer_pb2)} - {"Coordinator", "Reducer"}
    assert {f"andon.v1.{name.replace('.', '/')}" for name in served} <= set(methods)
    assert status["status"]["runId"] == service.run_id
    assert health == {"status": "SERVING"}
    assert '"not_found"' in refused
    assert "google.rpc.ErrorInfo" in refused


def test_every_call_that_ends_with_a_reason_is_counted_by_service(service: Service) -> None:
    stranger = Stranger(service.address, "no", Layout(()), RunPlan(global_batch=1))
    before = service.refusals()

    ended = [
        stranger.refused(TRAIN, stranger.join().SerializeToString()),
        stranger.refused(TRAIN, b"\xff"),
        stranger.refused(REDUCE, b"\xff"),
    ]

    assert [each.reason for each in ended] == ["WRONG_RUN", "INVALID_MESSAGE", "INVALID_MESSAGE"]
    after = service.refusals()
    assert {
        name: count - before[name] for name, count in after.items() if count != before[name]
    } == {
        ("coordinator", "wrong_run"): 1,
        ("coordinator", "invalid_message"): 1,
        ("reducer", "invalid_message"): 1,
    }
    assert before.keys() == {
        (name, reason.lower()) for name in ("coordinator", "reducer", "server") for reason in Reason
    }
