"""The listener's end of a TCP lane: takes connections, and gives each to the call that offered it.

Theory of operation. One thread accepts connections and reads their preambles. It never waits for
one peer: every socket is non-blocking, during TLS's handshake too. A connection must prove within
seconds what it belongs to, or it is closed. If too many have not, the oldest one of the host that
has most of them is closed. So an attacker can at most delay lanes, and streams without lanes use
gRPC.

An offer holds the session's key. It is good for one connection a direction, and for a short time;
a standing offer, whose nonce both ends can derive, until it is withdrawn. An offer of several
connections a direction is good for the further ones from when the first of each are there, until it
is withdrawn.

An unexpected error is logged, and closes the connection that it came from. Once the accepting
thread has ended, nothing is offered: a client would wait seconds for each offer in vain.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from andon.host.logs import LogEvent
from andon.host.peers import peer_of
from andon.host.tls import ServerIdentity
from andon.protocol.messages import TcpOffer
from andon.tcp.connection import TcpConnection, prepare
from andon.tcp.proof import (
    NONCE_BYTES,
    PREAMBLE_BYTES,
    SHOWN_BYTES,
    Claim,
    LaneDirection,
    LaneSession,
    NotAPreamble,
    answer_of,
    is_claim,
    read_preamble,
)

__all__ = ["MAX_UNPROVEN", "OFFER_S", "PROVE_S", "OpenOffer", "TcpListener"]

OFFER_S = 10.0
"""How long an offer may be taken up."""
PROVE_S = 5.0
"""How long a connection has to prove what it belongs to."""
MAX_UNPROVEN = 64
"""Connections that have not proven anything; one more closes the oldest of the host with most."""

_BACKLOG = 128
_BREATHER_S = 0.1
"""How long nothing is accepted when the process has no file descriptors left."""

Joined = Callable[[LaneDirection, TcpConnection], None]

_log = logging.getLogger(__name__)

_UNTAKEN = LogEvent("tcp_lane_not_taken", "a connection for a TCP lane was not taken")


@dataclass(slots=True, eq=False)
class OpenOffer:
    """An offer, until its connections are there, it is withdrawn, or its time is over."""

    message: TcpOffer
    """For the client."""
    session: LaneSession
    joined: Joined
    ends_at: float
    directions: set[LaneDirection]
    """Those that nobody has taken up."""
    further: set[tuple[LaneDirection, int]]
    """Connections beyond the first of each direction, by index, that nobody has opened."""

    def takes(self, claim: Claim) -> bool:
        """Whether nobody has opened what a claim is for, and it may be opened now."""
        if not claim.index:
            return claim.direction in self.directions
        return not self.directions and (claim.direction, claim.index) in self.further

    def take(self, claim: Claim) -> None:
        """It is opened now."""
        if claim.index:
            self.further.discard((claim.direction, claim.index))
            return
        self.directions.discard(claim.direction)
        if not self.directions and self.further:
            self.ends_at = math.inf

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it."""
        return not (self.directions or self.further)


@dataclass(slots=True, eq=False)
class _Unproven:
    """A connection that has not proven anything yet."""

    raw: socket.socket
    host: str
    ends_at: float
    shaking_hands: bool
    """Whether TLS's handshake is not over."""
    came: bytearray = field(default_factory=bytearray)


