"""Registration: a reducer's call, from its offer to its end.

A reducer that is a process of its own offers its address, and proves with a MAC over our nonce that
it has the run's secret. From then on workers are sent to it, until its call ends.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from google.protobuf.message import DecodeError

from andon.protocol import tokens
from andon.protocol.limits import MAX_TEXT_BYTES, PROTOCOL_VERSION, clipped
from andon.protocol.reasons import Reason
from andon.v1 import coordinator_pb2 as pb
from andon.wire.announcements import announcement_to
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.streams import ReducerStream, next_of
from andon_coordinator.transport.task import LineTask

__all__ = ["ReducerRegistration"]

Context = Any  # grpc.aio's context; the stubs of the generated servicer know the sync one, too.


class ReducerRegistration:
    """Serves RegisterReducer: admits reducers that have the run's secret to the line."""

    def __init__(self, task: LineTask, *, run_id: str, secret: bytes, join_s: float) -> None:
        """Registers reducers of run `run_id`; none if `secret` is empty.

        A reducer has `join_s` for each message that it is to send or to read.
        """
        self._task = task
        self._run_id = run_id
        self._secret = secret
        self._join_s = join_s

    async def serve(
        self, requests: AsyncIterator[pb.RegisterReducerRequest], context: Context
    ) -> None:
        """Serves one call of RegisterReducer to its end.

        Raises:
            LineError: it ends with an error.
        """
        registration = self._task.open_registration()
        try:
            messages = aiter(requests)
            offer = await self._admit(messages, context)
            registration.metrics_address = clipped(offer.metrics_address)
            if not registration.ended.is_set():  # A run that is over needs no reducer.
                # The core first. A reducer that knows that it is registered counts on being on the
                # map.
                self._task.register(registration, offer.address)
                registered = pb.ReducerRegistered(run_id=self._run_id, announces=True)
                await self._write(context, pb.RegisterReducerResponse(registered=registered))
                await _until_over(messages, registration, self._announce(context, registration))
        except DecodeError:
            raise _invalid("the bytes can't be decoded as a RegisterReducerRequest") from None
        finally:
            # On every way out, or the line would keep sending workers to a reducer that is gone.
            self._task.registration_ended(registration)
        if registration.error is not None:
            raise registration.error
        if registration.ended.is_set():
            dismissed = pb.ReducerDismissed(message="the run is over")
            await self._write(context, pb.RegisterReducerResponse(dismissed=dismissed))

    async def _admit(
        self, messages: AsyncIterator[pb.RegisterReducerRequest], context: Context
    ) -> pb.ReducerOffer:
        """Checks the offer and the proof; returns the offer."""
        offer = (await self._next(messages, "offer")).offer
        if offer.run_id not in ("", self._run_id):
            text = f"run {self._run_id} is served here, not {offer.run_id}"
            raise LineError(Reason.WRONG_RUN, text)
        if offer.protocol_version != PROTOCOL_VERSION:
            raise LineError(
                Reason.VERSION,
                f"the line speaks protocol version {PROTOCOL_VERSION}, the reducer "
                f"{offer.protocol_version}: install the same Andon on both",
            )
        if not self._secret:
            raise LineError(
                Reason.REGISTRATION_OFF,
                "this line takes no reducers: start it with --secret-file, and the reducer with "
                "the same file",
            )
        host, _, port = offer.address.rpartition(":")
        if not host or not port.isdecimal() or len(offer.address.encode()) > MAX_TEXT_BYTES:
            shown = clipped(offer.address)
            raise _invalid(f"a reducer's address must be host:port, not {shown!r}")
        # A fresh nonce for each call, so that a recorded proof can't be replayed. The MAC covers
        # the address too, so that a proof can't register another address.
        nonce = secrets.token_bytes(tokens.CHALLENGE_BYTES)
        challenge = pb.ReducerChallenge(nonce=nonce)
        await self._write(context, pb.RegisterReducerResponse(challenge=challenge))
        # The core knows nothing of it yet: a reducer that never proves itself holds nobody up.
        proof = (await self._next(messages, "proof")).proof
        if not tokens.is_reducer_proof(self._secret, nonce, offer.address, proof.mac):
            raise LineError(
                Reason.TOKEN,
                "the reducer has another secret than the line: give both the same --secret-file",
            )
        return offer

    async def _announce(self, context: Context, registration: ReducerStream) -> None:
        """Writes announcements until the stream is over."""
        async for announcement in registration.announcements():
            await self._write(context, announcement_to(announcement))

    async def _write(self, context: Context, message: pb.RegisterReducerResponse) -> None:
        try:
            async with asyncio.timeout(self._join_s):
                await context.write(message)
        except TimeoutError:
            raise _invalid(f"nothing was read for {self._join_s:g} s") from None

    async def _next(
        self, messages: AsyncIterator[pb.RegisterReducerRequest], case: str
    ) -> pb.RegisterReducerRequest:
        message = await next_of(messages, case, self._join_s)
        if message.WhichOneof("message") != case:
            raise _invalid(f"the next message must be {case}")
        return message


async def _until_over(
    messages: AsyncIterator[pb.RegisterReducerRequest],
    registration: ReducerStream,
    announcing: Coroutine[Any, Any, None],
) -> None:
    """Announces until the reducer ends the stream, or the line does."""
    reading = asyncio.create_task(_refuse_more(messages))
    # It returns once the line ends the stream. Then no write is under way, and another may follow.
    writing = asyncio.create_task(announcing)
    try:
        await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        # Not cancelled in a write: gRPC would then never send the call's end.
        registration.hush()
        await writing
        if not registration.ended.is_set():
            reading.result()
    finally:
        reading.cancel()
        writing.cancel()
        await asyncio.gather(reading, writing, return_exceptions=True)


def _invalid(message: str) -> LineError:
    return LineError(Reason.INVALID_MESSAGE, message)


async def _refuse_more(messages: AsyncIterator[pb.RegisterReducerRequest]) -> None:
    async for _ in messages:
        raise _invalid("a reducer sends no message after its proof")
