"""The client's end of a TCP lane: opens connections of an offer, and proves whose they are."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path

from andon.host.tls import TlsError, client_context
from andon.protocol.messages import TcpOffer
from andon.tcp.connection import TcpConnection, prepare
from andon.tcp.proof import (
    ANSWER_BYTES,
    NONCE_BYTES,
    LaneDirection,
    LaneSession,
    is_answer,
    preamble,
)

__all__ = ["WITHIN_S", "TcpUnavailable", "connect", "connect_further"]

WITHIN_S = 2.0
"""How long opening a lane may take before gRPC carries everything."""


class TcpUnavailable(Exception):
    """A lane can't be opened: why, for people. gRPC can carry the same."""


def connect(
    host: str,
    offer: TcpOffer,
    session: LaneSession,
    directions: tuple[LaneDirection, ...],
    *,
    tls: Path | None = None,
    within_s: float = WITHIN_S,
) -> list[TcpConnection]:
    """Opens the first connection of each direction, in this order; all or none.

    Args:
        host: where the call of gRPC was reached.
        offer: what its server offered there.
        session: what both ends of the call know.
        directions: which ways.
        tls: the folder of certificates; None: nothing is encrypted, the call neither.
        within_s: how long all of it may take.

    Raises:
        TcpUnavailable: one of them can't be opened, or leads to somebody else.
    """
    places = [(direction, 0) for direction in directions]
    return _connected(host, offer, session, places, tls, within_s)


def connect_further(
    host: str,
    offer: TcpOffer,
    session: LaneSession,
    direction: LaneDirection,
    index: int,
    *,
    tls: Path | None = None,
) -> TcpConnection:
    """Opens one more connection of a direction: its number `index`, from 1; see `connect`.

    Raises:
        TcpUnavailable: it can't be opened, or leads to somebody else.
    """
    (connection,) = _connected(host, offer, session, [(direction, index)], tls, WITHIN_S)
    return connection


def _connected(
    host: str,
    offer: TcpOffer,
    session: LaneSession,
    places: Sequence[tuple[LaneDirection, int]],
    tls: Path | None,
    within_s: float,
) -> list[TcpConnection]:
    deadline = time.monotonic() + within_s
    where = f"port {offer.port} of {host}"
    try:
        with contextlib.ExitStack() as undone:
            if len(offer.nonce) != NONCE_BYTES:
                raise TcpUnavailable(f"the offer's nonce has {len(offer.nonce)} bytes")
            context = None if tls is None else client_context(tls)
            opened: list[TcpConnection] = []
            for place in places:
                raw = _opened(host, offer.port, context, deadline)
                undone.callback(raw.close)
                _prove(raw, session, offer.nonce, place, deadline)
                raw.settimeout(None)
                opened.append(TcpConnection(raw, ANSWER_BYTES))
            undone.pop_all()
            return opened
    except TimeoutError:
        why = f"{where} did not answer within {within_s:g} s: a firewall may drop what goes there"
    except ssl.SSLError as error:
        why = f"no TLS with {where}: {error.reason or error}"
    except TlsError as error:
        why = str(error)
    except OSError as error:
        why = f"{where}: {error.strerror or error}"
    except TcpUnavailable as error:
        why = f"{where}: {error}"
    raise TcpUnavailable(why) from None


def _opened(host: str, port: int, context: ssl.SSLContext | None, deadline: float) -> socket.socket:
    raw = socket.create_connection((host, port), timeout=_left(deadline))
    with contextlib.ExitStack() as undone:
        undone.callback(raw.close)
        prepare(raw)
        if context is not None:
            raw.settimeout(_left(deadline))
            raw = context.wrap_socket(raw, server_hostname=host)
        undone.pop_all()
    return raw


def _prove(
    raw: socket.socket,
    session: LaneSession,
    nonce: bytes,
    place: tuple[LaneDirection, int],
    deadline: float,
) -> None:
    direction, index = place
    raw.settimeout(_left(deadline))
    raw.sendall(preamble(session, nonce, direction, index))
    answer = b""
    while len(answer) < ANSWER_BYTES:
        raw.settimeout(_left(deadline))
        received = raw.recv(ANSWER_BYTES - len(answer))
        if not received:
            raise TcpUnavailable("it closed the connection instead of answering the proof")
        answer += received
    if not is_answer(session, nonce, direction, answer, index):
        raise TcpUnavailable("its answer is not that of the call's other end")


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