class TcpListener:
    """A port for lanes. Any thread may offer; `joined` is called on the accepting thread."""

    def __init__(self, host: str, port: int = 0, *, identity: ServerIdentity | None = None) -> None:
        """Listens; with an identity, connections are encrypted as the server's of gRPC are.

        Args:
            host: a name or an address; 0.0.0.0 and :: mean all of this host's.
            port: 0: any that is free.
            identity: the server's certificate, and whom it trusts.

        Raises:
            OSError: it can't listen there.
        """
        self._identity = identity
        self._listening = _bound(host, port)
        self._listening.settimeout(0)
        self.port: int = self._listening.getsockname()[1]
        self._offers: dict[bytes, OpenOffer] = {}
        """By the part of the nonce that a preamble shows."""
        self._over = False
        """Whether nobody accepts any more."""
        self._lock = threading.Lock()
        """Guards `_offers` and `_over`."""
        self._unproven: dict[int, _Unproven] = {}
        """By file descriptor, oldest first. Of the accepting thread alone."""
        self._woken, self._waking = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="andon-tcp-accept", daemon=True)
        self._thread.start()

    def offer(
        self,
        session: LaneSession,
        joined: Joined,
        directions: frozenset[LaneDirection] = frozenset(LaneDirection),
        nonce: bytes | None = None,
        *,
        connections: int = 1,
        adaptive: bool = False,
    ) -> OpenOffer | None:
        """Offers connections to one session. `joined` gets each one that proves itself.

        `joined` must not block, and it may be called until `withdraw` returns. None: this listens
        no more.

        Args:
            session: whose connections they are.
            joined: what gets them.
            directions: those that may be taken up, each once.
            nonce: that of a standing offer, which both ends know and nobody else. None: a random
                one, and the offer is over after OFFER_S.
            connections: how many of each direction may be opened.
            adaptive: whether the client begins with one of them.
        """
        ends_at = time.monotonic() + OFFER_S if nonce is None else math.inf
        nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        offer = OpenOffer(
            message=TcpOffer(
                self.port,
                nonce,
                reports=True,
                connections=connections if connections > 1 else 0,
                adaptive=adaptive and connections > 1,
            ),
            session=session,
            joined=joined,
            ends_at=ends_at,
            directions=set(directions),
            further={(way, index) for way in directions for index in range(1, connections)},
        )
        with self._lock:
            if self._over:
                return None
            now = time.monotonic()
            for shown, old in list(self._offers.items()):
                if now > old.ends_at:
                    del self._offers[shown]
            self._offers[nonce[:SHOWN_BYTES]] = offer
        return offer

    def withdraw(self, offer: OpenOffer) -> None:
        """Takes an offer back, also one that was taken up or is over. Nobody joins after that."""
        with self._lock:
            offer.directions.clear()
            offer.further.clear()
            self._offers.pop(offer.message.nonce[:SHOWN_BYTES], None)

    def close(self) -> None:
        """Listens no more. Connections that were given away stay as they are."""
        os.write(self._waking, b"\0")
        self._thread.join()
        os.close(self._woken)
        os.close(self._waking)

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except Exception:
            text = "no more TCP lanes are taken: streams use gRPC"
            _log.exception(LogEvent("tcp_listener_failed", text))
        finally:
            with self._lock:
                self._over = True
                self._offers.clear()
            self._listening.close()  # So that whoever has an offer is refused at once.
            for each in list(self._unproven.values()):
                self._drop(each)
            self._selector.close()

    def _serve(self) -> bool:
        """One round of the selector; False once this listens no more."""
        first = next(iter(self._unproven.values()), None)
        wait_s = None if first is None else max(0.0, first.ends_at - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.fd == self._woken:
                return False
            if key.fileobj is self._listening:
                self._accept()
            # Gone, if it was the oldest one when another was accepted.
            elif (peer := self._unproven.get(key.fd)) is not None:
                self._advance(peer)
        now = time.monotonic()
        for peer in list(self._unproven.values()):
            # In the order of their ends: each has as long as the others.
            if peer.ends_at > now:
                break
            self._drop(peer)
        return True

    def _accept(self) -> None:
        try:
            raw, address = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return  # It is gone again.
        except OSError as error:
            # Most likely the process has no file descriptors left. The connection stays in the
            # queue, so the selector would report it again at once.
            _log.warning(LogEvent("tcp_accept_failed", f"a connection was not accepted: {error}"))
            time.sleep(_BREATHER_S)
            return
        while len(self._unproven) >= MAX_UNPROVEN:
            self._drop(self._least_needed())
        try:
            raw.settimeout(0)
            prepare(raw)
            if self._identity is not None:
                context = self._identity.lane_context()
                raw = context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
            self._selector.register(raw, selectors.EVENT_READ)
        except OSError:  # SSLError is one
            raw.close()
            return
        except Exception:
            _log.exception(_UNTAKEN)
            raw.close()
            return
        encrypted = self._identity is not None
        host = peer_of(address[0])
        peer = _Unproven(raw, host, time.monotonic() + PROVE_S, shaking_hands=encrypted)
        self._unproven[raw.fileno()] = peer

    def _least_needed(self) -> _Unproven:
        """The oldest connection of the host that has most: no host pushes out another one's."""
        counts = Counter(each.host for each in self._unproven.values())
        busiest = counts.most_common(1)[0][0]
        return next(each for each in self._unproven.values() if each.host == busiest)

    def _advance(self, peer: _Unproven) -> None:
        """Reads on from a connection that has something to read."""
        try:
            if peer.shaking_hands:
                assert isinstance(peer.raw, ssl.SSLSocket)
                peer.raw.do_handshake()
                peer.shaking_hands = False
            # To the end of the preamble and no further: the rest is the receiver's.
            while len(peer.came) < PREAMBLE_BYTES:
                data = peer.raw.recv(PREAMBLE_BYTES - len(peer.came))
                if not data:
                    self._drop(peer)
                    return
                peer.came += data
            self._admit(peer)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(peer.raw, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(peer.raw, selectors.EVENT_WRITE)
        except (OSError, NotAPreamble) as error:
            _log.debug("a connection proved nothing: %s", error)
            self._drop(peer)
        except Exception:
            _log.exception(_UNTAKEN)
            self._drop(peer)

    def _admit(self, peer: _Unproven) -> None:
        """Gives a connection away if its preamble proves whose it is, else closes it.

        Raises:
            NotAPreamble: it began with something else.
            OSError: it is gone.
        """
        claim = read_preamble(bytes(peer.came))
        with self._lock:
            offer = self._offers.get(claim.shown)
            if (
                offer is None
                or time.monotonic() > offer.ends_at
                or not is_claim(offer.session, offer.message.nonce, claim)
                or not offer.takes(claim)
            ):
                self._drop(peer)
                return
            # Taken out at once, so that a preamble that is sent again opens nothing.
            offer.take(claim)
            if offer.is_over:
                self._offers.pop(claim.shown, None)
            self._selector.unregister(peer.raw)
            del self._unproven[peer.raw.fileno()]
            try:
                # It fits the kernel's buffer, which is empty: nothing was sent before.
                nonce = offer.message.nonce
                peer.raw.sendall(answer_of(offer.session, nonce, claim.direction, claim.index))
                peer.raw.settimeout(None)
            except OSError:
                peer.raw.close()
                return
            # Under the lock: `withdraw` returns only when nobody can join any more.
            offer.joined(claim.direction, TcpConnection(peer.raw, PREAMBLE_BYTES))

    def _drop(self, peer: _Unproven) -> None:
        # One that was proven is in neither of the two any more: see `_admit`.
        if self._unproven.pop(peer.raw.fileno(), None) is not None:
            self._selector.unregister(peer.raw)
        peer.raw.close()


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket; for all addresses of IPv6, those of IPv4 too."""
    host = host.strip("[]")
    if host in ("", "0.0.0.0", "::") and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    family, _, _, _, where = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(where[:2], family=family, backlog=_BACKLOG)
