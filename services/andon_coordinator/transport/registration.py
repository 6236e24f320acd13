"""Registration: a reducer's stream, from its offer over its proof to its end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from andon.protocol import tokens
from andon.protocol.limits import MAX_TEXT_BYTES, PROTOCOL_VERSION, clipped
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.errors import (
    InvalidMessage,
    LineError,
    ProofWrong,
    RegistrationOff,
    VersionDiffers,
    WrongRun,
)

__all__ = ["Desk", "Registration", "Registry"]

Context = Any  # grpc.aio's context; the stubs of the generated servicer know the sync one, too.


class Registration:
    """One reducer's stream, as the owner of the core knows it."""

    def __init__(self, number: int) -> None:
        """Opens stream `number`, which no other reducer's stream ever was."""
        self.number = number
        self.error: LineError | None = None
        """What the call ends with; None: the run is over."""
        self.told = False
        """Whether the core was told of it."""
        self.address = ""
        """Where workers reach it; empty until it proved itself."""
        self.metrics_address = ""
        """Where its metrics are; empty: nowhere."""
        self.ended = asyncio.Event()

    def end(self, error: LineError | None = None) -> None:
        """RunEnd the call; the first word counts."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


class Registry(Protocol):
    """Whoever tells the core of reducers."""

    def open_registration(self) -> Registration:
        """A new stream, or a LineError if there is no room."""

    async def register(self, registration: Registration, address: str) -> None:
        """A reducer proved itself."""

    def registration_ended(self, registration: Registration) -> None:
        """A call is over."""


class Desk:
    """Serves RegisterReducer: who proves that it has the run's secret is put on the map."""

    def __init__(self, registry: Registry, *, run_id: str, secret: bytes, join_s: float) -> None:
        """Registers reducers of run `run_id`; `secret` empty: none. A message may take `join_s`."""
        self._registry = registry
        self._run_id = run_id
        self._secret = secret
        self._join_s = join_s

    async def serve(
        self, requests: AsyncIterator[pb.RegisterReducerRequest], context: Context
    ) -> None:
        """One call of RegisterReducer, to its end.

        Raises:
            LineError: it ends with an error.
        """
        registration = self._registry.open_registration()
        try:
            messages = aiter(requests)
            offer = await self._admit(messages, context)
            registration.metrics_address = clipped(offer.metrics_address)
            if not registration.ended.is_set():  # A run that is over has no use for it.
                await self._registry.register(registration, offer.address)
                registered = pb.ReducerRegistered(run_id=self._run_id)
                await self._write(context, pb.RegisterReducerResponse(registered=registered))
                await _until_over(messages, registration)
        except DecodeError:
            raise InvalidMessage("the bytes are no RegisterReducerRequest") from None
        finally:
            self._registry.registration_ended(registration)
        if registration.error is not None:
            raise registration.error
        if registration.ended.is_set():
            dismissed = pb.ReducerDismissed(message="the run is over")
            await self._write(context, pb.RegisterReducerResponse(dismissed=dismissed))

    async def _admit(
        self, messages: AsyncIterator[pb.RegisterReducerRequest], context: Context
    ) -> pb.ReducerOffer:
        """Takes the offer and its proof; the offer."""
        offer = (await self._next(messages, "offer")).offer
        if offer.run_id not in ("", self._run_id):
            raise WrongRun(f"run {self._run_id} is served here, not {offer.run_id}")
        if offer.protocol_version != PROTOCOL_VERSION:
            raise VersionDiffers(
                f"the line speaks protocol version {PROTOCOL_VERSION}, the reducer "
                f"{offer.protocol_version}: install the same Andon on both"
            )
        if not self._secret:
            raise RegistrationOff(
                "this line takes no reducers: start it with --secret-file, and the reducer with "
                "the same file"
            )
        host, _, port = offer.address.rpartition(":")
        if not host or not port.isdecimal() or len(offer.address.encode()) > MAX_TEXT_BYTES:
            raise InvalidMessage("a reducer's address is host:port")
        nonce = secrets.token_bytes(tokens.CHALLENGE_BYTES)
        challenge = pb.ReducerChallenge(nonce=nonce)
        await self._write(context, pb.RegisterReducerResponse(challenge=challenge))
        proof = (await self._next(messages, "proof")).proof
        if not tokens.is_reducer_proof(self._secret, nonce, offer.address, proof.mac):
            raise ProofWrong(
                "the reducer has another secret than the line: give both the same --secret-file"
            )
        return offer

    async def _write(self, context: Context, message: pb.RegisterReducerResponse) -> None:
        try:
            await asyncio.wait_for(context.write(message), self._join_s)
        except TimeoutError:
            raise InvalidMessage(f"nothing was read for {self._join_s:g} s") from None

    async def _next(
        self, messages: AsyncIterator[pb.RegisterReducerRequest], case: str
    ) -> pb.RegisterReducerRequest:
        try:
            message = await asyncio.wait_for(anext(messages), self._join_s)
        except StopAsyncIteration:
            raise InvalidMessage(f"the stream ended before {case}") from None
        except TimeoutError:
            raise InvalidMessage(f"no {case} came within {self._join_s:g} s") from None
        if message.WhichOneof("message") != case:
            raise InvalidMessage(f"{case} is what comes now, and nothing else")
        return message


async def _until_over(
    messages: AsyncIterator[pb.RegisterReducerRequest], registration: Registration
) -> None:
    """Waits until the reducer ends the stream, or the line does."""
    reading = asyncio.create_task(_refuse_more(messages))
    ending = asyncio.create_task(registration.ended.wait())
    try:
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            reading.result()
    finally:
        reading.cancel()
        ending.cancel()
        await asyncio.gather(reading, ending, return_exceptions=True)


async def _refuse_more(messages: AsyncIterator[pb.RegisterReducerRequest]) -> None:
    async for _ in messages:
        raise InvalidMessage("after proof a reducer has nothing more to say")
