"""Questions: settings of the commands that ask a line or answer its halts, and of the small ones.

Apart from those of the service and its workers, and light: containers run `andon health` every few
seconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from andon.host.access import CLEAR, Access
from andon.host.errors import UsageError
from andon.host.settings import (
    FLAG_ONLY,
    Address,
    CommandSettings,
    File,
    Folder,
    GivenSettings,
    Port,
    SharedDir,
    Within,
    seconds,
    whole,
)
from andon.host.shared_dir import DEFAULT_SHARED_DIR

__all__ = [
    "CertsConfig",
    "CertsSettings",
    "DoctorConfig",
    "DrainConfig",
    "ExportConfig",
    "ExportSettings",
    "Form",
    "HaltConfig",
    "HealthConfig",
    "HistoryConfig",
    "LineCommand",
    "ReportConfig",
    "ReportSettings",
    "ResumeConfig",
    "ShowConfig",
    "ShowSettings",
    "StatusConfig",
    "TokenConfig",
    "TokenSettings",
    "TopConfig",
    "TraceConfig",
    "TraceSettings",
    "WhyConfig",
    "WhySettings",
    "certs_config",
    "export_config",
    "report_config",
    "show_config",
    "token_config",
    "trace_config",
    "why_config",
]

Form = Literal["table", "json"]

_LONGEST_NAME_BYTES = 127
"""Of a service, in a message whose length is one byte."""
_HOST = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f]*:[0-9A-Fa-f:.]{1,45}"
)
"""A host's name or its address, IPv6 included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCommand(CommandSettings):
    """What every command has that asks a line, or tells it something."""

    address: Address = ""
    """The coordinator. Default: the run that is served from this folder."""
    run: Annotated[str, FLAG_ONLY, Parameter(metavar="ID")] = ""
    """The run under runs/, or its folder. Default: the only one that is served from here."""
    access: Access = CLEAR
    """Certificates and tokens."""
    format: Form = "table"
    """How to show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusConfig(LineCommand):
    """What `andon status` shows, and how."""

    watch: bool = False
    """Follow it until Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig(LineCommand):
    """What `andon top` shows, and how."""

    once: Annotated[bool, FLAG_ONLY] = False
    """Show the last step and end, as without a terminal. Default: follow it until Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhySettings(LineCommand):
    """Which run `andon why` looks at, and how it shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyConfig:
    """What `andon why` shows."""

    settings: WhySettings
    """Of which run, and how."""
    worker: int | None = None
    """Of this worker; None: of all."""


