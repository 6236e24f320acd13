"""RegisterReducer: however a call ends, its reducer leaves the map."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from andon.protocol import tokens
from andon.protocol.announcements import Session, SessionsRevoked
from andon.protocol.limits import PROTOCOL_VERSION
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.registration import ReducerRegistration
from andon_coordinator.transport.streams import ReducerStream
from andon_coordinator.transport.task import LineTask
from integration.served import RUN, SECRET, config_in, task_of

BETA = "beta.example:7071"


class Line(LineTask):
    """A line whose newest reducer's stream is at hand."""

    def open_registration(self) -> ReducerStream:
        self.newest = super().open_registration()
        return self.newest


class Call:
    """A reducer's call, which breaks in the very moment in which an announcement was written."""

    def __init__(self, registration: ReducerRegistration) -> None:
        self._nonce: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.registered = asyncio.Event()
        self.serving = asyncio.create_task(registration.serve(self._messages(), self))

    async def _messages(self) -> AsyncIterator[pb.RegisterReducerRequest]:
        offer = pb.ReducerOffer(address=BETA, protocol_version=PROTOCOL_VERSION)
        yield pb.RegisterReducerRequest(offer=offer)
        mac = tokens.reducer_proof(SECRET, await self._nonce, BETA)
        yield pb.RegisterReducerRequest(proof=pb.ReducerProof(mac=mac))
        await asyncio.Event().wait()

    async def write(self, message: pb.RegisterReducerResponse) -> None:
        """As a context of gRPC; that cancels what serves a call whose connection broke."""
        match message.WhichOneof("message"):
            case "challenge":
                self._nonce.set_result(message.challenge.nonce)
            case "registered":
                self.registered.set()
            case _:
                self.serving.cancel()


def test_a_reducer_whose_call_breaks_as_it_is_announced_to_leaves_the_map(tmp_path: Path) -> None:
    async def story() -> None:
        line = task_of(Line, config_in(tmp_path, registers=True))
        line.start()
        call = Call(ReducerRegistration(line, run_id=RUN, secret=SECRET, join_s=30.0))
        await call.registered.wait()
        here = [address for address, _ in line.status().reducers]

        line.newest.announce(SessionsRevoked(Session(worker=1, serial=(1, 1))))
        ended, _ = await asyncio.wait({call.serving}, timeout=10)

        left = [address for address, _ in line.status().reducers]
        await line.close()
        assert (here, left) == (["", BETA], [""])
        assert ended == {call.serving}

    asyncio.run(story())
