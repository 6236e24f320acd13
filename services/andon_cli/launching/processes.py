"""Processes of a run: starts them, passes their output on, and leaves none behind.

Every process leads a process group of its own, so that Ctrl-C at the terminal reaches only the
launcher, which then ends the others in order. Each is also tethered to the launcher: if that is
killed, the kernel ends them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from andon.host.errors import ExitCode
from andon.host.shared_dir import DEFAULT_SHARED_DIR
from andon.host.tether import tether_command
from andon.protocol.arithmetic import ENVIRONMENT, ArithmeticRule
from andon_cli.config import RunConfig
from andon_cli.launching.output import OutputLog, pass_on
from andon_cli.settings import as_flags
from andon_server.settings import ServeConfig, ServiceSettings

__all__ = [
    "Child",
    "ChildProcess",
    "ServiceStart",
    "Standby",
    "ended_how",
    "exit_code_of",
    "free_port",
    "line_slot",
    "of_no_launch",
    "service_call",
    "start_service",
    "start_worker",
    "stream_of",
    "worker_environment",
]

# What an outer launch may have set: it must not reach the workers of this one.
_GIVEN = ("ANDON_ADDRESS", "ANDON_RUN_ID", "ANDON_RUN_DIR", "ANDON_ON_HALT", "ANDON_SEED",
          "ANDON_RESUME", "ANDON_AUDIT", "ANDON_OPERATOR_TOKEN_FILE", "ANDON_SPARE")  # fmt: skip
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
             "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip
_OF_A_LINE = ("ANDON_TOKEN", "ANDON_TOKEN_FILE", "ANDON_TLS_DIR", "ANDON_TRACE", "ANDON_LOG_TO",
              "ANDON_STEPS")  # fmt: skip


_READ_ON_S = 1.0
"""How long a process's output is read after its end, until whoever still holds it open is killed;
and then once more."""


class ChildProcess(Protocol):
    """What a child needs of its process: one of asyncio, or a forked one."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative: a signal's; None while it runs."""

    async def wait(self) -> int:
        """Its exit code, once it has ended."""

    def send_signal(self, number: int) -> None:
        """Sends a signal to it. Raises ProcessLookupError if it has ended."""


