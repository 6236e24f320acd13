"""Keepalive pings between real gRPC peers, ten times as fast as the services' own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from andon.host.keepalive import Keepalive

pytestmark = pytest.mark.integration

PAIR = Keepalive(least_s=1.0, client_ping_s=1.0, ping_s=60.0)
"""The documented ping rate, scaled to gRPC's fastest. A silent server clears no strikes."""

STRICT = replace(PAIR, least_s=4.0, client_ping_s=4.0)
"""A server for which the same client pings too often: it rejects the fourth ping."""

CLIENT = dict(PAIR.client_options())
RESTLESS = {**CLIENT, "grpc.keepalive_permit_without_calls": 1}


@contextmanager
def served(pair: Keepalive) -> Iterator[tuple[str, threading.Event]]:
    """A server whose only call answers nothing until the test releases it."""
    over = threading.Event()

    def wait(request: bytes, context: Any) -> bytes:
        over.wait(30)
        return b"over"

    server = grpc.server(futures.ThreadPoolExecutor(8), options=pair.server_options())
    calls: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Wait": grpc.unary_unary_rpc_method_handler(wait)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", over
    finally:
        over.set()
        server.stop(None).wait()


@contextmanager
def connected(address: str, options: dict[str, int]) -> Iterator[grpc.Channel]:
    own = {"grpc.use_local_subchannel_pool": 1, "grpc.enable_retries": 0}
    with grpc.insecure_channel(address, list({**options, **own}.items())) as channel:
        grpc.channel_ready_future(channel).result(timeout=10)
        yield channel


def asked(channel: grpc.Channel) -> Any:
    call: Any = channel.unary_unary(
        "/test.Test/Wait", request_serializer=None, response_deserializer=None
    )
    return call.future(b"", timeout=30)


def test_pings_at_the_documented_rate_are_borne_with_a_call_and_without_and_more_are_not() -> None:
    moved = threading.Event()

    def follow(state: grpc.ChannelConnectivity) -> None:
        if state is not grpc.ChannelConnectivity.READY:
            moved.set()

    with (
        served(STRICT) as (strict, _),
        served(PAIR) as (fitting, over),
        connected(strict, CLIENT) as eager,
        connected(fitting, CLIENT) as steady,
        connected(fitting, RESTLESS) as idle,
    ):
        idle.subscribe(follow)
        steady_call, eager_call = asked(steady), asked(eager)
        sent_away = eager_call.exception(timeout=20)
        borne = not (steady_call.done() or moved.is_set())
        over.set()
        answer = steady_call.result(timeout=10)
        idle.unsubscribe(follow)

    assert isinstance(sent_away, grpc.RpcError)
    assert sent_away.code() is grpc.StatusCode.UNAVAILABLE
    assert "too many pings" in str(sent_away.details()).lower().replace("_", " ")
    assert borne
    assert answer == b"over"
