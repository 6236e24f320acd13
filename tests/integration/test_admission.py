"""Admission at a real server: which calls it accepts, which it ends, and the answers it gives."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from andon_server.admission import Admission
from andon_server.limits import Limits
from andon_server.serving import introducing
from integration.served import end_of, run, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


@asynccontextmanager
async def served(
    refused: list[str] | None = None, **limits: Any
) -> AsyncIterator[tuple[grpc.aio.Channel, Admission]]:
    """A server with health and reflection, and its admission control."""
    admission = Admission(Limits(**limits), (refused if refused is not None else []).append)
    server = grpc.aio.server(interceptors=[admission])
    port = server.add_insecure_port("127.0.0.1:0")
    async with introducing(server, ()):
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, admission
        await server.stop(None)


def silent(channel: grpc.aio.Channel) -> Any:
    """An open call that sends nothing."""
    return channel.stream_stream("/grpc.health.v1.Health/Check")()


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await end_of(call)
    return caught.value.code(), caught.value.details() or ""


def _are_silent(admission: Admission, count: int) -> bool:
    return admission.silent_calls == count


async def healthy(channel: grpc.aio.Channel) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest())
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_unary_and_streaming_calls_are_served_as_before() -> None:
    refused: list[str] = []
    async with served(refused) as (channel, _):
        assert await healthy(channel)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest())
        told = await watching.read()
        assert told.status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="none"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        unknown: Any = channel.unary_unary("/andon.v1.None/None")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert refused == []


def test_a_call_that_ended_with_an_error_is_not_kept_in_a_ring() -> None:
    def kept() -> list[object]:
        return [each for each in gc.get_objects() if type(each).__module__ == Admission.__module__]

    async def story() -> None:
        async with served() as (channel, admission):
            # Held here: nothing new has the id of one of them. What another test left behind may be
            # freed at any moment: to count would compare with a number that does not stay.
            before = kept()
            known = set(map(id, before))
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Check(health_pb2.HealthCheckRequest(service="none"))
            await until(lambda: admission.open_calls == 0)
            await until(lambda: all(id(each) in known for each in kept()))

    gc.disable()  # What is freed now is freed because nothing refers to it.
    try:
        run(story())
    finally:
        gc.enable()


async def test_one_silent_call_too_many_ends_the_oldest_and_who_speaks_is_served() -> None:
    refused: list[str] = []
    async with served(refused, max_silent_calls=3) as (channel, admission):
        calls = []
        for number in range(3):
            calls.append(silent(channel))
            await until(partial(_are_silent, admission, number + 1))

        assert await healthy(channel)

        code, text = await ended(calls[0])
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-silent-calls" in text
        assert refused == ["TOO_MANY_STREAMS"]
        assert not calls[1].done()
        assert not calls[2].done()


async def test_a_call_that_never_speaks_is_ended() -> None:
    async with served(first_message_timeout_s=0.1) as (channel, _):
        code, text = await ended(silent(channel))

        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no message came within 0.1 s" in text


async def test_watchers_beyond_their_limit_are_refused_and_others_are_not() -> None:
    async with served(max_watchers=2) as (channel, admission):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watching = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for each in watching:
            await each.read()

        code, text = await ended(stub.Watch(health_pb2.HealthCheckRequest()))

        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-watchers" in text
        assert await healthy(channel)
        watching[0].cancel()
        await until(lambda: admission.open_calls == 1)
        again = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await again.read()).status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("setting", ["max_calls", "max_calls_per_host"])
async def test_calls_beyond_the_limit_are_refused_by_its_flag(setting: str) -> None:
    refused: list[str] = []
    async with served(refused, **{setting: 1}) as (channel, admission):
        holding = silent(channel)
        await until(lambda: admission.open_calls == 1)

        code, text = await ended(silent(channel))

        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--" + setting.replace("_", "-") in text
        assert refused == ["TOO_MANY_STREAMS"]
        holding.cancel()
