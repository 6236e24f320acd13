"""Admitted workers, and reducers with the run's secret, lie to a line that trains with PyTorch.

Newcomers that the coordinator named lie about the state that they are to take; a donor that it
named lies about the one that it is to give; and reducers lie about themselves. All meet one line,
which must end with equal weights. `ANDON_ATTACK_SECONDS` says how long; `make soak` raises it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
import pytest

from andon.protocol import tokens
from andon.protocol.limits import MAX_TEXT_BYTES, PROTOCOL_VERSION
from andon.testing import ScriptedWorker
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2, reducer_pb2
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.v1.reducer_pb2_grpc import ReducerStub
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.schema import layout_of
from chaos.lane_relay import LaneRelay
from chaos.rig import free_port
from hostile.lying_donor import LIES
from hostile.rig import SECRET, secret_flags
from integration.harness import Service, Worker, on_line, start_worker
from integration.strangers import Refused, end_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SOAK = float(os.environ.get("ANDON_ATTACK_SECONDS", "2")) > 2
CHANCE = random.Random(int(os.environ.get("ANDON_SEED", "27")))
ENDLESS: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 10**6}
LIES_EACH = 4
"""How often a newcomer is lied to: the pause before the next try doubles each time."""
NEWCOMERS = -(-len(LIES) // LIES_EACH) if SOAK else 1
FIRST_LIAR = 2 + 4
"""Slots: two workers, newcomers, then those that lie about what they take."""


@dataclass
class Attacked:
    """The line, and what its attackers need."""

    folder: Path
    service: Service
    workers: list[Worker]
    relay: LaneRelay
    tcp_port: int
    stack: ExitStack
    """Kills the workers in the end."""

    @property
    def lies(self) -> Path:
        """The lies that donors still have to tell, one a line."""
        return self.folder / "lies"

    def start(self, slot: int, there: dict[str, str], *, lies: bool) -> None:
        """Starts a worker."""
        spec = {**ENDLESS, "lies": str(self.lies)}
        script = "../../hostile/lying_donor.py" if lies else "train.py"
        worker = start_worker(self.folder, spec, slot=slot, script=script, **there)
        self.workers.append(worker)
        self.stack.callback(worker.kill)

    def goes_on(self, steps: int = 2) -> None:
        """Waits for steps of all workers."""
        here = len(self.workers)
        now = self.service.await_status(lambda line: line.participating == here).step
        self.service.await_status(
            lambda line: line.participating == here and line.step >= now + steps
        )

    def scripted(self, slot: int) -> ScriptedWorker:
        """A worker of this run that trains nothing."""
        with JournalReader(self.service.journal) as journal:
            plan = journal.run().plan
        assert plan is not None
        with closing(sqlite3.connect(self.service.journal)) as database:
            (layout,) = database.execute("SELECT layout FROM run").fetchone()
        return ScriptedWorker(
            self.service.address,
            run_id=self.service.run_id,
            plan=plan,
            slot=slot,
            layout=layout_of(layout),
            asks=False,
        )


@contextmanager
def attacked(folder: Path) -> Iterator[Attacked]:
    """Two PyTorch workers that train, and lie to newcomers if told so."""
    tcp_port = free_port()
    flags = ("--max-workers", "20", *secret_flags(folder), "--tcp-port", str(tcp_port))
    with ExitStack() as stack:
        service = stack.enter_context(Service(folder / "run", 2, *flags))
        relay = stack.enter_context(LaneRelay(service.address, tcp_port))
        line = Attacked(folder, service, [], relay, tcp_port, stack)
        for slot, address in enumerate((service.address, relay.address)):
            there = {**on_line(service, slot, 2), "ANDON_SHARED_DIR": "off"}
            line.start(slot, {**there, "ANDON_ADDRESS": address}, lies=True)
        line.goes_on()
        yield line


# -------------------------------------------------------------------- newcomers that lie

Lie = Callable[[ScriptedWorker, pb.StateTransfer], Awaitable[None]]


def _wanted(worker: ScriptedWorker, to: pb.StateTransfer, **other: Any) -> Any:
    """A GetState call that is right except for some fields."""
    right = {
        "run_id": worker.run_id,
        "worker": worker.accepted.worker,
        "session_token": worker.accepted.session_token,
        "transfer_id": to.transfer_id,
        "head": to.head,
    }
    assert worker.data_channel is not None
    stub: Any = ReducerStub(worker.data_channel)
    return stub.GetState(reducer_pb2.GetStateRequest(**{**right, **other}))


async def _refused(call: Any, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert await call.code() is code


async def claims_it(worker: ScriptedWorker, to: pb.StateTransfer) -> None:
    await worker.report(to)


async def takes_another_head(worker: ScriptedWorker, to: pb.StateTransfer) -> None:
    head = record_pb2.Key(term=to.head.term, round=to.head.round + 1)
    await _refused(_wanted(worker, to, head=head), grpc.StatusCode.ABORTED)


async def takes_anothers(worker: ScriptedWorker, to: pb.StateTransfer) -> None:
    call = _wanted(worker, to, transfer_id=to.transfer_id + 1)
    await _refused(call, grpc.StatusCode.UNAUTHENTICATED)


async def takes_it_twice(worker: ScriptedWorker, to: pb.StateTransfer) -> None:
    both = [_wanted(worker, to) for _ in range(2)]
    # One of them gets it. The other is refused, or comes too late and waits for a sender.
    await asyncio.wait(
        [asyncio.ensure_future(each.read()) for each in both], return_when="FIRST_COMPLETED"
    )
    for each in both:
        each.cancel()


async def takes_a_part(worker: ScriptedWorker, to: pb.StateTransfer) -> None:
    call = _wanted(worker, to, offset=2**60, sha256=bytes(32), base_sha256=b"short")
    assert (await call.read()).offset == 0
    call.cancel()


async def takes_it_and_has_another(worker: ScriptedWorker, to: pb.StateTransfer) -> None:
    await worker.receive_state(to)
    head = record_pb2.Key(term=to.head.term, round=to.head.round + 7)
    await worker.send(state_report=pb.StateReport(transfer_id=to.transfer_id, head=head))


NEWCOMERS_LIES: tuple[Lie, ...] = (
    *(claims_it, takes_another_head, takes_anothers, takes_it_twice, takes_a_part),
    takes_it_and_has_another,
)


def newcomers_lie(line: Attacked) -> None:
    """Each from a slot of its own: a slot that failed is tried again only after a while."""

    async def lying(worker: ScriptedWorker, lie: Lie) -> None:
        await worker.join()
        to = (await worker.expect("state_transfer")).state_transfer
        assert to.role == pb.TRANSFER_ROLE_RECEIVE
        await worker.open_reducer()
        await lie(worker, to)
        await worker.reset()

    async def all_of_them() -> None:
        for slot, lie in enumerate(NEWCOMERS_LIES, start=FIRST_LIAR):
            await lying(line.scripted(slot), lie)
            line.goes_on(1)

    asyncio.run(all_of_them())


# ---------------------------------------------------------------------- reducers that lie


class Reducers:
    """Registrations with the run's secret, on one connection; they are over when it ends."""

    def __init__(self, service: Service) -> None:
        self._channel = grpc.insecure_channel(service.address)
        self._said: list[queue.SimpleQueue[pb.RegisterReducerRequest | None]] = []
        self._calls: list[Any] = []
        """Kept, because gRPC cancels a call that nobody holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._said:
            each.put(None)
        self._channel.close()

    def register(self, address: str, *, metrics: str = "", talks: bool = False) -> Any:
        """Proves itself as the reducer at an address; returns the call."""
        said: queue.SimpleQueue[pb.RegisterReducerRequest | None] = queue.SimpleQueue()
        self._said.append(said)
        call: Any = CoordinatorStub(self._channel).RegisterReducer(iter(said.get, None), timeout=60)
        self._calls.append(call)
        offer = pb.ReducerOffer(
            protocol_version=PROTOCOL_VERSION, address=address, metrics_address=metrics
        )
        said.put(pb.RegisterReducerRequest(offer=offer))
        mac = tokens.reducer_proof(SECRET, next(call).challenge.nonce, address)
        said.put(pb.RegisterReducerRequest(proof=pb.ReducerProof(mac=mac)))
        assert next(call).registered.announces
        if talks:
            said.put(pb.RegisterReducerRequest(offer=offer))
        return call


def _await_reducers(service: Service, addresses: set[str]) -> None:
    service.await_status(lambda line: {each.address for each in line.reducers} >= addresses)


def reducers_lie(line: Attacked) -> None:
    """Reducers at addresses of others, and several at one; each leaves, and some come back.

    Whoever has the secret may hold the line up as long as it is registered, and no longer, unless
    three attempts fail meanwhile: then it halts. So no part of this takes long.
    """
    service = line.service
    others = ("127.0.0.1:9", service.address, line.relay.address, f"127.0.0.1:{line.tcp_port}")
    for lied in (*([each] for each in others), [others[0]] * 3, [*others, others[0]]):
        with Reducers(service) as reducers:
            calls = [reducers.register(each, metrics="nonsense" * 10**4) for each in lied]
            _await_reducers(service, set(lied))
            time.sleep(0.2)  # The workers may go there. Nothing need happen.
            for older in calls[: len(lied) - len(set(lied))]:
                assert end_of(older).reason == "REJOIN_NEEDED"
        line.goes_on()
    with Reducers(service) as reducers:
        talks = end_of(reducers.register("127.0.0.1:10", talks=True))
        assert talks.reason == "INVALID_MESSAGE", talks
        with pytest.raises(grpc.RpcError) as refused:
            reducers.register("a" * MAX_TEXT_BYTES + ":1")
        assert Refused.of(refused.value).reason == "INVALID_MESSAGE"
    line.goes_on()


# ------------------------------------------------------------- a donor that lies, and replays


def donor_lies(line: Attacked) -> None:
    """Newcomers get the line's state in the end, though their donor lies a few times first."""
    lies = list(LIES) if SOAK else CHANCE.sample(list(LIES), LIES_EACH)
    for slot in range(2, 2 + NEWCOMERS):
        told = lies[(slot - 2) * LIES_EACH :][:LIES_EACH]
        line.lies.write_text("\n".join(told))
        line.start(slot, on_line(line.service, slot, 3), lies=False)
        line.goes_on()
        assert not line.lies.read_text(), f"not all of {told} were told"


def test_f_dp_001_a_line_of_pytorch_that_insiders_lie_to_ends_with_equal_weights(
    tmp_path: Path,
) -> None:
    with attacked(tmp_path) as line:
        newcomers_lie(line)
        reducers_lie(line)
        donor_lies(line)

        with grpc.insecure_channel(line.service.address) as channel:
            CoordinatorStub(channel).Drain(pb.DrainRequest(operator="test"), timeout=30)
        codes = [worker.wait() for worker in line.workers]
        assert set(codes) == {0}, "".join(each.output for each in line.workers)

    assert len({each.seen["digest"] for each in line.workers}) == 1
    with JournalReader(line.service.journal) as journal:
        assert journal.halts() == []
        assert journal.ledger_faults() == []
