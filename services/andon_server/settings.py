"""Settings of the processes that serve: a line, or one of its reducers.

`ServiceSettings` is what `andon serve` and `andon run` have in common: `andon run` hands all of it
to the service that it starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter, Token

from andon.host.access import CLEAR, Access, in_the_clear
from andon.host.errors import UsageError
from andon.host.logs import LogFormat
from andon.host.settings import (
    EVERYDAY,
    FLAG_ONLY,
    Address,
    CommandSettings,
    Connections,
    Count,
    File,
    Place,
    Port,
    SharedDir,
    TcpPort,
    Workers,
)
from andon.host.shared_dir import DEFAULT_SHARED_DIR
from andon.host.tls import is_loopback
from andon.protocol.records import Key
from andon.protocol.run_settings import LEAST_TRIMMED
from andon_coordinator.config import LineOptions, too_few_to_trim
from andon_server.limits import Limits
from andon_server.runs import RUNS

__all__ = ["Role", "ServeConfig", "ServiceSettings", "shared_fields"]

Role = Literal["all", "coordinator", "reducer"]
"""What a process serves: the coordinator and a reducer, or one of them alone."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def _key(_type: object, tokens: tuple[Token, ...]) -> Key:
    text = tokens[0].value
    term, _, number = text.partition(":")
    try:
        return Key(int(term), int(number))
    except ValueError as error:
        raise ValueError(
            f"must be TERM:ROUND, the head in a checkpoint's state.json, not {text!r}"
        ) from error


