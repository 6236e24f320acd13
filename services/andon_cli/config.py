"""Configuration of the console: what each verb is to do, from its settings.

A flag beats its environment variable, which beats the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from andon.host.arena import DEFAULT_SHARED_DIR, shared_dir_of
from andon.host.tls import is_loopback
from andon.protocol.limits import MAX_WORKERS
from andon.protocol.records import Key
from andon.protocol.reducers import MAX_REDUCERS
from andon.protocol.run_settings import Liveness, Policy, Topology
from andon_cli.questions import QUESTIONS, Question, StatusConfig
from andon_cli.reducer_config import ReducerConfig, reducer_config
from andon_cli.resuming import Resumption, find_resumption
from andon_cli.runs import JOURNAL, RUNS, free_run_id
from andon_cli.settings import Settings, read_settings
from andon_server.errors import UsageError
from andon_server.limits import Limits, limits_of
from andon_server.security import CLEAR, Access, access_of, in_the_clear

__all__ = [
    "Config",
    "RunConfig",
    "ServeConfig",
    "StatusConfig",
    "config_of",
    "read_config",
]

Role = Literal["all", "coordinator"]
"""What a process that serves a line is: the coordinator with a reducer, or alone."""

_JOINERS = frozenset(
    {
        *("verb", "join", "command", "module", "workers", "on_halt", "seed", "restarts"),
        *("checkpoint_every", "keep_checkpoints", "insecure", "report"),
        *("tls_dir", "token_file", "operator_token_file"),
    }
)
"""Flags of `andon run` that mean something to workers which join a line served elsewhere."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What `andon serve` serves, and where."""

    run_id: str
    """Names the run."""
    run_dir: Path
    """Where the run keeps its files."""
    bind: str = "127.0.0.1"
    """The interface to listen on."""
    port: int = 7070
    """The line's port; 0 is any free one."""
    metrics_port: int = 9400
    """The port of the metrics; 0 is any free one."""
    insecure: bool = False
    """Whether a line beyond loopback may go unencrypted."""
    access: Access = CLEAR
    """Certificates, and the tokens that it asks for."""
    expect_workers: int = 1
    """How many workers the line waits for before it founds."""
    min_workers: int = 1
    """Below so many in sync the line waits for workers."""
    max_workers: int | None = None
    """More are refused; None is as many as it waits for at first."""
    role: Role = "all"
    """Whether this process averages, too."""
    expect_reducers: int = 1
    """How many reducers the line waits for before its first round, this one included."""
    secret_file: Path | None = None
    """Holds the secret that the reducers have, too; None: the line takes no others."""
    max_steps: int | None = None
    """The line ends after so many steps; None if the scripts decide."""
    encoding: Literal["float32", "bfloat16", "float16"] = "float32"
    """How gradients and averages travel; they are added in float32."""
    journal_sync: Literal["normal", "full"] = "normal"
    """`normal` survives a crash of the process, `full` also power loss."""
    digest_every: int = Policy().digest_every
    """Compare digests of the weights every so many steps; 0 is never."""
    liveness_s: float = Liveness().lease_s
    """A worker silent for so long is lost."""
    forming_timeout_s: float | None = None
    """Halt once the line has waited so long for workers or reducers; None: it waits on."""
    straggler_timeout_s: float | None = None
    """Go on without a worker that the others wait for so long; None: never."""
    topology: Topology = Topology.STAR
    """How blocks travel between workers."""
    loss_spike: float | None = None
    """Halt at a loss so many deviations above the usual; None: never."""
    grad_norm_spike: float | None = None
    """Halt at an averaged gradient whose norm is so many deviations above the usual; likewise."""
    resume_from: Key | None = None
    """Go on from this record of the journal, whatever came after it; None: from the last one."""
    until_complete: bool = False
    """Whether to end once the line is complete and its workers are gone."""
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
        if not _RUN_ID.fullmatch(self.run_id):
            raise UsageError(
                f"a run id is letters, digits, '-' and '_', not {self.run_id!r}: change --run-id"
            )
        if not (is_loopback(self.bind) or self.access.tls or self.insecure):
            raise in_the_clear(f"--bind {self.bind} opens the line to other hosts")
        if self.min_workers > self.expect_workers:
            raise UsageError(
                f"--min-workers {self.min_workers} is above the {self.expect_workers} that the "
                "line waits for at first: lower it, or start more workers"
            )
        if self.max_workers is not None and self.max_workers < self.expect_workers:
            raise UsageError(
                f"--max-workers {self.max_workers} is below the {self.expect_workers} that the "
                "line waits for at first: raise it, or start fewer workers"
            )
        others = self.expect_reducers > 1 or self.role == "coordinator"
        if others and self.secret_file is None:
            raise UsageError(
                "reducers in processes of their own need --secret-file FILE, the same for each and "
                "for the line: make one with `(umask 077; openssl rand -hex 32 > FILE)`"
            )
        if self.port == self.metrics_port != 0:
            raise UsageError(
                f"--port and --metrics-port are both {self.port}: the line and its metrics need "
                "a port each"
            )

    def flags(self) -> list[str]:
        """The flags of `andon serve` that say the same."""
        pairs: list[tuple[str, object]] = [
            ("--run-id", self.run_id),
            ("--run-dir", self.run_dir),
            ("--bind", self.bind),
            ("--port", self.port),
            ("--metrics-port", self.metrics_port),
            ("--workers", self.expect_workers),
            ("--min-workers", self.min_workers),
            ("--max-workers", self.max_workers),
            ("--role", self.role),
            ("--reducers", self.expect_reducers),
            ("--secret-file", self.secret_file),
            *self.access.flags(),
            ("--max-steps", self.max_steps),
            ("--encoding", self.encoding),
            ("--journal-sync", self.journal_sync),
            ("--digest-every", self.digest_every),
            ("--liveness", self.liveness_s),
            ("--forming-timeout", self.forming_timeout_s),
            ("--straggler-timeout", self.straggler_timeout_s),
            ("--topology", self.topology.name.lower()),
            ("--loss-spike", self.loss_spike),
            ("--grad-norm-spike", self.grad_norm_spike),
            ("--resume-from", None if self.resume_from is None else _key_text(self.resume_from)),
            ("--parent-pid", self.parent_pid),
            *self.limits.flags(),
        ]
        switches = [
            ("--insecure", self.insecure),
            ("--until-complete", self.until_complete),
            ("--announce", self.announce),
        ]
        given = [text for name, value in pairs if value is not None for text in (name, str(value))]
        return given + [name for name, on in switches if on]

    def environment(self) -> dict[str, str]:
        """The variables that say what no flag does."""
        shared = "off" if self.shared_dir is None else str(self.shared_dir.absolute())
        given = {"ANDON_SHARED_DIR": shared}
        token = self.access.environment().get("ANDON_TOKEN")
        return given if token is None else {**given, "ANDON_TOKEN": token}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What `andon run` runs."""

    command: tuple[str, ...]
    """The script (or module) and its own arguments."""
    service: ServeConfig | None
    """The service to start; None: the line is served elsewhere."""
    join: str = ""
    """Where the line is served, as host:port, if not here."""
    module: bool = False
    """Whether the script is a module's name."""
    workers: int = 1
    """How many workers to start here."""
    on_halt: Literal["wait", "raise"] = "wait"
    """What workers do at a halt: `wait` for an answer, or `raise`."""
    seed: int | None = None
    """Seeds the order of the samples; None: the script decides, else 0."""
    report: Path | None = None
    """Where to write what the run came to."""
    checkpoint_every: int | None = None
    """Rank 0 writes a checkpoint every so many steps; None: the script decides."""
    keep_checkpoints: int | None = None
    """The newest so many are kept; None: the script decides."""
    resume: Path | None = None
    """The folder of the checkpoint to go on from; None: a new run."""
    restarts: int = 3
    """Workers that died are started again so many times in all."""
    insecure: bool = False
    """Whether workers may join an unencrypted line beyond loopback."""
    access: Access = CLEAR
    """Certificates and tokens, handed on to the workers."""

    def __post_init__(self) -> None:
        """Refuses values that contradict each other."""
        if not self.command:
            raise UsageError("no script to run: andon run --workers 2 train.py")
        if self.command[0].startswith("-"):
            raise UsageError(
                f"andon run knows no flag {self.command[0]}: flags of the script go after its name"
            )
        if bool(self.join) == (self.service is not None):
            raise UsageError("a run either joins a line or serves one")
        if self.join and self.report is not None:
            raise UsageError(
                "--report needs the journal, which is on the host that serves the line: "
                "give --report there"
            )
        encrypted = self.access.tls is not None or self.insecure
        if self.join and not is_loopback(self.join.rpartition(":")[0]) and not encrypted:
            raise in_the_clear(f"the line at {self.join} is on another host")
        if self.service is not None and self.service.expect_workers < self.workers:
            raise UsageError(
                f"--expect {self.service.expect_workers} is below --workers {self.workers}: "
                "the line would have no place for the others"
            )


