"""A coordinator behind a real gRPC server on a free port, for tests; with scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from andon.protocol.run_settings import RunPlan
from andon.testing import ScriptedWorker
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_coordinator.app import (
    Coordinator,
    build_coordinator,
    server_options,
)
from andon_coordinator.config import CoordinatorConfig, LineOptions
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.sessions import SessionsCore
from andon_coordinator.transport.journal import Journal
from andon_coordinator.transport.outgoing import JoinAnswers
from andon_coordinator.transport.task import LineClock, LineObserver, LineTask, TaskSettings
from andon_reducer.app import ReducerApp, build_reducer
from andon_reducer.config import ReducerConfig
from andon_reducer.transport.registration import ReducerOffer, stay_registered
from andon_server.admission import Admission
from andon_server.limits import Limits
from integration.strangers import Refused

Task = TypeVar("Task", bound=LineTask)

RUN = "7f3a"


SECRET = b"secret of the tests"


PLAN = RunPlan(global_batch=5, dataset_size=12, seed=3)


@dataclass
class Served:
    """A running coordinator, and its address."""

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
    chosen = {"max_steps": 3, "liveness_s": 30.0, **fields}
    line = {
        each.name: chosen.pop(each.name)
        for each in dataclasses.fields(LineOptions)
        if each.name in chosen
    }
    return CoordinatorConfig(
        **{
            "run_id": RUN,
            "journal": folder / "journal.sqlite",
            "expect_workers": 2,
            "line": LineOptions(**line),
            **chosen,
        }
    )


def task_of(
    kind: type[Task], config: CoordinatorConfig, observers: Sequence[LineObserver] = ()
) -> Task:
    """The task of a line that nobody serves: it takes one stream of a worker."""
    line = config.line_settings()
    journal = Journal.open(config.journal, RUN)
    journal.begin_term(1)
    return kind(
        (
            LineCore(line, term=1, history=journal.history, random_bits=lambda: 0),
            SessionsCore(keys=Keys(1, lambda: 0)),
        ),
        journal,
        JoinAnswers(run_id=RUN, secret=SECRET, policy=line.policy, liveness=line.liveness),
        settings=TaskSettings(max_streams=1),
        clocks=(LineClock(time.monotonic, 1.0), time.time),
        observers=observers,
    )


def serving(config: CoordinatorConfig) -> contextlib.AbstractAsyncContextManager[Served]:
    registry = CollectorRegistry()
    return served_by(build_coordinator(config, registry, SECRET), config, registry)


@contextlib.asynccontextmanager
async def with_reducer(folder: Path, *, separate: bool, **fields: Any) -> AsyncIterator[Served]:
    """A coordinator with a reducer on the same port, or with one that registers."""
    registry = CollectorRegistry()
    reducer = build_reducer(ReducerConfig(), registry, SECRET)
    if not separate:
        reducer.announced.follow(RUN, patience_s=0.0)
        announce = partial(reducer.announced.take, RUN)
        config = config_in(folder, announce=announce, **fields)
        coordinator = build_coordinator(config, CollectorRegistry(), SECRET)
        async with served_by(coordinator, config, registry, reducer) as served:
            yield served
        return
    server, told = grpc.aio.server(interceptors=[Admission(Limits())]), asyncio.Event()
    reducer.add_to(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with serving(config_in(folder, own_reducer=False, registers=True, **fields)) as served:
        offer = ReducerOffer(coordinator=served.address, address=address, secret=SECRET)
        staying = asyncio.create_task(
            stay_registered(
                offer, reducer.announced, until_complete=False, tell=lambda _: told.set()
            )
        )
        await told.wait()
        try:
            yield served
        finally:
            staying.cancel()
            await asyncio.gather(staying, return_exceptions=True)
            await reducer.close()
            await server.stop(1.0)


@contextlib.asynccontextmanager
async def served_by(
    coordinator: Coordinator,
    config: CoordinatorConfig,
    registry: CollectorRegistry,
    reducer: ReducerApp | None = None,
) -> AsyncIterator[Served]:
    """Serves a coordinator, and on the same port a reducer, if there is one."""
    server = grpc.aio.server(
        interceptors=[Admission(Limits())], options=server_options(config.liveness)
    )
    coordinator.add_to(server)
    if reducer is not None:
        reducer.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await coordinator.start()
    await server.start()
    address = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Served(coordinator, address, CoordinatorStub(channel), registry)
    finally:
        await coordinator.close()
        if reducer is not None:
            await reducer.close()
        await server.stop(1.0)


def run(story: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(story, 40)

    asyncio.run(limited())


async def first_round(workers: list[ScriptedWorker]) -> list[pb.ShardAssignment]:
    """Runs workers from their joins to the assignments of the first round."""

    async def to_assignment(worker: ScriptedWorker) -> pb.ShardAssignment:
        while True:
            message = await worker.receive()
            if message.WhichOneof("message") == "shard_assignment":
                return message.shard_assignment
            await worker.obey(message)

    return await asyncio.gather(*(to_assignment(worker) for worker in workers))


async def all_ready(workers: list[ScriptedWorker], assignments: list[pb.ShardAssignment]) -> None:
    """Each worker reports that it holds the averages of its round."""
    for worker, assignment in zip(workers, assignments, strict=True):
        await worker.ready(assignment)


async def code_of(call: Awaitable[Any]) -> grpc.StatusCode:
    """The code that a call ends with; the connection may close before the details arrive."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, Refused]:
    """The status that a call ends with, and the reason and metadata of its ErrorInfo."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    refusal = Refused.of(caught.value)
    assert refusal.reason, refusal
    return refusal.code, refusal


async def until(reached: Callable[[], bool]) -> None:
    """Waits until a condition of the server holds; it runs on this same event loop."""
    for _ in range(4000):
        if reached():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not hold within 20 s")


async def end_of(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
