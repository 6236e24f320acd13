"""A real reducer on a loopback port, and workers' streams to it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self

import grpc
import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from andon.protocol import tokens
from andon.protocol.messages import (
    AveragedBlock,
    BlockGradient,
    OpenRound,
    Request,
    Response,
    RoundOpened,
)
from andon.protocol.records import Key
from andon.tcp.listening import TcpListener
from andon.wire.frames import frame_request, parse_response
from andon.wire.statuses import details_of
from andon_reducer.app import ReducerApp, build_reducer
from andon_reducer.config import ReducerConfig
from andon_server.admission import Admission
from andon_server.limits import Limits

__all__ = ["CHUNK", "RUN", "SECRET", "Reducer", "Stream", "chunks_of", "connect", "reason_of"]

SECRET = b"a secret for tests"
RUN = "7f3a"
CHUNK = 2**16
PATIENCE_S = 60


class Reducer:
    """A reducer in a thread with its own event loop."""

    def __init__(self, config: ReducerConfig | None = None, *, lanes: bool = False) -> None:
        """With `lanes` it offers TCP lanes."""
        self.listener = TcpListener("127.0.0.1") if lanes else None
        self.registry = CollectorRegistry()
        self.app: ReducerApp
        self.port = 0
        self._config = config or ReducerConfig()
        self._loop = asyncio.new_event_loop()
        self._server: grpc.aio.Server
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stop)
        if self.listener is not None:
            self.listener.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self.app = build_reducer(self._config, self.registry, SECRET, listener=self.listener)
        self._server = grpc.aio.server(interceptors=[Admission(Limits())])
        self.app.add_to(self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def _stop(self) -> None:
        await self.app.close()
        await self._server.stop(grace=5)
        # A call frees what it had after the core has forgotten its stream.
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=5)

    def call(self, make: Callable[[], Any]) -> Any:
        """Awaits what `make` returns on the reducer's loop."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(make(), self._loop)
        return future.result(PATIENCE_S)

    def metric(self, name: str, **labels: str) -> float:
        """A metric's current value."""
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, f"no metric {name} {labels}"
        return value


def connect(port: int) -> grpc.Channel:
    """A separate connection to a loopback port."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=options)


class Stream:
    """One stream of a worker, on its own connection. It reads only when the test asks."""

    def __init__(self, port: int, worker: int, *, opened: bool = True) -> None:
        self.worker = worker
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = connect(port)
        reduce: Any = self._channel.stream_stream("/andon.v1.Reducer/Reduce")
        self.call: Any = reduce(iter(self._queue.get, None), timeout=PATIENCE_S)
        if opened:
            self.send(OpenRound(RUN, worker, tokens.session_token(SECRET, RUN, worker)))
            assert isinstance(self.read(), RoundOpened)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self.call.cancel()
        self._channel.close()

    def send(self, *messages: Request) -> None:
        for message in messages:
            self.send_bytes(frame_request(message))

    def send_bytes(self, data: bytes) -> None:
        self._queue.put(data)

    def finish(self) -> None:
        """Half-closes the stream."""
        self._queue.put(None)

    def read(self) -> Response:
        return parse_response(next(self.call))

    def averages(self, count: int) -> dict[int, AveragedBlock]:
        """Reads `count` averages; returns them by offset."""
        answers: dict[int, AveragedBlock] = {}
        for _ in range(count):
            answer = self.read()
            assert isinstance(answer, AveragedBlock), answer
            answers[answer.offset] = answer
        return answers

    def error(self) -> grpc.RpcError:
        """Reads to the end of the stream; returns its error."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return error
        raise AssertionError("the stream ended without an error")


def chunks_of(
    rank: int,
    numbers: npt.NDArray[np.float32],
    *,
    key: Key,
    world_size: int = 2,
    weight: float = 1.0,
) -> list[BlockGradient]:
    """A vector as the contributions of one rank to one block."""
    return [
        BlockGradient(
            key=key,
            rank=rank,
            world_size=world_size,
            block=0,
            offset=start,
            count=numbers[start : start + CHUNK].size,
            weight=weight,
            payload=memoryview(numbers[start : start + CHUNK].tobytes()),
        )
        for start in range(0, numbers.size, CHUNK)
    ]


def reason_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """An error's code and the reason in its ErrorInfo, which must be of Andon's domain."""
    call: Any = error
    told = details_of(error)
    assert told.name, call.details()
    return call.code(), told.name