class Child:
    """A process of the run. Its output goes to `show` line by line, and to a log as it is."""

    def __init__(
        self,
        name: str,
        process: ChildProcess,
        output: asyncio.StreamReader,
        show: Callable[[str], None],
        log: OutputLog | None = None,
        *,
        pipe: asyncio.BaseTransport | None = None,
    ) -> None:
        """Starts to read `output`, a stream of the process.

        Args:
            name: for people.
            process: it.
            output: what it writes.
            show: takes each line of it.
            log: takes all of it as it is.
            pipe: where `output` comes from, if others than the process may hold it open.
        """
        self.name = name
        self.process = process
        self.log = log
        self._pipe = pipe
        self._output = asyncio.create_task(pass_on(output, show, log), name=f"output of {name}")

    async def wait(self) -> int:
        """Its exit code, once it has ended and its output is passed on; negative: a signal's."""
        code = await self.process.wait()
        # A grandchild may hold the pipe open after the process is gone. Kill the group, or reading
        # would never end.
        done, _ = await asyncio.wait({self._output}, timeout=_READ_ON_S)
        if not done:
            self._signal_group(signal.SIGKILL)
            done, _ = await asyncio.wait({self._output}, timeout=_READ_ON_S)
        # One in a session of its own, such as a board that the script started, is in no group of
        # ours. It is meant to live on, but nobody waits for it.
        if not done and self._pipe is not None:
            self._pipe.close()
        # Several tasks may wait here, and one that is cancelled must not cancel the reading.
        await asyncio.shield(self._output)
        return code

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.returncode is not None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process if it is still running."""
        if not self.ended:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def end(self, *, grace_s: float) -> None:
        """Sends SIGTERM, kills after the grace, and kills what is left in the process group."""
        # The process first, and alone: a worker wants to leave the line before its loaders vanish.
        self.send(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        self._signal_group(signal.SIGKILL)
        await self.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


async def start_worker(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: OutputLog,
    show: Callable[[str], None],
) -> Child:
    """Starts a worker. Both stdout and stderr go to `show`, and are appended to `log`."""
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *tether_command(list(command), signal.SIGKILL),
            stdin=DEVNULL,
            stdout=writing,
            stderr=STDOUT,
            env=dict(environment),
            process_group=0,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    output, pipe = await stream_of(reading)
    return Child(name, process, output, show, log, pipe=pipe)


async def stream_of(reading: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """A stream of what comes out of a pipe, which it closes at the end, and its transport."""
    output = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb")
    )
    return output, pipe


ServiceStart = Callable[
    [ServeConfig, Callable[[str], None]], Awaitable[tuple[Child, asyncio.StreamReader]]
]
"""What `start_service` is."""


async def start_service(
    config: ServeConfig, show: Callable[[str], None]
) -> tuple[Child, asyncio.StreamReader]:
    """Starts `andon serve`. Its stderr goes to `show`; its stdout, returned, announces it."""
    process = await _start_service("andon_cli", config, stdin=DEVNULL)
    return _service_of(process, show)


class Standby:
    """A service that has loaded everything, and serves at the moment when it is told to."""

    def __init__(self, process: Process, show: Callable[[str], None]) -> None:
        """Takes over a process of `andon_cli.launching.standby`."""
        self._process = process
        self._child, self._announced = _service_of(process, show)

    @classmethod
    async def start(cls, config: ServeConfig, show: Callable[[str], None]) -> Standby:
        """Starts one, which will serve as `start_service` with the same arguments would."""
        module = "andon_cli.launching.standby"
        return cls(await _start_service(module, config, stdin=PIPE), show)

    def serve(self) -> tuple[Child, asyncio.StreamReader] | None:
        """Has it serve, and returns what `start_service` returns; None: it has ended itself."""
        if self._child.ended or self._process.stdin is None:
            return None
        self._process.stdin.write(b"\n")
        return self._child, self._announced

    async def end(self, *, grace_s: float) -> None:
        """Ends it, if it does not serve."""
        await self._child.end(grace_s=grace_s)


def service_call(config: ServeConfig) -> tuple[list[str], dict[str, str]]:
    """What a service of this process is called with: the words after `andon`, its environment."""
    # The flags are everything the service needs to know. It must not read the settings file or the
    # variables again: `workers` there is the number to start here, not the number to wait for.
    config = replace(config, config=Path(os.devnull), announce=True, parent_pid=os.getpid())
    environment = {name: text for name, text in os.environ.items() if not name.startswith("ANDON_")}
    if config.access.token:
        environment["ANDON_TOKEN"] = config.access.token
    return ["serve", *as_flags(config)], environment


async def _start_service(module: str, config: ServeConfig, *, stdin: int) -> Process:
    words, environment = service_call(config)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *words),
        stdin=stdin,
        stdout=PIPE,
        stderr=PIPE,
        env=environment,
        process_group=0,
    )


def _service_of(
    process: Process, show: Callable[[str], None]
) -> tuple[Child, asyncio.StreamReader]:
    assert process.stdout is not None
    assert process.stderr is not None
    return Child("service", process, process.stderr, show), process.stdout


def worker_environment(
    config: RunConfig,
    slot: int,
    *,
    base: Mapping[str, str],
    line: Mapping[str, str],
    master_port: int,
    spare: bool = False,
) -> dict[str, str]:
    """The environment of the worker in `slot`.

    Args:
        config: what is run.
        slot: counts the workers of this launch, from 0, and then its spares.
        base: what the worker inherits. What an outer launch set there is replaced.
        line: ANDON_ADDRESS, ANDON_RUN_ID and ANDON_RUN_DIR.
        master_port: a free port, for scripts that use torch.distributed beside the line.
        spare: whether it is a spare.
    """
    settings = config.settings
    # A worker can set them itself, unless its script computes something first.
    same_bits = settings.line.same_bits or settings.line.verify
    kept = dict(ENVIRONMENT) if same_bits else {}
    kept |= {name: value for name, value in base.items() if name not in (*_GIVEN, *_TORCHRUN)}
    variables = {
        **kept,
        **line,
        "ANDON_ON_HALT": settings.on_halt,
        "ANDON_LOG_FORMAT": settings.log_format,
        "LOCAL_RANK": str(slot),
        "LOCAL_WORLD_SIZE": str(settings.workers + settings.spares),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": line["ANDON_RUN_ID"],
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS") or "1",
        "PYTHONUNBUFFERED": base.get("PYTHONUNBUFFERED") or "1",
    }
    if settings.trace is not None:
        variables["ANDON_TRACE"] = str(settings.trace.absolute())
    if config.service is not None:
        # A line that is served elsewhere hands out its slots itself.
        variables["RANK"] = str(line_slot(config, slot))
        variables["WORLD_SIZE"] = str(config.service.workers)
    if settings.preemption_notice:
        variables["ANDON_PREEMPTION_NOTICE"] = settings.preemption_notice
    if config.seed is not None:
        variables["ANDON_SEED"] = str(config.seed)
    if settings.shared_dir != DEFAULT_SHARED_DIR or "ANDON_SHARED_DIR" in base:
        folder = settings.shared_dir
        variables["ANDON_SHARED_DIR"] = "off" if folder is None else str(folder.absolute())
    if settings.access.insecure:
        variables["ANDON_INSECURE"] = "1"
    return {
        **variables,
        **({"ANDON_SPARE": "1"} if spare else {}),
        **_variables_of_the_run(config),
        **_metrics_variables(settings),
        **settings.access.environment(),
    }


def of_no_launch(base: Mapping[str, str]) -> dict[str, str]:
    """An environment without what belongs to a launch, or to a line."""
    taken = (*_GIVEN, *_TORCHRUN, *_OF_A_LINE)
    return {name: value for name, value in base.items() if name not in taken}


def line_slot(config: RunConfig, slot: int) -> int:
    """The slot on the line that the process in a launch's `slot` asks for.

    Spares have theirs beyond those of all workers, of which some may come from other hosts.
    """
    settings, service = config.settings, config.service
    if service is None or slot < settings.workers:
        return slot
    return service.workers + slot - settings.workers


def _variables_of_the_run(config: RunConfig) -> dict[str, str]:
    """Where the run ends, how often it writes checkpoints, and from which one it goes on."""
    settings, given = config.settings, {}
    if settings.line.max_steps is not None:
        # For the script: a scheduler may need to know where the run ends.
        given["ANDON_STEPS"] = str(settings.line.max_steps)
    if settings.checkpoint_every is not None:
        given["ANDON_CHECKPOINT_EVERY"] = str(settings.checkpoint_every)
    if settings.line.same_bits or settings.line.verify:
        given["ANDON_SAME_BITS"] = "1"
    if settings.line.arithmetic is not ArithmeticRule.REQUIRE:
        given["ANDON_ARITHMETIC"] = settings.line.arithmetic.value
    if settings.keep_checkpoints is not None:
        given["ANDON_KEEP_CHECKPOINTS"] = str(settings.keep_checkpoints)
    if config.checkpoint is not None and config.checkpoint.exists():
        # Newer checkpoints push old ones out. Once this one is gone, the line is ahead of it, and a
        # worker that starts again gets its state from the others.
        given["ANDON_RESUME"] = str(config.checkpoint)
    return given


def _metrics_variables(settings: ServiceSettings) -> dict[str, str]:
    """Who may read a worker's metrics: those who may read the service's."""
    given = {"ANDON_METRICS_HOSTS": settings.metrics_hosts}
    if settings.metrics_token_file is not None:
        given["ANDON_METRICS_TOKEN_FILE"] = str(settings.metrics_token_file.absolute())
    return {name: value for name, value in given.items() if value}


def exit_code_of(code: int) -> ExitCode:
    """The run's exit code after a worker ended with `code`."""
    if code in (ExitCode.HALTED, ExitCode.REFUSED, ExitCode.LOST, ExitCode.COMPLETE):
        return ExitCode(code)
    return ExitCode.FAILED


def ended_how(code: int) -> str:
    """How a process ended, for people: `ended with exit code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
