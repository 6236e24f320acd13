"""Configuration of `andon serve --role reducer`: a reducer that is a process of its own."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from andon.host.arena import DEFAULT_SHARED_DIR, shared_dir_of
from andon.host.tls import is_loopback
from andon.protocol.run_settings import Liveness
from andon_cli.settings import Settings
from andon_server.errors import UsageError
from andon_server.limits import Limits, limit_names, limits_of
from andon_server.security import CLEAR, Access, access_of, in_the_clear

__all__ = ["ReducerConfig", "reducer_config"]

_OWN = frozenset(
    {
        *("verb", "role", "coordinator", "secret_file", "run_id", "advertise", "liveness"),
        *("bind", "port", "metrics_port", "insecure", "tls_dir"),
        *("until_complete", "announce", "parent_pid", *limit_names()),
    }
)
"""Flags of `andon serve` that mean something to a reducer; the others are the line's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerConfig:
    """Where a reducer serves, and for which line."""

    coordinator: str
    """Where the line is served, as host:port."""
    secret_file: Path
    """Holds the secret that the coordinator has, too."""
    run_id: str = ""
    """The run; empty: whichever is served there."""
    bind: str = "127.0.0.1"
    """The interface to listen on."""
    port: int = 7071
    """The reducer's port; 0 is any free one."""
    metrics_port: int = 9401
    """The port of the metrics; 0 is any free one."""
    advertise: str = ""
    """Host, or host:port, by which workers reach it; empty: found out."""
    insecure: bool = False
    """Whether what is beyond loopback may go unencrypted."""
    access: Access = CLEAR
    """Certificates, for workers and towards the coordinator."""
    liveness_s: float = Liveness().lease_s
    """A worker silent for so long is lost to this reducer."""
    until_complete: bool = False
    """Whether to end once the run is over."""
    announce: bool = False
    """Whether to print where it serves, as one line of JSON."""
    shared_dir: Path | None = DEFAULT_SHARED_DIR
    """Where memory is shared with workers of this host; None: nowhere."""
    parent_pid: int | None = None
    """End when this parent process is gone; None: whatever becomes of it."""
    limits: Limits = field(default_factory=Limits)
    """What anybody may take."""

    def __post_init__(self) -> None:
        """Refuses values that contradict each other."""
        here = is_loopback(self.coordinator.rpartition(":")[0])
        encrypted = self.access.tls is not None or self.insecure
        if not (here and is_loopback(self.bind)) and not encrypted:
            raise in_the_clear("a reducer beyond loopback sends what others could read")
        if not here and is_loopback(self.bind):
            raise UsageError(
                f"the line at {self.coordinator} is on another host, whose workers can't reach a "
                f"reducer on {self.bind}: pass --bind 0.0.0.0, or this host's address"
            )
        if self.port == self.metrics_port != 0:
            raise UsageError(
                f"--port and --metrics-port are both {self.port}: the reducer and its metrics "
                "need a port each"
            )

    def address(self, port: int) -> str:
        """Where workers reach the reducer that listens on `port`, as host:port."""
        if self.advertise:
            host, colon, given = self.advertise.rpartition(":")
            named = colon and given.isdecimal() and not host.endswith(":")
            return self.advertise if named else f"{self.advertise}:{port}"
        if self.bind.strip("[]") in ("0.0.0.0", "::"):
            return f"{_host_towards(self.coordinator)}:{port}"
        return f"{self.bind}:{port}"


def reducer_config(settings: Settings) -> ReducerConfig:
    """The configuration of a reducer.

    Raises:
        UsageError: a value can't be read, or two contradict each other.
    """
    settings.refuse_other_flags(_OWN, "belongs to the line: give it to the coordinator")
    coordinator = settings.address("coordinator")
    if not coordinator:
        raise UsageError("--role reducer needs --coordinator HOST:PORT: where the line is served")
    secret_file = settings.text("secret_file")
    if not secret_file:
        raise UsageError(
            "--role reducer needs --secret-file FILE, the same that the coordinator was given"
        )
    return ReducerConfig(
        coordinator=coordinator,
        secret_file=Path(secret_file),
        run_id=settings.text("run_id"),
        bind=settings.text("bind") or "127.0.0.1",
        port=settings.port("port", 7071),
        metrics_port=settings.port("metrics_port", 9401),
        advertise=settings.text("advertise"),
        insecure=settings.switch("insecure"),
        access=access_of(settings),
        liveness_s=settings.seconds("liveness", Liveness().lease_s, least=0.1),
        until_complete=settings.switch("until_complete"),
        announce=settings.switch("announce"),
        shared_dir=shared_dir_of(settings.text("shared_dir")),
        parent_pid=settings.optional_whole("parent_pid", least=1),
        limits=limits_of(settings),
    )


def _host_towards(coordinator: str) -> str:
    """This host's address on the way to the coordinator; nothing is sent.

    Raises:
        UsageError: there is no such host, or no way to it.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"there is no way to {coordinator} ({error.strerror}): check the name, or say by "
            "--advertise HOST where workers reach this reducer"
        ) from error
    return f"[{found}]" if ":" in found else found
