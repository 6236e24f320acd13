"""The engine of a session: its control stream, its lanes, and the calls of its groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from andon.host.arena import SharedMemoryUnavailable, folder_identity
from andon.host.tls import ServerIdentity, TlsError, address_of
from andon.tcp.listening import TcpListener
from andon.wire.checksums import CAPABILITY as CHECKSUMS
from andon_torch.gate import GradientWatch
from andon_torch.places import Meeting
from andon_torch.process_group import Caller
from andon_torch.recording import RecordedCaller, Recording
from andon_trainer.config import LineConfig
from andon_trainer.errors import JoinRefused
from andon_trainer.exchange.channels import close_in_children
from andon_trainer.exchange.ring.exchange import place_of
from andon_trainer.peers.attendance import RankReport
from andon_trainer.peers.attending import Attending, AttendSettings, attend
from andon_trainer.peers.memory import MEMORY_CAPABILITY, can_share
from andon_trainer.peers.serving import Located
from andon_trainer.peers.session import Peers
from andon_trainer.timeline import Timeline

__all__ = ["Engine", "open_engine"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """What a session of this process is made of."""

    attending: Attending
    peers: Peers
    recording: Recording | None = None
    """Its trace; None: nothing is recorded."""

    def group(self, name: str, places: Sequence[int], watch: GradientWatch) -> Caller:
        """The group of these ranks of the session, this one among them; `watch` counts steps."""
        group = self.peers.group(name, places)
        if self.recording is None:
            return group
        return RecordedCaller(self.recording, group, watch)

    def report(self) -> RankReport:
        """What this rank did, and does."""
        return self.peers.report()


def open_engine(
    config: LineConfig, located: Located, meeting: Meeting, *, device: tuple[str, str]
) -> Engine:
    """Forms the session of the ranks that meet.

    Args:
        config: this process's settings.
        located: where the coordinator is.
        meeting: the ranks.
        device: where this process computes, and the device's name.

    Raises:
        JoinRefused: this process can't be that rank.
        LineLost: no coordinator answers.
        CallTimedOut: ranks are missing.
        ValueError: ANDON_TRACE can't be written.
    """
    if exposed := replace(config, address=located.address).heard_by_others:
        raise JoinRefused.in_the_clear(exposed)
    bind = "" if config.ring_bind == "off" else config.ring_bind
    place = place_of(bind, located.address, 0.0)
    try:
        identity = None if config.tls is None else ServerIdentity(config.tls)
    except TlsError as error:
        raise JoinRefused("tls", str(error)) from error
    memory, shared_folder = _memory(config.shared_dir)
    recording, began = _recording(config, located.run_id), time.perf_counter()
    listener = TcpListener(place.bind, place.port, identity=identity)
    try:
        settings = AttendSettings(
            address=located.address,
            rank=meeting.rank,
            world_size=len(meeting.ranks),
            run_id=located.run_id,
            token=config.token,
            tls=config.tls,
            insecure=config.insecure,
            lanes=address_of(place.advertised, listener.port),
            shared_folder=shared_folder,
            capabilities=(CHECKSUMS,) if memory is None else (CHECKSUMS, MEMORY_CAPABILITY),
            backend=device[0],
            device=device[1],
            form_within_s=meeting.timeout.total_seconds(),
        )
        attending = attend(settings)
    except BaseException:
        listener.close()
        if recording is not None:
            recording.close()
        raise
    close_in_children(address_of(place.bind, listener.port))
    peers = Peers(attending, listener, tls=config.tls, shared_dir=memory)

    def close() -> None:
        peers.close()
        listener.close()
        if recording is not None:
            recording.close()  # Last: it has the ends of calls.

    attending.before_leaving(close)
    if recording is not None:
        recording.formed(meeting.rank, began)
        attending.watch(recording.session_over)
    return Engine(attending, peers, recording)


def _recording(config: LineConfig, run_id: str) -> Recording | None:
    if config.trace is None:
        return None
    return Recording(Timeline(config.trace, run_id=run_id, called="rank"))


def _memory(folder: Path | None) -> tuple[Path | None, bytes]:
    """The folder for memory that is shared with ranks of this host, and its identity.

    None: everything goes over lanes.
    """
    if folder is None or not can_share():
        return None, b""
    try:
        return folder, folder_identity(folder)
    except SharedMemoryUnavailable as error:
        log.warning("ranks of this host exchange over TCP lanes: %s", error)
        return None, b""