def why_config(given: GivenSettings[WhySettings], words: Sequence[str]) -> WhyConfig:
    """What `andon why` is to show."""
    if len(words) > 1 or not all(each.isdecimal() for each in words):
        raise UsageError("one worker's number at most, such as 1: andon why [WORKER]")
    return WhyConfig(settings=given.settings, worker=int(words[0]) if words else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltConfig(LineCommand):
    """Which line `andon halt` stops, and why."""

    reason: Annotated[str, FLAG_ONLY, Parameter(metavar="TEXT")] = ""
    """Why, for the others and for the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig(LineCommand):
    """How `andon resume` answers a halt; without `skip` and `drop` the step is tried again.

    An answer is for one halt: no variable and no file may answer them all.
    """

    skip: Annotated[bool, FLAG_ONLY] = False
    """Leave the step's samples out, and record them as skipped."""
    drop: Annotated[int | None, FLAG_ONLY, whole(0, 2**32 - 1, metavar="WORKER")] = None
    """Go on without this worker."""
    halt: Annotated[int | None, FLAG_ONLY, whole(1, 2**64 - 1, metavar="ID")] = None
    """Answer this halt and no newer one. Default: the current one."""

    def __post_init__(self) -> None:
        """Refuses two answers at once."""
        if self.skip and self.drop is not None:
            raise UsageError("a halt has one answer: give --skip or --drop, not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig(LineCommand):
    """Which run `andon drain` ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig(LineCommand):
    """Which service `andon health` asks."""

    service: Annotated[str, FLAG_ONLY, Parameter(metavar="NAME")] = ""
    """A service by its full name, such as andon.v1.Coordinator. Default: the process."""
    timeout_s: Annotated[float, FLAG_ONLY, seconds(0.1)] = 3.0
    """Wait this long for the answer."""

    def __post_init__(self) -> None:
        """Refuses a name that no request has room for."""
        if len(self.service.encode()) > _LONGEST_NAME_BYTES:
            raise UsageError(f"--service must be at most {_LONGEST_NAME_BYTES} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig(CommandSettings):
    """Which runs `andon history` lists."""

    format: Form = "table"
    """How to show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowSettings(CommandSettings):
    """Settings of `andon show`."""

    format: Form = "table"
    """How to show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConfig:
    """What `andon show` looks up."""

    settings: ShowSettings
    """How to show it."""
    run: str = ""
    """The run under runs/, its folder or its journal; empty: the newest one."""
    step: int | None = None
    """A step of it; None: the run as a whole."""


def show_config(given: GivenSettings[ShowSettings], words: Sequence[str]) -> ShowConfig:
    """What `andon show` is to look up."""
    if len(words) > 2:
        raise UsageError("one run and one step at a time: andon show RUN [STEP]")
    run, step = (*words, "", "")[:2]
    if step and not step.isdecimal():
        raise UsageError(f"a step is a number, such as 118, not {step!r}: andon show RUN [STEP]")
    return ShowConfig(settings=given.settings, run=run, step=int(step) if step else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings(CommandSettings):
    """Settings of `andon export`."""

    format: Annotated[Literal["csv", "json", "tensorboard"], FLAG_ONLY] = "csv"
    """As what."""
    by: Annotated[Literal["step", "epoch"], FLAG_ONLY] = "step"
    """A row for each step, or for each epoch; for TensorBoard, curves over steps or over epochs."""
    output: Annotated[File | None, FLAG_ONLY, Parameter(name=("--output", "-o"))] = None
    """Write to this file, or for TensorBoard into this folder. Default: standard output, or the
    folder tensorboard of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """What `andon export` writes."""

    settings: ExportSettings
    """As what, and where to."""
    run: str = ""
    """The run under runs/, its folder or its journal; empty: the newest one."""


def export_config(given: GivenSettings[ExportSettings], words: Sequence[str]) -> ExportConfig:
    """What `andon export` is to write."""
    if len(words) > 1:
        raise UsageError("one run at a time: andon export RUN")
    return ExportConfig(settings=given.settings, run=words[0] if words else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings(CommandSettings):
    """Settings of `andon report`."""

    format: Annotated[Literal["html", "markdown", "json"], FLAG_ONLY] = "markdown"
    """As what. HTML is one file that needs no other."""
    output: Annotated[File | None, FLAG_ONLY, Parameter(name=("--output", "-o"))] = None
    """Write to this file. Default: standard output."""
    price: Annotated[float | None, Parameter(validator=Within(0), metavar="PRICE")] = None
    """What an hour of one worker's machine costs. Default: what the run was told
    (`--price-per-hour`); without it no cost is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """What `andon report` tells."""

    settings: ReportSettings
    """As what, and where to."""
    run: str = ""
    """The run under runs/, its folder or its journal; empty: the newest one."""
    other: str = ""
    """Another run, to be shown beside it; empty: none."""


def report_config(given: GivenSettings[ReportSettings], words: Sequence[str]) -> ReportConfig:
    """What `andon report` is to tell."""
    if len(words) > 2:
        raise UsageError("one run, or two beside each other: andon report RUN [OTHER]")
    run, other = (*words, "", "")[:2]
    return ReportConfig(settings=given.settings, run=run, other=other)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig(CommandSettings):
    """What `andon doctor` tries."""

    address: Address = ""
    """A line to reach. Default: a service that it starts itself."""
    port: Port = 7070
    """The port that `andon serve` would listen on."""
    metrics_port: Port = 9400
    """The port that its metrics would have."""
    shared_dir: SharedDir = DEFAULT_SHARED_DIR
    """Where processes of this host would share memory."""
    access: Access = CLEAR
    """Certificates and tokens."""
    format: Form = "table"
    """How to show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertsSettings(CommandSettings):
    """Settings of `andon certs`."""

    out: Annotated[Folder, FLAG_ONLY] = Path("certs")
    """Keep them there."""
    days: Annotated[int, FLAG_ONLY, whole(1, 3650)] = 90
    """Certificates are valid for N days."""
    renew: Annotated[bool, FLAG_ONLY] = False
    """Make new keys and certificates for the hosts."""
    format: Form = "table"
    """How to say what was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertsConfig:
    """Which certificates `andon certs` makes."""

    settings: CertsSettings
    """Where they go, and for how long."""
    hosts: tuple[str, ...]
    """Names or addresses; each gets a key of its own."""

    def __post_init__(self) -> None:
        """Refuses what can't be a host's name and the name of its folder."""
        if not self.hosts:
            raise UsageError("no host: andon certs alpha beta 10.0.0.7")
        for host in self.hosts:
            if not _HOST.fullmatch(host) or host == "ca":
                raise UsageError(
                    f"a host is a name or an address, such as alpha or 10.0.0.7, not {host!r}"
                )


def certs_config(given: GivenSettings[CertsSettings], hosts: Sequence[str]) -> CertsConfig:
    """What `andon certs` is to make."""
    return CertsConfig(settings=given.settings, hosts=tuple(hosts))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings(CommandSettings):
    """Settings of `andon token`."""

    token_file: File | None = None
    """The file with the run's token, which the worker's is made from."""
    days: Annotated[int | None, FLAG_ONLY, whole(1, 3650)] = None
    """It expires after N days. Default: never."""
    format: Form = "table"
    """How to print it; a table is the token alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConfig:
    """Which worker token `andon token` makes."""

    settings: TokenSettings
    """What it is made from, and for how long."""
    name: str
    """Who it is for; the name by which it can be withdrawn."""


def token_config(given: GivenSettings[TokenSettings], names: Sequence[str]) -> TokenConfig:
    """What `andon token` is to make."""
    if len(names) != 1:
        raise UsageError("name one worker: andon token beta --token-file FILE")
    return TokenConfig(settings=given.settings, name=names[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings(CommandSettings):
    """Settings of `andon trace`."""

    out: Annotated[File | None, FLAG_ONLY, Parameter(name=("--out", "-o"))] = None
    """Write the files as one trace to FILE."""
    format: Form = "table"
    """How to show where the time went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """What `andon trace` reads."""

    settings: TraceSettings
    """What to do with it."""
    files: tuple[Path, ...]
    """Traces, parts of them, and folders of parts."""

    def __post_init__(self) -> None:
        """Refuses to read nothing."""
        if not self.files:
            raise UsageError("no trace: andon trace FILE ...")


def trace_config(given: GivenSettings[TraceSettings], files: Sequence[str]) -> TraceConfig:
    """What `andon trace` is to read."""
    return TraceConfig(settings=given.settings, files=tuple(map(Path, files)))
