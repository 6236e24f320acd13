"""Registration: keeps a reducer that is a process of its own on the coordinator's map.

The reducer is on the map for as long as its RegisterReducer stream lives. When the stream ends, it
registers again on a new one, until its process ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from andon.host.jitter import jittered
from andon.host.keepalive import MIN_PING_S, Keepalive
from andon.host.logs import LogEvent
from andon.host.tls import TlsError, open_aio_channel
from andon.host.tls_diagnosis import diagnose_tls
from andon.protocol import tokens
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.reasons import Reason
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire.announcements import announcement_from
from andon.wire.statuses import details_of, is_final
from andon_reducer.transport.announced import Announced

__all__ = ["CLIENT", "ReducerOffer", "RegistrationRefused", "stay_registered"]

_FIRST_WAIT_S = 0.1
_GROWTH = 1.5
_LONGEST_WAIT_S = 2.0
_ANSWER_S = 10.0
"""How long the coordinator has to answer an offer."""
_ANNOUNCED_S = 30.0
"""How long a worker's message may be ahead of the coordinator's announcement."""

CLIENT = Keepalive(client_ping_s=MIN_PING_S, client_answer_s=5.0)
"""Pings, so that a reducer notices when its coordinator's host is gone without closing anything."""

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    *CLIENT.client_options(),
)

_log = logging.getLogger(__name__)


class RegistrationRefused(Exception):
    """The coordinator refuses this reducer, and trying again would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOffer:
    """What a reducer offers, and to which coordinator."""

    coordinator: str
    """As host:port."""
    address: str
    """Where workers reach the reducer, as host:port."""
    secret: bytes = field(repr=False)
    """The run's secret; it is never sent."""
    run_id: str = ""
    """The run to register with; empty: whichever the coordinator serves."""
    metrics_address: str = ""
    """Where this reducer serves its metrics, as host:port; empty: nowhere."""
    tls: Path | None = None
    """The folder of this reducer's certificates; None: no TLS."""


async def stay_registered(
    offer: ReducerOffer, announced: Announced, *, until_complete: bool, tell: Callable[[str], None]
) -> None:
    """Registers, and registers again whenever the stream ends.

    Args:
        offer: what the reducer offers.
        announced: gets what the coordinator announces.
        until_complete: whether to return once the run is over; else this waits for the next run.
        tell: called with the run's id each time that the reducer was put on the map.

    Raises:
        RegistrationRefused: the coordinator refuses this reducer; trying again would not help.
    """
    wait_s = _FIRST_WAIT_S
    logged = ever = False
    while True:
        registered, min_wait_s = False, 0.0

        def accepted(run_id: str) -> None:
            nonlocal registered, ever
            registered = ever = True
            tell(run_id)

        try:
            await _register(offer, announced, accepted)
            if until_complete:
                return
            # The coordinator dismisses every registration until its next run, so there is no hurry.
            why, registered, wait_s = "the run is over", False, _LONGEST_WAIT_S
        except (grpc.aio.AioRpcError, TlsError) as error:
            why = await _why(offer, error, final=not ever)
            # The coordinator may ask for a longer wait.
            min_wait_s = details_of(error).wait_s if isinstance(error, grpc.RpcError) else 0.0
        except TimeoutError:
            why = f"no answer within {_ANSWER_S:g} s"
        if registered:
            wait_s, logged = _FIRST_WAIT_S, False
        # One warning each time that the reducer is off the map, not one for each try.
        if not logged:
            text = f"not on the map of {offer.coordinator} ({why}): registering again"
            _log.warning(LogEvent("registration_lost", text, coordinator=offer.coordinator))
            logged = True
        await asyncio.sleep(max(min_wait_s, jittered(wait_s)))
        wait_s = min(_GROWTH * wait_s, _LONGEST_WAIT_S)


def _is_hopeless(error: grpc.aio.AioRpcError) -> bool:
    # REJOIN_NEEDED: another process offers the same address. If both tried again, they would
    # replace each other in turn.
    return is_final(error) or details_of(error).reason is Reason.REJOIN_NEEDED


async def _why(offer: ReducerOffer, error: grpc.aio.AioRpcError | TlsError, *, final: bool) -> str:
    """Why a stream ended, if trying again may help.

    A problem with certificates is `final` for a reducer that was never on the map. One that was
    there goes on trying, so that people have time to fix it.

    Raises:
        RegistrationRefused: trying again would not help.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        why = error.details() or error.code().name.lower()
        if _is_hopeless(error):
            raise RegistrationRefused(f"the line at {offer.coordinator} refuses: {why}") from None
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return why
        # In a thread: it opens connections of its own, and waits for them.
        trouble = await asyncio.to_thread(diagnose_tls, offer.coordinator, offer.tls)
    else:
        why = trouble = str(error)
    if trouble and final:
        raise RegistrationRefused(trouble) from None
    return trouble or why


async def _register(
    offer: ReducerOffer, announced: Announced, accepted: Callable[[str], None]
) -> None:
    """One stream, to its end. Returns normally only if the run is over.

    What the coordinator announces on it goes to `announced`.

    Raises:
        grpc.aio.AioRpcError: the stream ended.
        TimeoutError: the coordinator did not answer.
    """
    async with open_aio_channel(offer.coordinator, _OPTIONS, offer.tls) as channel:
        call: Any = CoordinatorStub(channel).RegisterReducer()  # type: ignore[call-arg]  # aio calls need no iterator
        try:
            async with asyncio.timeout(_ANSWER_S):
                await call.write(
                    pb.RegisterReducerRequest(
                        offer=pb.ReducerOffer(
                            run_id=offer.run_id,
                            address=offer.address,
                            protocol_version=PROTOCOL_VERSION,
                            metrics_address=offer.metrics_address,
                        )
                    )
                )
                nonce = (await _read(call)).challenge.nonce
                mac = tokens.reducer_proof(offer.secret, nonce, offer.address)
                await call.write(pb.RegisterReducerRequest(proof=pb.ReducerProof(mac=mac)))
                answer = await _read(call)
            if answer.WhichOneof("message") == "dismissed":
                return  # the run was over before
            run_id = answer.registered.run_id
            if answer.registered.announces:
                announced.follow(run_id, patience_s=_ANNOUNCED_S)
            else:
                announced.unfollow(run_id)
            # After the announcer is followed: as soon as the reducer is known to be on the map,
            # messages of workers may come.
            accepted(run_id)
            while (message := await _read(call)).WhichOneof("message") != "dismissed":
                announcement = announcement_from(message)
                if announcement is not None and answer.registered.announces:
                    announced.take(run_id, announcement)
        finally:
            call.cancel()


async def _read(call: Any) -> pb.RegisterReducerResponse:
    """The next message.

    Raises:
        grpc.aio.AioRpcError: the stream ended. With status OK too: it did not dismiss this reducer.
    """
    message = await call.read()
    if message is not grpc.aio.EOF:
        assert isinstance(message, pb.RegisterReducerResponse)
        return message
    raise grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        details=await call.details() or "the coordinator ended the stream",
    )
