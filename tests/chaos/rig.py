"""A line of real processes that a test may kill, stop and restart. Every wait has a limit."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from chaos.barrier import order_stop
from chaos.model import Task
from chaos.schedules import EVERY_STEP, LineSchedule
from integration.harness import Service, clean_environment
from integration.nursery import Process, nursery, start_anew

__all__ = [
    "FLAGS",
    "PATHS",
    "PATIENCE_S",
    "ChaosLine",
    "Program",
    "WorkerSlot",
    "await_until",
    "chaos_line",
    "events_of",
    "free_port",
]

WORKER, MUTANT = (Path(__file__).with_name(name) for name in ("worker.py", "mutants.py"))
FLAGS = ("--min-workers", "1", "--liveness", "1", "--digest-every", "1")
"""Flags: survivors continue alone, leases are short, and digests are compared in every step."""
PATIENCE_S = 40.0
PATHS: dict[str, dict[str, str]] = {
    "shared-memory": {},
    "tcp": {"ANDON_SHARED_DIR": "off"},
    "wire": {"ANDON_SHARED_DIR": "off", "ANDON_TCP": "off"},
}
"""What a worker is told so that its chunks take a path; on one host memory is shared by itself."""
SLOWNESS = 3.0
"""How many times longer the slow worker of a line takes."""
_POLL_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A worker's script. It gets a file with its slot and folder, and logs as worker.py does."""

    script: Path
    imports: Literal["trainer", "service"] = "service"
    """The nursery of its processes: the one that has imported PyTorch, or not."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """What else its file says."""


PLAIN = Program(script=WORKER)


def await_until(
    what: str,
    reached: Callable[[], Any],
    *,
    patience_s: float = PATIENCE_S,
    poll_s: float = _POLL_S,
) -> Any:
    """Waits until `reached` returns something true, and returns that.

    Raises:
        AssertionError: it was not true within `patience_s`; the message names `what`.
    """
    give_up_at = time.monotonic() + patience_s
    while not (found := reached()):
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {patience_s:g} s in vain for {what}")
        time.sleep(poll_s)
    return found


def events_of(log: Path) -> list[dict[str, Any]]:
    """The events that a worker logged, over all its processes, in order."""
    if not log.exists():
        return []
    lines = log.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@dataclass
class WorkerSlot:
    """One slot: the worker's folder, and its current process."""

    slot: int
    folder: Path
    process: Process | None = None
    killed: bool = False
    """Whether a test killed the current process."""
    _read: int = 0
    _step: int = 0
    _on_roster: bool = False

    @property
    def log(self) -> Path:
        """The worker's log file."""
        return self.folder / "log.jsonl"

    @property
    def lives(self) -> bool:
        """Whether it has a running process."""
        return self.process is not None and self.process.poll() is None

    @property
    def step(self) -> int:
        """The last step whose weights it logged."""
        self._read_log()
        return self._step

    @property
    def on_roster(self) -> bool:
        """Whether the last step that it logged was its own, and no state or step of the others."""
        self._read_log()
        return self._on_roster

    def _read_log(self) -> None:
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    event = json.loads(line)
                    if event["event"] in ("applied", "installed"):
                        self._step = event["step"]
                        self._on_roster = not event.get("attends", True)

    def stop_at(self, point: str, step: int = 0) -> None:
        """Makes it stop at a point, in step `step` or the first one after it."""
        order_stop(self.folder, point, step)

    def await_point(self, point: str) -> int:
        """Waits until it stops at `point`; returns the step."""
        reached = self.folder / f"reached-{point}"
        await_until(f"worker {self.slot} to reach {point}", reached.exists)
        step: int = json.loads(reached.read_text())["step"]
        return step

    def go(self) -> None:
        """Lets it continue from its barrier."""
        (self.folder / "go").touch()

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal; after SIGKILL, waits for its end."""
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.killed = True
            self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        self.signal(signal.SIGKILL)


@dataclass
class ChaosLine:
    """One service and its workers."""

    folder: Path
    service: Service
    task: Task
    flags: Sequence[str]
    expected: int
    schedule: LineSchedule = EVERY_STEP
    pace_s: float = 0.0
    """What a position takes a worker to compute."""
    slow: int | None = None
    """The slot that takes `SLOWNESS` times as long."""
    patience_s: float = PATIENCE_S
    """The limit of each wait."""
    measured: bool = False
    """Whether the caller measures times: then no nursery starts the processes, and workers log no
    digests of their weights, which cost more than a step if the model is large."""
    paths: Sequence[str] = ("shared-memory",)
    """The path of each slot's chunks; the last one holds for the slots behind it."""
    certs: Path | None = None
    """The certificates of a line over TLS."""
    learns: bool = True
    """Whether workers can learn the state while the line trains; else they need a transfer."""
    numbers: int = 0
    """After how many steps workers average a number; 0: never."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of the workers' environment."""
    program: Program = PLAIN
    workers: dict[int, WorkerSlot] = field(default_factory=dict)

    @property
    def journal(self) -> Path:
        """The journal's file; it is the same after a restart."""
        return self.service.journal

    def slow_down(self, slot: int | None) -> None:
        """Makes this slot's worker the slow one, and the one before it as fast as the others."""
        self.slow = slot
        for worker in self.workers.values():
            self._set_pace(worker)

    def _set_pace(self, worker: WorkerSlot) -> None:
        pace_s = self.pace_s * (SLOWNESS if worker.slot == self.slow else 1.0)
        new = worker.folder / ".pace"
        new.write_text(str(pace_s))
        new.rename(worker.folder / "pace")

    def start_worker(
        self, slot: int, *prefix: str, address: str = "", mutant: str = ""
    ) -> WorkerSlot:
        """Starts a slot's process, for the first time or again; `prefix` precedes its command."""
        worker = self.workers.get(slot) or WorkerSlot(slot, self.folder / f"worker-{slot}")
        self.workers[slot] = worker
        worker.folder.mkdir(exist_ok=True)
        self._set_pace(worker)
        (worker.folder / "go").unlink(missing_ok=True)
        worker.killed = False
        spec = worker.folder / "spec.json"
        task = {
            name: value for name, value in asdict(self.task).items() if not name.startswith("_")
        }
        spec.write_text(
            json.dumps(
                {
                    "slot": slot,
                    "folder": str(worker.folder),
                    "task": task,
                    "judged": not self.measured,
                    "learns": self.learns,
                    "numbers": self.numbers,
                    "finish": str(self.folder / "finish"),
                    **self.program.spec,
                }
            )
        )
        environment = clean_environment(
            ANDON_ADDRESS=address or self.service.address,
            **({"ANDON_TLS_DIR": str(self.certs)} if self.certs else {"ANDON_INSECURE": "1"}),
            ANDON_RUN_ID=self.service.run_id,
            ANDON_METRICS_BIND="off",
            RANK=str(slot),
            PYTHONPATH=":".join(path for path in sys.path if path),
            **PATHS[self.paths[min(slot, len(self.paths) - 1)]],
            **self.variables,
        )
        output = worker.folder / "output.txt"
        script = self.program.script
        arguments = [str(MUTANT), str(spec), mutant] if mutant else [str(script), str(spec)]
        if prefix:
            with output.open("ab") as file:
                worker.process = subprocess.Popen(
                    [*prefix, sys.executable, *arguments],
                    stdout=file,
                    stderr=file,
                    env=environment,
                )
        else:
            start = start_anew if self.measured else nursery(self.program.imports).start
            worker.process = start(arguments, environment, output, output)
        return worker

    def kill_coordinator(self) -> None:
        """Kills the service with SIGKILL."""
        self.service.process.kill()
        self.service.process.wait(PATIENCE_S)

    def restart_coordinator(self) -> None:
        """Starts a service on the same journal and port."""
        port = int(self.service.address.rpartition(":")[2])
        run_id = self.service.run_id
        self.service = Service(
            self.folder / "run",
            self.expected,
            *self.flags,
            "--run-id",
            run_id,
            port=port,
            anew=self.measured,
            certs=self.certs,
        )

    def await_step(self, step: int, *slots: int) -> None:
        """Waits until workers (by default, all running ones) hold the weights of a step."""
        waiting = [self.workers[slot] for slot in slots] or self.living

        def reached() -> bool:
            waiting[:] = [worker for worker in waiting if worker.step < step]
            return not waiting

        named = ", ".join(str(worker.slot) for worker in waiting)
        self._await(f"workers {named} to hold step {step}", reached)

    def await_arrival(self, *slots: int) -> None:
        """Waits until workers (by default, all running ones) take part in the line's steps.

        One that learns may hold the line's weights before it does.
        """
        waiting = [self.workers[slot] for slot in slots] or self.living

        def reached() -> bool:
            waiting[:] = [worker for worker in waiting if not worker.on_roster]
            return not waiting

        named = ", ".join(str(worker.slot) for worker in waiting)
        self._await(f"workers {named} to be on the roster", reached)

    @property
    def living(self) -> list[WorkerSlot]:
        """The workers with a running process."""
        return [worker for worker in self.workers.values() if worker.lives]

    def await_progress(self, *slots: int, steps: int = 2) -> int:
        """Waits until workers are `steps` past the furthest one now (F-DP-006)."""
        goal = max(worker.step for worker in self.workers.values()) + steps
        self.await_step(goal, *slots)
        return goal

    def moved_over(self, path: str) -> float:
        """The bytes that the service's reducer has moved over a path since it started."""
        return self.service.metric("andon_exchange_bytes_total", path=path)

    def await_status(self, what: str, reached: Callable[[pb.LineStatus], bool]) -> pb.LineStatus:
        """Polls the status until it is as wanted, and returns it."""
        found: list[pb.LineStatus] = []

        def look() -> bool:
            found[:] = [self.service.status()]
            return reached(found[0])

        await_until(what, look, poll_s=0.02)
        return found[0]

    def await_roster(self, workers: int) -> None:
        """Waits until `workers` workers are live."""
        self.await_status(f"{workers} live workers", lambda status: status.live == workers)

    def finish(self) -> int:
        """Requests the end of the run, and waits for it; returns the last step."""
        (self.folder / "finish").touch()
        return self.await_end()

    def await_end(self) -> int:
        """Waits until every running worker has left a complete run; returns the last step."""
        ended = [worker for worker in self.workers.values() if worker.killed is False]
        self._await("the workers to end", lambda: not self.living)
        for worker in ended:
            assert worker.process is not None
            assert worker.process.returncode == 0, self.described()
        return max(worker.step for worker in ended)

    def _await(self, what: str, reached: Callable[[], Any]) -> None:
        try:
            await_until(what, reached, patience_s=self.patience_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.described()}") from None

    @property
    def departures(self) -> set[str]:
        """Why workers left, each reason once."""
        with JournalReader(self.journal) as journal:
            return {gone.reason for gone in journal.departures()}

    def installs(self, slot: int) -> int:
        """How often a worker was brought in sync, by a bootstrap or by a transfer."""
        return [event["event"] for event in events_of(self.workers[slot].log)].count("installed")

    def made_up(self, slot: int) -> list[int]:
        """The steps that a worker applied without having been on their rosters."""
        events = events_of(self.workers[slot].log)
        return [each["step"] for each in events if each["event"] == "applied" and each["attends"]]

    def averaged(self, slot: int) -> list[int]:
        """The steps after which a worker had an average of all workers' numbers."""
        events = events_of(self.workers[slot].log)
        return [each["step"] for each in events if each["event"] == "averaged"]

    def said(self, slot: int, text: str) -> list[str]:
        """What a worker's log says that has this text in it."""
        told = [each for each in events_of(self.workers[slot].log) if each["event"] == "said"]
        return [each["message"] for each in told if text in each["message"]]

    def described(self) -> str:
        """The state of all processes, to diagnose a hang."""
        lines = []
        for worker in self.workers.values():
            code = worker.process.poll() if worker.process is not None else None
            events = events_of(worker.log)
            output = (worker.folder / "output.txt").read_text()[-1500:]
            lines.append(
                f"worker {worker.slot}: exit {code}, step {worker.step}, {events[-3:]}\n{output}"
            )
        log = self.folder / "run" / "service.log"
        lines.append(f"service: exit {self.service.process.poll()}")
        lines.append(log.read_text()[-3000:] if log.exists() else "no service log")
        return "\n".join(lines)

    def close(self) -> None:
        """Kills all processes that still run."""
        for worker in self.workers.values():
            if worker.process is not None and worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait(PATIENCE_S)
        if self.service.process.poll() is None:
            self.service.process.send_signal(signal.SIGCONT)
        self.service.stop()


