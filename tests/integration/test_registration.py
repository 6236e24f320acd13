"""Reducers register at a real coordinator: which are accepted, and which map the workers get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from andon.protocol import tokens
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.reducers import MAX_REDUCERS
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_reducer.transport.admission import SessionTokens
from andon_reducer.transport.announced import Announced
from andon_reducer.transport.registration import ReducerOffer, RegistrationRefused, stay_registered
from integration.served import (
    RUN,
    SECRET,
    Served,
    config_in,
    end_of,
    first_round,
    refused,
    serving,
)

pytestmark = pytest.mark.integration

BETA = "beta.example:7071"


def offer_of(**fields: Any) -> pb.RegisterReducerRequest:
    given = {"address": BETA, "protocol_version": PROTOCOL_VERSION, **fields}
    return pb.RegisterReducerRequest(offer=pb.ReducerOffer(**given))


async def challenged(stub: Any, address: str = BETA) -> tuple[Any, bytes]:
    """Sends a reducer's offer. Returns the nonce for its proof that it has the secret."""
    call = stub.RegisterReducer()
    await call.write(offer_of(address=address))
    return call, (await call.read()).challenge.nonce


@asynccontextmanager
async def registered(served: Served, address: str = BETA) -> AsyncIterator[Any]:
    """A reducer on the map, on a connection of its own."""
    async with grpc.aio.insecure_channel(served.address) as channel:
        call, nonce = await challenged(CoordinatorStub(channel), address)
        await call.write(_proof(tokens.reducer_proof(SECRET, nonce, address)))
        assert (await call.read()).registered.run_id == RUN
        yield call
        call.cancel()


def reducers_of(served: Served) -> set[str]:
    return {address for address, _ in served.coordinator.status().reducers}


async def assert_kept_out(served: Served, call: Any) -> None:
    """Checks that the call ends because of its proof, and that no reducer came onto the map."""
    code, info = await refused(call.read())
    assert (code, info.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN")
    assert reducers_of(served) == {""}


async def await_reducers(served: Served, *addresses: str) -> None:
    async for update in served.stub.WatchStatus(pb.WatchStatusRequest()):
        if {each.address for each in update.status.reducers} == set(addresses):
            return


async def test_a_reducer_is_in_the_map_of_each_assignment_until_its_stream_ends(
    tmp_path: Path,
) -> None:
    config = config_in(tmp_path, registers=True, reducers=2, chunk_elements=2)
    async with serving(config) as served:
        async with registered(served):
            workers = await served.workers()
            assigned = await first_round(workers)
            told = [{share.address for share in each.reducers} for each in assigned]
        await await_reducers(served, "")
        again = await first_round(workers)

        assert told == [{"", BETA}] * 2
        assert [[share.address for share in each.reducers] for each in again] == [[""]] * 2
        assert all(each.attempt == 1 for each in again)


async def test_a_round_is_not_opened_before_the_expected_reducers_are_there(tmp_path: Path) -> None:
    config = config_in(tmp_path, registers=True, reducers=2)
    async with serving(config) as served:
        workers = await served.workers()

        assert served.coordinator.status().waiting_for == "2 reducers, 1 of them here"
        async with registered(served):
            assert all(each.step == 1 for each in await first_round(workers))


async def test_of_two_reducers_at_one_address_the_older_gives_up(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, registers=True)) as served:
        told: asyncio.Queue[str] = asyncio.Queue()
        offer = ReducerOffer(coordinator=served.address, address=BETA, secret=SECRET)
        staying = asyncio.create_task(
            stay_registered(offer, announced(), until_complete=True, tell=told.put_nowait)
        )
        await told.get()
        async with registered(served):
            with pytest.raises(RegistrationRefused, match="same address"):
                await staying


async def test_a_wrong_proof_is_refused(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, registers=True)) as served:
        call, nonce = await challenged(served.stub)
        # A valid proof for another address must not count for this one.
        await call.write(_proof(tokens.reducer_proof(SECRET, nonce, "gamma.example:7071")))

        await assert_kept_out(served, call)