Config = RunConfig | ServeConfig | ReducerConfig | Question


def read_config(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """The configuration of this process.

    Raises:
        UsageError: a value can't be read, or two contradict each other.
        SystemExit: argparse showed help or refused a flag.
    """
    return config_of(read_settings(argv, environment))


def config_of(settings: Settings) -> Config:
    """The configuration of the verb that was given.

    Raises:
        UsageError: a value can't be read, or two contradict each other.
    """
    if settings.verb in QUESTIONS:
        return QUESTIONS[settings.verb](settings)
    if settings.verb != "serve":
        return _run_config(settings)
    roles: tuple[Role | Literal["reducer"], ...] = ("all", "coordinator", "reducer")
    role = settings.choice("role", roles)
    return reducer_config(settings) if role == "reducer" else _serve_config(settings, role)


def _serve_config(settings: Settings, role: Role) -> ServeConfig:
    settings.refuse_flags(
        ("coordinator", "advertise"), "belongs to a reducer: add --role reducer, or leave it out"
    )
    run_id = settings.text("run_id") or free_run_id()
    return ServeConfig(
        run_id=run_id,
        run_dir=Path(settings.text("run_dir") or RUNS / run_id),
        bind=settings.text("bind") or "127.0.0.1",
        port=settings.port("port", 7070),
        metrics_port=settings.port("metrics_port", 9400),
        insecure=settings.switch("insecure"),
        access=access_of(settings),
        expect_workers=settings.whole("workers", 1, least=1, most=MAX_WORKERS),
        min_workers=settings.whole("min_workers", 1, least=1, most=MAX_WORKERS),
        max_workers=settings.optional_whole("max_workers", least=1, most=MAX_WORKERS),
        role=role,
        expect_reducers=settings.whole("reducers", 1, least=1, most=MAX_REDUCERS),
        secret_file=settings.path("secret_file"),
        max_steps=settings.optional_whole("max_steps", least=1),
        encoding=settings.choice("encoding", ("float32", "bfloat16", "float16")),
        journal_sync=settings.choice("journal_sync", ("normal", "full")),
        digest_every=settings.whole("digest_every", Policy().digest_every),
        liveness_s=settings.seconds("liveness", Liveness().lease_s, least=0.1),
        forming_timeout_s=settings.optional_seconds("forming_timeout"),
        straggler_timeout_s=settings.optional_seconds("straggler_timeout"),
        topology=_topology(settings),
        loss_spike=settings.factor("loss_spike"),
        grad_norm_spike=settings.factor("grad_norm_spike"),
        resume_from=_key_of(settings.only_flags().text("resume_from")),
        until_complete=settings.switch("until_complete"),
        announce=settings.switch("announce"),
        shared_dir=shared_dir_of(settings.text("shared_dir")),
        parent_pid=settings.optional_whole("parent_pid", least=1),
        limits=limits_of(settings),
    )


def _run_config(settings: Settings) -> RunConfig:
    workers = settings.whole("workers", 1, least=1, most=MAX_WORKERS)
    join = settings.address("join")
    if join:
        settings.refuse_other_flags(
            _JOINERS,
            "belongs to the line, and --join joins one that is served elsewhere: give it there",
        )
    resumed = _resumption(settings)
    report = settings.text("report")
    return RunConfig(
        command=tuple(settings.command),
        module=settings.switch("module"),
        workers=workers,
        service=None if join else _service_of_run(settings, workers, resumed),
        join=join,
        on_halt=settings.choice("on_halt", ("wait", "raise")),
        seed=_seed(settings, resumed),
        report=Path(report) if report else None,
        checkpoint_every=settings.optional_whole("checkpoint_every", least=1),
        keep_checkpoints=settings.optional_whole("keep_checkpoints", least=1),
        resume=resumed.checkpoint if resumed else None,
        restarts=settings.whole("restarts", 3),
        insecure=settings.switch("insecure"),
        access=access_of(settings),
    )


def _topology(settings: Settings) -> Topology:
    return Topology[settings.choice("topology", ("star", "ring")).upper()]


def _resumption(settings: Settings) -> Resumption | None:
    """What `--resume` goes on from. Its variable, ANDON_RESUME, is the workers' own."""
    given = settings.only_flags()
    run, step = given.text("resume"), given.optional_whole("resume_step", least=1)
    if run:
        names = ("run_id", "run_dir")
        settings.refuse_flags(names, "is the resumed run's own: leave it out")
        return find_resumption(run, step)
    if step is not None:
        raise UsageError("--resume-step chooses a checkpoint of --resume RUN: give that too")
    return None


def _seed(settings: Settings, resumed: Resumption | None) -> int | None:
    seed = settings.optional_whole("seed", most=2**64 - 1)
    return resumed.facts.plan.seed if seed is None and resumed else seed


def _service_of_run(settings: Settings, workers: int, resumed: Resumption | None) -> ServeConfig:
    run_id = resumed.run_id if resumed else settings.text("run_id") or free_run_id()
    run_dir = resumed.run_dir if resumed else Path(settings.text("run_dir") or RUNS / run_id)
    if not resumed and (run_dir / JOURNAL).exists():
        raise UsageError(
            f"{run_dir} holds a run already: go on with it by --resume {run_dir}, choose another "
            "--run-id or --run-dir, or remove it"
        )
    bind = settings.text("bind") or "127.0.0.1"
    return ServeConfig(
        run_id=run_id,
        run_dir=run_dir,
        bind=bind,
        port=settings.port("port", 0 if is_loopback(bind) else 7070),
        metrics_port=settings.port("metrics_port", 0),
        insecure=settings.switch("insecure"),
        access=access_of(settings),
        expect_workers=settings.whole("expect", workers, least=1, most=MAX_WORKERS),
        min_workers=settings.whole("min_workers", 1, least=1, most=MAX_WORKERS),
        max_workers=settings.optional_whole("max_workers", least=1, most=MAX_WORKERS),
        expect_reducers=settings.whole("reducers", 1, least=1, most=MAX_REDUCERS),
        secret_file=settings.path("secret_file"),
        max_steps=settings.optional_whole("steps", least=1),
        encoding=settings.choice("encoding", ("float32", "bfloat16", "float16")),
        journal_sync=settings.choice("journal_sync", ("normal", "full")),
        digest_every=settings.whole("digest_every", Policy().digest_every),
        liveness_s=settings.seconds("liveness", Liveness().lease_s, least=0.1),
        forming_timeout_s=settings.optional_seconds("forming_timeout"),
        straggler_timeout_s=settings.optional_seconds("straggler_timeout"),
        topology=_topology(settings),
        loss_spike=settings.factor("loss_spike"),
        grad_norm_spike=settings.factor("grad_norm_spike"),
        resume_from=resumed.facts.head if resumed else None,
        until_complete=True,
        announce=True,
        shared_dir=shared_dir_of(settings.text("shared_dir")),
        limits=limits_of(settings),
    )


def _key_text(key: Key) -> str:
    return f"{key.term}:{key.round}"


def _key_of(text: str) -> Key | None:
    if not text:
        return None
    term, _, number = text.partition(":")
    try:
        return Key(int(term), int(number))
    except ValueError as error:
        raise UsageError(
            f"--resume-from must be TERM:ROUND, the head in a checkpoint's state.json, not {text!r}"
        ) from error
