"""Sessions without a coordinator, for tests: ranks as threads of one process, or as processes.

`sessions` forms one of ranks that share a process. A fault of any rank ends it for all, as the
coordinator would: the first one counts, and SessionOver has its message.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from andon.host.tls import ServerIdentity
from andon.protocol.records import Key
from andon.protocol.sessions import (
    Peer,
    RankFault,
    RankReport,
    SessionFormed,
    SessionOver,
)
from andon.protocol.tokens import peer_token
from andon.tcp.listening import TcpListener
from andon.wire.checksums import CAPABILITY as CHECKSUMS
from andon_trainer.peers.memory import MEMORY_CAPABILITY
from andon_trainer.peers.session import Peers

__all__ = ["FakeSession", "RankSeat", "formed_for", "sessions"]

KEY = Key(3, 1)
"""The key of all sessions that are made here."""


def formed_for(
    rank: int,
    addresses: list[str],
    *,
    secret: bytes = b"secret of tests, 16 bytes or more",
    capabilities: frozenset[str] = frozenset({CHECKSUMS}),
    folders: list[bytes] | None = None,
) -> SessionFormed:
    """What the coordinator would send to a rank."""

    def token(sender: int, receiver: int) -> bytes:
        return b"" if sender == receiver else peer_token(secret, "tests", KEY, sender, receiver)

    return SessionFormed(
        key=KEY,
        peers=tuple(
            Peer(
                rank=other,
                node_id=f"node-{other}",
                address=address,
                shared_folder=b"" if folders is None else folders[other],
                token_to=token(rank, other),
                token_from=token(other, rank),
            )
            for other, address in enumerate(addresses)
        ),
        capabilities=capabilities,
        lease_s=10.0,
        report_s=1.0,
    )


class FakeSession:
    """What the coordinator knows of a session: whether it is over, and whom to tell."""

    def __init__(self) -> None:
        """Is not over."""
        self.over: SessionOver | None = None
        self.faults: list[tuple[int, RankFault]] = []
        """All that were reported, and by whom."""
        self._watchers: list[Callable[[SessionOver], None]] = []
        self._lock = threading.Lock()

    def fault(self, rank: int, fault: RankFault) -> None:
        """A rank reports one."""
        self.faults.append((rank, fault))
        self.end(
            SessionOver(
                key=KEY,
                end=fault.end,
                culprit=fault.culprit,
                culprit_node="" if fault.culprit is None else f"node-{fault.culprit}",
                message=fault.message,
                fault=fault,
                reported_by=rank,
            )
        )

    def end(self, over: SessionOver) -> None:
        """Ends the session for all, unless it is over."""
        with self._lock:
            if self.over is not None:
                return
            self.over = over
            watchers, self._watchers = self._watchers, []
        for each in watchers:
            each(over)

    def watch(self, on_over: Callable[[SessionOver], None]) -> None:
        """Has it called at the end; at once if that is past."""
        with self._lock:
            if self.over is None:
                self._watchers.append(on_over)
                return
            over = self.over
        on_over(over)


@dataclass(slots=True)
class RankSeat:
    """One rank's Attendance of a fake session."""

    session: FakeSession
    rank: int
    formed: SessionFormed
    source: Callable[[], RankReport] | None = field(default=None)
    """Where reports would come from."""

    @property
    def over(self) -> SessionOver | None:
        """Why the session is over."""
        return self.session.over

    def fault(self, fault: RankFault) -> None:
        """Ends the session for all."""
        self.session.fault(self.rank, fault)

    def watch(self, on_over: Callable[[SessionOver], None]) -> None:
        """Has it called at the end."""
        self.session.watch(on_over)

    def report_from(self, source: Callable[[], RankReport]) -> None:
        """Keeps the source."""
        self.source = source


@dataclass(slots=True)
class Ranks:
    """All ranks of a session that share this process."""

    session: FakeSession
    peers: list[Peers]
    """By rank."""
    listeners: list[TcpListener]


@contextlib.contextmanager
def sessions(
    size: int,
    *,
    tls: Path | None = None,
    checksums: bool = True,
    shared_dirs: Sequence[Path] | None = None,
    hosts: Sequence[int] | None = None,
) -> Iterator[Ranks]:
    """A session whose ranks share this process; ends them.

    Args:
        size: how many ranks.
        tls: the folder of certificates.
        checksums: whether frames have checksums.
        shared_dirs: by rank, where it shares memory; None: none does.
        hosts: by rank, on which host it pretends to be; None: all are on one.
    """
    identity = None if tls is None else ServerIdentity(tls)
    listeners = [TcpListener("127.0.0.1", identity=identity) for _ in range(size)]
    addresses = [f"127.0.0.1:{each.port}" for each in listeners]
    session = FakeSession()
    folders = None
    capabilities = {CHECKSUMS} if checksums else set()
    if shared_dirs is not None:
        capabilities.add(MEMORY_CAPABILITY)
        folders = [folder_of(f"host {host}") for host in hosts or [0] * size]
    ranks = Ranks(session, [], listeners)
    try:
        for rank in range(size):
            formed = formed_for(
                rank, addresses, capabilities=frozenset(capabilities), folders=folders
            )
            seat = RankSeat(session, rank, formed)
            shared_dir = None if shared_dirs is None else shared_dirs[rank]
            ranks.peers.append(Peers(seat, listeners[rank], tls=tls, shared_dir=shared_dir))
        yield ranks
    finally:
        for peers in ranks.peers:
            peers.close()
        for listener in listeners:
            listener.close()


def folder_of(name: str) -> bytes:
    """The identity of a shared folder, 16 bytes."""
    return hashlib.sha256(name.encode()).digest()[:16]