async def test_a_proof_that_was_overheard_opens_nothing_a_second_time(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, registers=True)) as served:
        first, nonce = await challenged(served.stub)
        overheard = _proof(tokens.reducer_proof(SECRET, nonce, BETA))
        await first.write(overheard)
        assert (await first.read()).registered.run_id == RUN
        first.cancel()
        await await_reducers(served, "")

        again, _ = await challenged(served.stub)
        await again.write(overheard)

        await assert_kept_out(served, again)


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (offer_of(run_id="another"), grpc.StatusCode.NOT_FOUND),
        (offer_of(protocol_version=2), grpc.StatusCode.FAILED_PRECONDITION),
        (offer_of(address="beta"), grpc.StatusCode.INVALID_ARGUMENT),
        (offer_of(address=":7071"), grpc.StatusCode.INVALID_ARGUMENT),
        (offer_of(address=f"{'b' * 5000}:7071"), grpc.StatusCode.INVALID_ARGUMENT),
        (
            pb.RegisterReducerRequest(proof=pb.ReducerProof(mac=bytes(32))),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (pb.RegisterReducerRequest(), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_an_offer_that_can_not_be_is_refused_before_any_challenge(
    tmp_path: Path, first: pb.RegisterReducerRequest, code: grpc.StatusCode
) -> None:
    async with serving(config_in(tmp_path, registers=True)) as served:
        call = served.stub.RegisterReducer()
        await call.write(first)

        assert (await refused(call.read()))[0] == code


async def test_a_line_without_registration_says_how_to_enable_it(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path)) as served:
        offer = ReducerOffer(coordinator=served.address, address=BETA, secret=SECRET)

        with pytest.raises(RegistrationRefused, match="--secret-file"):
            await stay_registered(offer, announced(), until_complete=True, tell=lambda _: None)


async def test_a_run_that_is_over_dismisses_reducers(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path, registers=True)) as served:
        await served.stub.Drain(pb.DrainRequest())
        await served.coordinator.wait()

        call, nonce = await challenged(served.stub)
        await call.write(_proof(tokens.reducer_proof(SECRET, nonce, BETA)))
        answer = (await call.read()).WhichOneof("message")
        told = list[str]()
        offer = ReducerOffer(coordinator=served.address, address=BETA, secret=SECRET)
        await stay_registered(offer, announced(), until_complete=True, tell=told.append)

        assert (answer, told) == ("dismissed", [])
        assert reducers_of(served) == {""}


def announced() -> Announced:
    """What a reducer of these stories was told: nothing yet."""
    return Announced(SessionTokens(SECRET))


def _proof(mac: bytes) -> pb.RegisterReducerRequest:
    return pb.RegisterReducerRequest(proof=pb.ReducerProof(mac=mac))


async def test_more_reducers_than_the_limit_are_refused_though_each_has_the_secret(
    tmp_path: Path,
) -> None:
    async with serving(config_in(tmp_path, registers=True, reducers=2)) as served:
        places = [f"beta.example:{port}" for port in range(1, MAX_REDUCERS + 1)]
        async with AsyncExitStack() as stack:
            for place in places:
                await stack.enter_async_context(registered(served, place))
            code, info = await refused(challenged(served.stub))

    assert (code, info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")


async def test_offers_without_a_proof_keep_no_reducer_out(tmp_path: Path) -> None:
    config = config_in(tmp_path, registers=True, reducers=2)
    async with serving(config) as served:
        idle, nonces = [], []
        for _ in range(MAX_REDUCERS):
            idle.append(served.stub.RegisterReducer())
            await idle[-1].write(offer_of(address="idle.example:1"))
            nonces.append((await idle[-1].read()).challenge.nonce)

        async with registered(served):
            # A proof that comes after its call was ended does not count.
            await idle[0].write(_proof(tokens.reducer_proof(SECRET, nonces[0], "idle.example:1")))
            code, info = await refused(end_of(idle[0]))

        assert (code, info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
        for call in idle:
            call.cancel()