@contextmanager
def chaos_line(
    folder: Path,
    workers: int = 3,
    *more: str,
    task: Task | None = None,
    schedule: LineSchedule = EVERY_STEP,
    pace_s: float = 0.0,
    stops: dict[int, tuple[str, int]] | None = None,
    absent: int | None = None,
    patience_s: float = PATIENCE_S,
    measured: bool = False,
    paths: Sequence[str] = ("shared-memory",),
    certs: Path | None = None,
    learns: bool = True,
    numbers: int = 0,
    variables: Mapping[str, str] | None = None,
    program: Program = PLAIN,
) -> Iterator[ChaosLine]:
    """A line with its workers started, except for slot `absent`.

    `stops` orders barriers before any process starts. `more` are flags of the service, after FLAGS.
    """
    flags = (*FLAGS, *schedule.flags, *more)
    variables = variables or {}
    service = Service(
        folder / "run",
        workers,
        *flags,
        port=free_port(),
        shared_dir=variables.get("ANDON_SHARED_DIR", ""),
        anew=measured,
        certs=certs,
    )
    line = ChaosLine(
        folder,
        service,
        task or Task(),
        flags,
        workers,
        schedule=schedule,
        pace_s=pace_s,
        patience_s=patience_s,
        measured=measured,
        paths=paths,
        certs=certs,
        learns=learns,
        numbers=numbers,
        variables=variables,
        program=program,
    )
    try:
        for slot in range(workers):
            (folder / f"worker-{slot}").mkdir(exist_ok=True)
            if stops and slot in stops:
                order_stop(folder / f"worker-{slot}", *stops[slot])
            if slot != absent:
                line.start_worker(slot)
        yield line
    finally:
        line.close()


def free_port() -> int:
    """A port on which nothing listens, below the range of ephemeral ports.

    A client that retries a connection to an ephemeral port could get that same port as its own.
    """
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