@Parameter(name="*", group=Group("The service", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(CommandSettings):
    """What every service has, whoever starts it."""

    bind: Annotated[str, Parameter(metavar="HOST", group=EVERYDAY)] = "127.0.0.1"
    """Listen on this interface; 0.0.0.0 opens the line to other hosts."""
    advertise: Place = ""
    """How others reach this service. Default: `--bind`, or this host's name if that is every
    address; of a reducer its address on the way to the coordinator."""
    port: Port | None = None
    """The line's port; 0 is any free one. Default: 7070; of a reducer 7071; of `andon run` on
    loopback any free one."""
    metrics_port: Port | None = None
    """The port of the metrics for Prometheus; 0 is any free one. Default: 9400; of a reducer 9401;
    of `andon run` any free one."""
    metrics_hosts: Annotated[str, Parameter(metavar="NAMES")] = ""
    """Names, separated by commas, under which the metrics may be asked for; this host's names, that
    of `--advertise`, and all addresses always may."""
    metrics_token_file: File | None = None
    """The file with a token that Prometheus has to show. Default: it shows none."""
    tcp_port: TcpPort = 0
    """The port of TCP lanes, which carry gradients beside gRPC; 0 is any free one, `off` none."""
    connections: Connections = None
    """Connections of a TCP lane each way, 1 to 16; `auto` adds others while they raise the rate."""
    run_id: Annotated[str, Parameter(metavar="ID")] = ""
    """Name the run. Default: 4 random hexadecimal digits."""
    run_dir: Annotated[str, Parameter(metavar="DIR")] = ""
    """Keep the run's files there. Default: runs/ID."""
    log_format: LogFormat = "text"
    """Write logs as text, or as JSON with one object a line; those of workers here, too."""
    secret_file: File | None = None
    """A secret that the line shares with reducers in other processes. Default: none register."""
    withdrawn_file: File | None = None
    """Names of worker tokens (`andon token`) that open nothing any more, one a line; it is read
    again for each of them. Default: none are withdrawn."""
    shared_dir: SharedDir = DEFAULT_SHARED_DIR
    """Share memory with workers of this host in this folder; `off` shares none."""
    line: LineOptions = field(default_factory=LineOptions)
    """How the line works."""
    limits: Limits = field(default_factory=Limits)
    """How much clients may take."""
    access: Access = CLEAR
    """Certificates, and the tokens that the service asks for."""

    @property
    def encrypted(self) -> bool:
        """Whether other hosts may connect: with certificates, or because somebody accepts it."""
        return self.access.tls_dir is not None or self.access.insecure

    @property
    def folder(self) -> Path:
        """Where the run keeps its files."""
        return Path(self.run_dir) if self.run_dir else RUNS / self.run_id


@Parameter(name="*", group=Group("The service", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(ServiceSettings):
    """What `andon serve` serves, and where."""

    workers: Workers = 1
    """Workers that the line waits for before it starts."""
    published_on: Annotated[str, Parameter(metavar="HOST")] = ""
    """In a container: the address of its host on which the port of the metrics is published. On
    loopback the board counts as on loopback, and shows itself without a token. Default: nothing is
    known of it, and `--bind` decides."""
    role: Role = "all"
    """What this process serves: the coordinator and a reducer, or one of them alone."""
    coordinator: Address = ""
    """With `--role reducer`: where the line is served."""
    resume_from: Annotated[
        Key | None,
        FLAG_ONLY,
        Parameter(converter=_key, accepts_keys=False, n_tokens=1, metavar="TERM:ROUND"),
    ] = None
    """Roll the run back to this record, the `head` in a checkpoint's state.json."""
    docs_url: Annotated[str, Parameter(metavar="URL")] = ""
    """Where Andon's sources are published: halts on the board link to the documentation there.
    Default: they name its page."""
    script: Annotated[str, Parameter(metavar="NAME")] = ""
    """What the workers run, for the head of the board; `andon run` says it."""
    until_complete: bool = False
    """End once the line is complete and its workers are gone."""
    announce: bool = False
    """Print one line of JSON (address, advertised, metrics_url, and more) once it serves."""
    parent_pid: Annotated[Count | None, Parameter(metavar="PID")] = None
    """End when this parent process is gone."""

    def __post_init__(self) -> None:
        """Refuses values that contradict each other."""
        if self.run_id and not _RUN_ID.fullmatch(self.run_id):
            raise UsageError(
                f"a run id is letters, digits, '-' and '_', not {self.run_id!r}: change --run-id"
            )
        if self.docs_url and not self.docs_url.startswith(("http://", "https://")):
            raise UsageError(
                f"--docs-url is an address that begins with https://, not {self.docs_url!r}"
            )
        if self.line_port == self.endpoint_port != 0:
            raise UsageError(
                f"--port and --metrics-port are both {self.line_port}: each needs a port of its own"
            )
        # A reducer does not use the line's settings, so theirs are not compared.
        if self.role == "reducer":
            self._check_reducer()
        else:
            self._check_line()

    def _check_line(self) -> None:
        if not (is_loopback(self.bind) or self.encrypted):
            raise in_the_clear(f"--bind {self.bind} opens the line to other hosts")
        least, most = self.line.min_workers, self.line.max_workers
        if least > self.workers:
            raise UsageError(
                f"--min-workers {least} is above the {self.workers} that the line waits for at "
                "first: lower it, or start more workers"
            )
        if most is not None and most < self.workers:
            raise UsageError(
                f"--max-workers {most} is below the {self.workers} that the line waits for at "
                "first: raise it, or start fewer workers"
            )
        if self.line.contradiction:
            raise UsageError(self.line.contradiction)
        if self.line.mean == "trimmed" and (most or self.workers) < LEAST_TRIMMED:
            raise UsageError(too_few_to_trim(self.workers))
        others = self.line.reducers > 1 or self.role == "coordinator"
        if others and self.secret_file is None:
            raise UsageError(
                "reducers in other processes need --secret-file FILE, the same file for each and "
                "for the line: make one with `(umask 077; openssl rand -hex 32 > FILE)`"
            )

    def _check_reducer(self) -> None:
        if not self.coordinator:
            raise UsageError(
                "--role reducer needs --coordinator HOST:PORT: where the line is served"
            )
        if self.secret_file is None:
            raise UsageError(
                "--role reducer needs --secret-file FILE, the same that the coordinator was given"
            )
        here = is_loopback(self.coordinator.rpartition(":")[0])
        if not (here and is_loopback(self.bind)) and not self.encrypted:
            raise in_the_clear("a reducer beyond loopback sends what others could read")
        if not here and is_loopback(self.bind):
            raise UsageError(
                f"the line at {self.coordinator} is on another host, whose workers can't reach a "
                f"reducer on {self.bind}: pass --bind 0.0.0.0, or this host's address"
            )

    @property
    def keeps_output(self) -> bool:
        """Whether `andon run` started this service, and keeps what workers print in its folder."""
        return bool(self.script) and self.parent_pid is not None

    @property
    def board_bind(self) -> str:
        """The address on which browsers find the board."""
        return self.published_on or self.bind

    @property
    def line_port(self) -> int:
        """The port to listen on; 0 is any free one."""
        usual = 7071 if self.role == "reducer" else 7070
        return usual if self.port is None else self.port

    @property
    def endpoint_port(self) -> int:
        """The port of the metrics; 0 is any free one."""
        usual = 9401 if self.role == "reducer" else 9400
        return usual if self.metrics_port is None else self.metrics_port


def shared_fields(settings: ServiceSettings) -> dict[str, object]:
    """The values of all that services have in common: one starts another with them."""
    return {each.name: getattr(settings, each.name) for each in fields(ServiceSettings)}
