"""Configuration of `andon run` and `andon serve`: their settings, and what follows from them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from andon.host.access import in_the_clear
from andon.host.errors import UsageError
from andon.host.settings import (
    EVERYDAY,
    FLAG_ONLY,
    Address,
    Count,
    File,
    GivenSettings,
    NoticePlace,
    Whole,
    Workers,
    check,
    whole,
)
from andon.host.tls import is_loopback
from andon.protocol.limits import MAX_WORKERS
from andon.protocol.run_settings import Topology
from andon_cli.drawing.worker_output import OutputMode
from andon_server.resuming import Resumption, find_resumption
from andon_server.runs import JOURNAL, free_run_id
from andon_server.settings import ServeConfig, ServiceSettings, shared_fields

__all__ = ["LASTING", "RunConfig", "RunSettings", "run_config", "serve_config"]


LASTING = (
    "line",
    "expect",
    "spares",
    "checkpoint_every",
    "keep_checkpoints",
    "on_halt",
    "restarts",
)
"""The settings of a run, beside `workers`, that it needs again to go on as it was. A checkpoint has
its seed."""


@Parameter(name="*", group=Group("The service", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(ServiceSettings):
    """Settings of `andon run`: those of the service that it starts, and its own."""

    workers: Annotated[int, whole(0, MAX_WORKERS), Parameter(group=EVERYDAY)] = 1
    """Start N workers here. 0 only beside `--join` and `--spares`."""
    spares: Annotated[int, whole(0, MAX_WORKERS), Parameter(group=EVERYDAY)] = 0
    """Start N more here that follow the others, compute nothing, and take a lost worker's place."""
    seed: Annotated[int | None, whole(0, 2**64 - 1), Parameter(group=EVERYDAY)] = None
    """Seed of the samples' order. Default: the script decides, else 0."""
    checkpoint_every: Annotated[Count | None, Parameter(group=EVERYDAY)] = None
    """One worker writes a checkpoint every N steps. Default: the script decides."""
    keep_checkpoints: Count | None = None
    """Keep the newest N checkpoints. Default: the script decides, else 3."""
    resume: Annotated[str, FLAG_ONLY, Parameter(metavar="RUN", group=EVERYDAY)] = ""
    """Go on with this run (an id under runs/, or a folder) from its newest checkpoint."""
    resume_step: Annotated[Count | None, FLAG_ONLY] = None
    """With `--resume`: go on from the checkpoint of step N."""
    on_halt: Annotated[Literal["wait", "raise"], Parameter(group=EVERYDAY)] = "wait"
    """What workers do at a halt: wait for an answer, or raise LineHalted (exit code 3)."""
    restarts: Annotated[Whole, Parameter(group=EVERYDAY)] = 3
    """Start workers that were killed or failed again, N times within any hour."""
    preemption_notice: NoticePlace = ""
    """Workers leave in order once this file is there, or this http or https URL answers 200 with a
    text: their machine is about to go. Default: nothing is watched."""
    output: Annotated[OutputMode | None, Parameter(group=EVERYDAY)] = None
    """Show all output of the workers, the last line of each with warnings and tracebacks, or only
    that of failures. Default: `last` on a terminal, else `all`."""
    report: Annotated[File | None, Parameter(group=EVERYDAY)] = None
    """Write a summary of the run to FILE, as JSON."""
    trace: Annotated[File | None, Parameter(group=EVERYDAY)] = None
    """Record what the workers here do to FILE, for Perfetto and `andon trace`."""
    join: Annotated[Address, Parameter(group=EVERYDAY)] = ""
    """Join the line that is served there, and serve none here."""
    expect: Annotated[Workers | None, Parameter(group=EVERYDAY)] = None
    """Workers that the line waits for, if more join from other hosts. Default: `--workers`."""
    module: Annotated[bool, Parameter(name="-m", group=EVERYDAY)] = False
    """The script is the name of a module, as for `python -m`."""

    def __post_init__(self) -> None:
        """Refuses values beyond their limits, and those that contradict each other."""
        check(self)
        if self.resume_step is not None and not self.resume:
            raise UsageError("--resume-step chooses a checkpoint of --resume RUN: give that too")
        if self.join and not is_loopback(self.join.rpartition(":")[0]) and not self.encrypted:
            raise in_the_clear(f"the line at {self.join} is on another host")
        self._check_spares()
        if self.expect is not None and self.expect < self.workers:
            raise UsageError(
                f"--expect {self.expect} is below --workers {self.workers}: the line would have no "
                "place for the others"
            )

    def _check_spares(self) -> None:
        """Refuses spares that the line would refuse, and a run of nobody."""
        if not self.workers and not (self.join and self.spares):
            raise UsageError(
                "--workers 0 starts nobody who trains: it is for --join ADDRESS --spares 1"
            )
        if not self.spares or self.join:
            return
        if self.line.topology is Topology.RING or self.line.is_local:
            ring = self.line.topology is Topology.RING
            what = "--topology ring" if ring else f"--schedule {self.line.schedule}"
            raise UsageError(
                f"--spares {self.spares}: a spare can't follow a line with {what}: leave one out"
            )
        expected = self.workers if self.expect is None else self.expect
        most = self.line.max_workers
        if most is not None and most < expected + self.spares:
            raise UsageError(
                f"--max-workers {most} leaves no room for --spares {self.spares} beside {expected} "
                "workers"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What `andon run` runs."""

    settings: RunSettings
    """What was asked for."""
    command: tuple[str, ...]
    """The script (or module) and its own arguments."""
    service: ServeConfig | None
    """The service to start; None: the workers join a line that is served elsewhere."""
    checkpoint: Path | None = None
    """The folder of the checkpoint to go on from; None: a new run."""
    seed: int | None = None
    """The seed of the samples' order, or that of the resumed run; None: the script decides."""
    unused: tuple[str, ...] = ()
    """Variables and keys of the file that do nothing in a run that joins a line."""

    def __post_init__(self) -> None:
        """Refuses a run without a script."""
        if not self.command:
            raise UsageError("no script to run: andon run --workers 2 train.py")
        if bool(self.settings.join) == (self.service is not None):
            raise UsageError("a run either joins a line or serves one")


_OBEYED_BY_JOINERS = frozenset({"access", "config", "log_format", "shared_dir"})
"""What a run that joins a line needs of the settings that all services have."""
_REFUSED_BY_JOINERS = frozenset({"expect", "report", "resume", "resume_step"})
"""What it does not need of its own."""
_REFUSED_BY_REDUCERS = frozenset({"line", "workers", "run_dir", "resume_from", "withdrawn_file"})
_LIVENESS = ("line", "liveness_s")
"""Of the line's settings, a reducer keeps this one too."""
_TOKENS = frozenset(
    ("access", name) for name in ("token_file", "operator_token_file", "viewer_token_file")
)


def run_config(given: GivenSettings[RunSettings], command: Sequence[str]) -> RunConfig:
    """What `andon run` is to do.

    Raises:
        UsageError: flags contradict each other, or nothing would obey one.
        ResumeRefused: there is no checkpoint to go on from.
    """
    settings = given.settings
    # Refuse first: with --join, a flag of the service would otherwise do nothing, silently.
    if settings.join:
        return RunConfig(
            settings=settings,
            command=tuple(command),
            service=None,
            seed=settings.seed,
            unused=_refuse_flags_of_the_line(given),
        )
    resumed = _resumption(given)
    seed = resumed.facts.plan.seed if settings.seed is None and resumed else settings.seed
    return RunConfig(
        settings=settings,
        command=tuple(command),
        service=replace(_service(settings, resumed), script=Path(*command[:1]).name),
        checkpoint=resumed.checkpoint if resumed else None,
        seed=seed,
    )


def serve_config(given: GivenSettings[ServeConfig], _words: Sequence[str]) -> ServeConfig:
    """What `andon serve` is to serve.

    Raises:
        UsageError: nothing would obey a flag.
    """
    config = given.settings
    if config.role == "reducer":
        given.refuse_flags(
            lambda path: (path[0] in _REFUSED_BY_REDUCERS and path != _LIVENESS) or path in _TOKENS,
            "belongs to the line: give it to the coordinator",
        )
        return config
    given.refuse_flags(
        lambda path: path[0] == "coordinator",
        "belongs to a reducer: add --role reducer, or leave it out",
    )
    if config.role == "coordinator":
        given.refuse_flags(
            lambda path: path[:2] == ("limits", "reducer"),
            "belongs to a reducer, and --role coordinator serves none: leave it out",
        )
    return replace(config, run_id=config.run_id or free_run_id())


def _refuse_flags_of_the_line(given: GivenSettings[RunSettings]) -> tuple[str, ...]:
    """Refuses flags that only a line served here would obey. Returns other sources of such."""
    refused = (shared_fields(given.settings).keys() - _OBEYED_BY_JOINERS) | _REFUSED_BY_JOINERS
    if source := given.sources.get(("report",)):
        raise UsageError(
            f"{source} needs the journal, which is on the host that serves the line: give --report "
            "there"
        )
    given.refuse_flags(
        lambda path: path[0] in refused,
        "belongs to the line, and --join joins one that is served elsewhere: give it there",
    )
    # Variables and the file are shared with other commands: not wrong, but worth a word.
    return tuple(source for path, source in given.sources.items() if path[0] in refused)


def _resumption(given: GivenSettings[RunSettings]) -> Resumption | None:
    """What `--resume` goes on from."""
    if not given.settings.resume:
        return None
    given.refuse_flags(
        lambda path: path[0] in ("run_id", "run_dir"), "is the resumed run's own: leave it out"
    )
    return find_resumption(given.settings.resume, given.settings.resume_step)


def _service(settings: RunSettings, resumed: Resumption | None) -> ServeConfig:
    """The service of a run. It gets every setting that services have, whichever there are."""
    port = 0 if settings.port is None and is_loopback(settings.bind) else settings.port
    expected = settings.workers if settings.expect is None else settings.expect
    line = settings.line
    if settings.spares and line.max_workers is None:
        line = replace(line, max_workers=expected + settings.spares)
    # By name, not one by one: a new setting of services is handed on without a change here.
    service = ServeConfig(
        **{  # type: ignore[arg-type]  # each has the type of the same field there
            **shared_fields(settings),
            "run_id": resumed.run_id if resumed else settings.run_id or free_run_id(),
            "run_dir": str(resumed.run_dir) if resumed else settings.run_dir,
            "port": port,
            "metrics_port": settings.metrics_port or 0,
            "line": line,
        },
        workers=expected,
        resume_from=resumed.facts.head if resumed else None,
        until_complete=True,
        announce=True,
    )
    # A new term in an old journal would go on with that run, which nobody asked for.
    if not resumed and (service.folder / JOURNAL).exists():
        raise UsageError(
            f"{service.folder} holds a run already: go on with it by --resume "
            f"{shlex.quote(str(service.folder))}, choose another --run-id or --run-dir, or remove "
            "it"
        )
    return service
