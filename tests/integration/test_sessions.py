"""What the session token of an admitted worker opens at a reducer, and what it does not."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from andon.protocol.announcements import RoundOpening, Session, TransferOpening
from andon.protocol.records import Key
from andon.testing import ScriptedWorker
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2, reducer_pb2
from andon_reducer.transport.admission import CallRefused, SessionTokens
from andon_reducer.transport.announced import Announced
from integration.served import RUN, Served, first_round, refused, with_reducer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

PAYLOAD = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)
separate = pytest.mark.parametrize("separate", [False, True], ids=["own", "registered"])


async def take(worker: ScriptedWorker, case: str) -> Any:
    """Obeys a worker's messages up to the first one of this case, and returns that."""
    while (message := await worker.receive()).WhichOneof("message") != case:
        await worker.obey(message)
    return getattr(message, case)


def first_piece(worker: ScriptedWorker, transfer: pb.StateTransfer, state: bytes) -> Any:
    return reducer_pb2.PutStateRequest(
        run_id=worker.run_id,
        worker=worker.accepted.worker,
        session_token=worker.accepted.session_token,
        transfer_id=transfer.transfer_id,
        head=transfer.head,
        size_bytes=len(state),
        sha256=hashlib.sha256(state).digest(),
    )


@separate
async def test_a_third_worker_that_is_first_takes_neither_end_of_a_transfer(
    tmp_path: Path, *, separate: bool
) -> None:
    async with with_reducer(tmp_path, separate=separate, expect_workers=3) as served:
        donor, joiner, third = workers = await served.workers(3)
        for worker in workers:
            await worker.open_reducer()
        send, receive = (
            await take(donor, "state_transfer"),
            await take(joiner, "state_transfer"),
        )

        put = third._reducer().PutState()
        await put.write(first_piece(third, receive, b"a state of its choice"))
        put_end = await refused(put.read())
        get_end = await refused(third.receive_state(send))
        sending = asyncio.create_task(donor.send_state(send, b"the line's state"))

        assert await joiner.receive_state(receive) == b"the line's state"
        await sending
        for code, info in (put_end, get_end):
            assert (code, info.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN")


@separate
async def test_a_key_of_the_future_voids_no_round(tmp_path: Path, *, separate: bool) -> None:
    async with with_reducer(tmp_path, separate=separate, max_workers=3) as served:
        workers = await served.workers(2)
        for worker in workers:
            await worker.open_reducer()
        assigned = await first_round(workers)
        third = served.worker(2)
        await third.join()
        await third.open_reducer()

        begun = asyncio.create_task(workers[0].average(assigned[0], PAYLOAD))
        key = record_pb2.Key(term=assigned[0].key.term, round=assigned[0].key.round + 1)
        future = pb.ShardAssignment(
            key=key, world_size=1, positions=[record_pb2.PositionRange(start=0, stop=1)]
        )
        ahead = asyncio.create_task(third.average(future, PAYLOAD))
        if separate:
            # It waits for an announcement. A round of one would be answered at once.
            assert await asyncio.wait({ahead}, timeout=0.3) == (set(), {ahead})
        else:
            code, info = await refused(ahead)
            assert (code, info.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_MESSAGE",
            )

        for answer in (await workers[1].average(assigned[1], PAYLOAD), await begun):
            assert answer.averaged_block.payload == PAYLOAD
        ahead.cancel()


async def test_what_overtakes_its_announcement_waits_for_it_and_not_for_ever() -> None:
    announced, session = Announced(SessionTokens(b"a secret")), Session(3, (7, 1))
    announced.follow(RUN, patience_s=30.0)
    early = (
        asyncio.create_task(announced.round_of(RUN, Key(7, 2))),
        asyncio.create_task(announced.end_of(RUN, 5, session, lambda each: each.joiner)),
    )
    await asyncio.sleep(0)
    assert not any(each.done() for each in early)

    announced.take(RUN, RoundOpening(Key(7, 2)))
    announced.take(RUN, TransferOpening(5, Session(0, (7, 2)), session))

    await asyncio.gather(*early)
    announced.follow(RUN, patience_s=0.01)
    with pytest.raises(CallRefused, match="opened no round"):
        await announced.round_of(RUN, Key(7, 3))
    with pytest.raises(CallRefused, match="begun no transfer"):
        await announced.end_of(RUN, 6, session, lambda each: each.joiner)
    # The same worker, but not the session that was named: it joined again since.
    with pytest.raises(CallRefused, match="not for worker 3 in this session"):
        await announced.end_of(RUN, 5, Session(3, (7, 4)), lambda each: each.joiner)


async def drop(served: Served, worker: int) -> None:
    halt = (await served.stub.PullCord(pb.PullCordRequest(reason="a test"))).halt
    await served.stub.ClearHalt(
        pb.ClearHaltRequest(halt_id=halt.id, answer=pb.HALT_ANSWER_DROP, worker=worker)
    )


@separate
async def test_a_dropped_workers_session_is_over_at_every_reducer(
    tmp_path: Path, *, separate: bool
) -> None:
    async with with_reducer(tmp_path, separate=separate) as served:
        workers = await served.workers(2)
        for worker in workers:
            await worker.open_reducer()
        await first_round(workers)

        await drop(served, 1)

        code, info = await refused(workers[1].reduce.read())
        assert (code, info.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN")
        code, info = await refused(workers[1].open_reducer())
        assert (code, info.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN")
        # The other one's stream is as it was, and its next round is of it alone.
        await take(workers[0], "resume")
        await workers[0].ask()
        assigned = await take(workers[0], "shard_assignment")
        answer = await workers[0].average(assigned, PAYLOAD)
        assert answer.averaged_block.payload == PAYLOAD
        again = served.worker(1)
        await again.join()
        await again.open_reducer()  # Another process in the slot, with a session of its own.


@separate
async def test_a_dropped_workers_session_stays_over_though_another_had_its_slot_and_all_restarts(
    tmp_path: Path, *, separate: bool
) -> None:
    async with with_reducer(tmp_path, separate=separate) as served:
        workers = await served.workers(2)
        await first_round(workers)
        stale = workers[1].accepted.session_token
        await drop(served, 1)
        another = served.worker(1)
        await another.join()
        await another.leave()

    async with with_reducer(tmp_path, separate=separate) as served:
        thief = served.worker(0)
        await thief.join()
        thief.accepted.worker, thief.accepted.session_token = 1, stale
        code, info = await refused(thief.open_reducer())

    assert (code, info.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN")
