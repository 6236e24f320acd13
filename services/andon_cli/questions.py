"""Questions: configuration of the verbs that ask a line, or answer its halts.

Apart from the configuration of the service and its workers, and light: `andon health` is run every
few seconds in a container, and must not wait for what the others import.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from andon.host.arena import DEFAULT_SHARED_DIR, shared_dir_of
from andon_cli.runs import RUNS
from andon_cli.settings import Settings
from andon_server.errors import UsageError
from andon_server.security import CLEAR, Access, access_of

__all__ = [
    "QUESTIONS",
    "CertsConfig",
    "DoctorConfig",
    "DrainConfig",
    "Form",
    "HaltConfig",
    "HealthConfig",
    "HistoryConfig",
    "Question",
    "ResumeConfig",
    "StatusConfig",
    "certs_config",
    "health_config",
]

Form = Literal["table", "json"]

_LONGEST_NAME_BYTES = 127
"""Of a service, in a message whose length is one byte."""
_HOST = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f]*:[0-9A-Fa-f:.]{1,45}"
)
"""A name or a number; of IPv6, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusConfig:
    """What `andon status` shows, and how."""

    address: str = ""
    """The coordinator, as host:port; empty: that of `run`."""
    run: str = ""
    """An id under `runs/` or a run's folder; empty: the one that is served from here."""
    watch: bool = False
    """Whether to follow it."""
    access: Access = CLEAR
    """Certificates and tokens."""
    format: Form = "table"
    """`table` or `json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltConfig:
    """Which line `andon halt` stops, and why."""

    address: str = ""
    """The coordinator, as host:port; empty: that of `run`."""
    run: str = ""
    """An id under `runs/` or a run's folder; empty: the one that is served from here."""
    reason: str = ""
    """Why, for the others and for the journal."""
    access: Access = CLEAR
    """Certificates and tokens."""
    format: Form = "table"
    """`table` or `json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """How `andon resume` answers a halt; without `skip` and `drop` the step is tried again."""

    address: str = ""
    """The coordinator, as host:port; empty: that of `run`."""
    run: str = ""
    """An id under `runs/` or a run's folder; empty: the one that is served from here."""
    skip: bool = False
    """Whether to leave the step's samples out."""
    drop: int | None = None
    """The worker to go on without."""
    halt: int | None = None
    """Answer this halt and no other; None: the present one."""
    access: Access = CLEAR
    """Certificates and tokens."""
    format: Form = "table"
    """`table` or `json`."""

    def __post_init__(self) -> None:
        """Refuses two answers at once."""
        if self.skip and self.drop is not None:
            raise UsageError("a halt has one answer: give --skip or --drop, not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """Which run `andon drain` ends."""

    address: str = ""
    """The coordinator, as host:port; empty: that of `run`."""
    run: str = ""
    """An id under `runs/` or a run's folder; empty: the one that is served from here."""
    access: Access = CLEAR
    """Certificates and tokens."""
    format: Form = "table"
    """`table` or `json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """Which runs `andon history` lists."""

    runs: Path = RUNS
    """Where they are kept."""
    format: Form = "table"
    """`table` or `json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """What `andon doctor` tries."""

    address: str = ""
    """A line to reach, as host:port; empty: a service that it starts itself."""
    runs: Path = RUNS
    """Where runs would be kept."""
    port: int = 7070
    """The port that `andon serve` would take."""
    metrics_port: int = 9400
    """The port that its metrics would take."""
    shared_dir: Path = DEFAULT_SHARED_DIR
    """Where processes of this host share memory."""
    access: Access = CLEAR
    """Certificates and tokens."""
    format: Form = "table"
    """`table` or `json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Which service `andon health` asks."""

    address: str = ""
    """The service, as host:port; empty: that of `run`."""
    run: str = ""
    """An id under `runs/` or a run's folder; empty: the one that is served from here."""
    service: str = ""
    """The service's full name; empty: the process as a whole."""
    timeout_s: float = 3.0
    """How long to wait for its answer."""
    access: Access = CLEAR
    """Certificates and tokens."""
    format: Form = "table"
    """`table` or `json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertsConfig:
    """Which certificates `andon certs` makes."""

    hosts: tuple[str, ...]
    """Names or addresses; each gets a key of its own."""
    out: Path = Path("certs")
    """Where they are kept, with their CA."""
    days: int = 90
    """How long they are valid."""
    renew: bool = False
    """Whether keys and certificates that are there are made anew."""

    def __post_init__(self) -> None:
        """Refuses what can't be a host's name and the name of its folder."""
        for host in self.hosts:
            if not _HOST.fullmatch(host) or host == "ca":
                raise UsageError(
                    f"a host is a name or an address, such as alpha or 10.0.0.7, not {host!r}"
                )


Question = (
    CertsConfig
    | StatusConfig
    | HaltConfig
    | ResumeConfig
    | DrainConfig
    | HistoryConfig
    | DoctorConfig
    | HealthConfig
)


def _status(settings: Settings) -> StatusConfig:
    return StatusConfig(
        address=settings.address("address"),
        run=_run(settings),
        watch=settings.switch("watch"),
        access=access_of(settings),
        format=_form(settings),
    )


def _halt(settings: Settings) -> HaltConfig:
    return HaltConfig(
        address=settings.address("address"),
        run=_run(settings),
        reason=settings.only_flags().text("reason"),
        access=access_of(settings),
        format=_form(settings),
    )


def _resume(settings: Settings) -> ResumeConfig:
    # An answer is of one halt: no variable may answer them all.
    answer = settings.only_flags()
    return ResumeConfig(
        address=settings.address("address"),
        run=_run(settings),
        skip=answer.switch("skip"),
        drop=answer.optional_whole("drop", most=2**32 - 1),
        halt=answer.optional_whole("halt", least=1, most=2**64 - 1),
        access=access_of(settings),
        format=_form(settings),
    )


def _drain(settings: Settings) -> DrainConfig:
    return DrainConfig(
        address=settings.address("address"),
        run=_run(settings),
        access=access_of(settings),
        format=_form(settings),
    )


def _history(settings: Settings) -> HistoryConfig:
    return HistoryConfig(format=_form(settings))


def _doctor(settings: Settings) -> DoctorConfig:
    return DoctorConfig(
        address=settings.address("address"),
        port=settings.port("port", 7070),
        metrics_port=settings.port("metrics_port", 9400),
        shared_dir=shared_dir_of(settings.text("shared_dir")) or DEFAULT_SHARED_DIR,
        access=access_of(settings),
        format=_form(settings),
    )


def health_config(settings: Settings) -> HealthConfig:
    """What `andon health` asks."""
    asked = settings.only_flags()
    service = asked.text("service")
    if len(service.encode()) > _LONGEST_NAME_BYTES:
        raise UsageError(f"--service must be at most {_LONGEST_NAME_BYTES} bytes")
    return HealthConfig(
        address=settings.address("address"),
        run=_run(settings),
        service=service,
        timeout_s=asked.seconds("timeout", HealthConfig().timeout_s, least=0.1),
        access=access_of(settings),
        format=_form(settings),
    )


def certs_config(settings: Settings) -> CertsConfig:
    """What `andon certs` makes."""
    given = settings.only_flags()
    return CertsConfig(
        hosts=tuple(settings.hosts),
        out=Path(given.text("out") or "certs"),
        days=given.whole("days", 90, least=1, most=3650),
        renew=given.switch("renew"),
    )


def _run(settings: Settings) -> str:
    # ANDON_RUN is nobody's: a question is of one run, and workers are told theirs by ANDON_RUN_ID.
    return settings.only_flags().text("run")


def _form(settings: Settings) -> Form:
    return settings.choice("format", ("table", "json"))


QUESTIONS: dict[str, Callable[[Settings], Question]] = {
    "status": _status,
    "halt": _halt,
    "resume": _resume,
    "drain": _drain,
    "history": _history,
    "doctor": _doctor,
    "health": health_config,
    "certs": certs_config,
}
"""How the configuration of each verb is read."""
