"""One Attend call, from its first message to SessionFormed; and what a rank says of itself."""

from __future__ import annotations

import queue
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from andon.host.process import own_process
from andon.host.run_token import bearer_metadata
from andon.protocol.limits import PROTOCOL_VERSION, clipped
from andon.protocol.sessions import SessionFormed
from andon.v1 import coordinator_pb2, session_pb2
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire import conversion, sessions
from andon_trainer.errors import AndonError, CallTimedOut, JoinRefused, LineLost
from andon_trainer.exchange.channels import open_channel
from andon_trainer.exchange.control.translation import refusal_from

__all__ = ["AttendSettings", "AttendStream"]

_terms_seen = [0]
"""The greatest term that this process ever saw (rule 1 of the coordinator's rules)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendSettings:
    """What a rank says of itself, and where."""

    address: str
    """The coordinator's, as host:port."""
    rank: int
    world_size: int
    run_id: str = ""
    """The run; empty: whichever is served there."""
    token: bytes = field(default=b"", repr=False)
    """The run's token, if the line asks for one."""
    tls: Path | None = None
    """The folder of this process's certificates; None: nothing is encrypted."""
    insecure: bool = False
    """Whether it may talk to other hosts without encryption."""
    node_id: str = field(default_factory=socket.gethostname)
    """The host's name, for people."""
    lanes: str = ""
    """Where the other ranks reach this one's lanes: host:port, or :port at the address from which
    the coordinator sees this process. Empty: it takes none."""
    shared_folder: bytes = b""
    """`andon.host.arena.folder_identity` of the folder in which it shares memory; empty: none."""
    capabilities: tuple[str, ...] = ()
    """What it can do that not every rank can, as `crc32c.v1`."""
    backend: str = "cpu"
    """Where it computes: `cuda` or `cpu`."""
    device: str = ""
    """The name of its device, for people."""
    metrics_address: str = ""
    """Where its metrics can be scraped, as host:port."""
    form_within_s: float = 1800.0
    """How long it waits for the coordinator and for all other ranks."""
    watch_exit: bool = True
    """Whether the session is told how this process's script ends, when Python exits."""


class AttendStream:
    """One Attend call."""

    def __init__(self, settings: AttendSettings, incarnation: int) -> None:
        """Opens it, and sends Attend.

        Raises:
            TlsError: the folder of certificates can't be used.
        """
        self._settings = settings
        self._trouble: AndonError | None = None
        """Why it gave up waiting."""
        self._outgoing: queue.SimpleQueue[session_pb2.AttendRequest | None] = queue.SimpleQueue()
        self._channel = open_channel(settings.address, settings.tls)
        self._stub = CoordinatorStub(self._channel)
        # Queued before the stream exists: Attend must be its first message.
        self.send(session_pb2.AttendRequest(attend=_attend_to(settings, incarnation)))
        self.responses = self._stub.Attend(iter(self._outgoing.get, None))

    def send(self, message: session_pb2.AttendRequest) -> None:
        """Queues a message."""
        self._outgoing.put(message)

    def close(self) -> None:
        """Ends it; nothing is sent any more."""
        self._outgoing.put(None)
        self._channel.close()

    def formed(self, deadline: float) -> SessionFormed:
        """Waits for SessionFormed.

        Raises:
            JoinRefused: the coordinator refuses this rank.
            CallTimedOut: ranks are missing at the deadline.
            grpc.RpcError: the coordinator can't be reached, or went away.
        """
        cut = threading.Timer(max(0.0, deadline - time.monotonic()), self._give_up)
        cut.daemon = True
        cut.start()
        try:
            response = next(self.responses)
            if response.WhichOneof("message") != "formed":
                raise JoinRefused("protocol", "the coordinator did not answer with SessionFormed")
            formed = sessions.formed_from_proto(response.formed)
        except grpc.RpcError as error:
            if self._trouble is not None:
                raise self._trouble from None
            refusal = refusal_from(error)
            if refusal is not None:
                raise refusal from None
            raise
        except (StopIteration, conversion.WireError) as error:
            raise JoinRefused("protocol", f"the peer is no coordinator: {error}") from None
        finally:
            cut.cancel()
        _terms_seen[0] = max(_terms_seen[0], formed.key.term)
        return formed

    def _give_up(self) -> None:
        """Asks who is missing, and ends the call."""
        # Before the end: this rank is still there, so the coordinator knows what it waits for.
        self._trouble = self._timed_out()
        self.responses.cancel()

    def _timed_out(self) -> AndonError:
        settings = self._settings
        try:
            answer = self._stub.GetStatus(
                coordinator_pb2.GetStatusRequest(run_id=settings.run_id),
                timeout=2.0,
                metadata=bearer_metadata(settings.token),
            )
        except grpc.RpcError as error:
            return LineLost(
                f"no coordinator answered at {settings.address} ({error.code().name})",
                settings.address,
                0,
            )
        missing = answer.status.session.awaited
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return CallTimedOut(
            f"the timeout of {settings.form_within_s:g} s passed at {settings.address} before all "
            f"{settings.world_size} ranks attended: {names if missing else 'others'} did not come"
        )


def _attend_to(settings: AttendSettings, incarnation: int) -> session_pb2.Attend:
    own = own_process()
    return session_pb2.Attend(
        run_id=settings.run_id,
        node_id=clipped(settings.node_id),
        rank=settings.rank,
        world_size=settings.world_size,
        incarnation=incarnation,
        protocol_version=PROTOCOL_VERSION,
        capabilities=settings.capabilities,
        token=settings.token,
        address=settings.lanes,
        shared_folder=settings.shared_folder,
        process_host=own.host,
        process_id=own.id if own.host else 0,
        backend=settings.backend,
        device=clipped(settings.device),
        metrics_address=settings.metrics_address,
        greatest_term=_terms_seen[0],
    )
