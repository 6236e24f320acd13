"""Real processes for tests: a service on a free port, and workers that join it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from andon.host.tls import open_channel
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.v1.halt_pb2 import HaltEvidence
from integration.nursery import Child, Process, first_line, nursery, start_anew

__all__ = [
    *("SCRIPTS", "Scrape", "Service", "Worker"),
    *("await_exit", "clean_environment", "fetch", "finish", "on_line"),
    *("start_host", "start_line", "start_line_with_host", "start_worker", "start_workers"),
    *("train", "train_alone", "wait_until"),
]

SCRIPTS = Path(__file__).parent / "scripts"

_PATIENCE_S = 90
_OUTPUTS = ("out", "err")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without the variables of a line or a launcher."""
    launchers = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ANDON_", "TORCHELASTIC_", "MKL_")) and name not in launchers
    }
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def wait_until(
    condition: Callable[[], object], what: str = "the condition", patience_s: float = _PATIENCE_S
) -> None:
    """Waits until a condition holds; another process or thread makes it true."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(0.005)


def fetch(url: str) -> str:
    """What a URL answers, as text."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@dataclass(frozen=True)
class Scrape:
    """The metrics of one endpoint."""

    text: str
    families: list[Metric]

    @classmethod
    def of(cls, url: str) -> Scrape:
        """Reads an endpoint."""
        text = fetch(url)
        return cls(text, list(text_string_to_metric_families(text)))

    def labels_of(self, name: str) -> list[dict[str, str]]:
        """The labels of each of a metric's series."""
        return [s.labels for f in self.families for s in f.samples if s.name == name]

    def value(self, name: str, **labels: str) -> float:
        """The value of the series that has these labels and no others."""
        (value,) = self._values(name, lambda of: of == labels)
        return value

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        return sum(self._values(name, lambda of: labels.items() <= of.items()))

    def shown(self, name: str, label: str) -> dict[str, float]:
        """A metric's nonzero values, by a label."""
        found = {each[label]: self.value(name, **each) for each in self.labels_of(name)}
        return {key: value for key, value in found.items() if value}

    def _values(self, name: str, has: Callable[[dict[str, str]], bool]) -> list[float]:
        samples = (sample for family in self.families for sample in family.samples)
        return [float(each.value) for each in samples if each.name == name and has(each.labels)]


class Service:
    """`andon serve` in a process: coordinator and reducer on one free port."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        *flags: str,
        port: int = 0,
        shared_dir: str = "",
        anew: bool = False,
        program: Sequence[str] = ("-m", "andon_cli"),
        certs: Path | None = None,
    ) -> None:
        """Starts it; its files go to `folder`, and shared memory to `shared_dir`.

        `anew`: without a nursery. `program` is the command line, as arguments of `python`. `certs`:
        the folder of certificates with which it serves TLS, and with which it is asked here.
        """
        self.folder, self._certs = folder, certs
        if certs is not None:
            flags = (*flags, "--tls", str(certs))
        command = [
            *(*program, "serve", "--bind", "127.0.0.1"),
            *("--port", str(port), "--metrics-port", "0", "--workers", str(workers)),
            *("--run-dir", str(folder), "--announce", *flags),
        ]
        folder.parent.mkdir(parents=True, exist_ok=True)
        output, self._errors = (folder.with_name(f"{folder.name}.{name}") for name in _OUTPUTS)
        output.unlink(missing_ok=True)
        start = start_anew if anew else nursery("service").start
        environment = clean_environment(ANDON_SHARED_DIR=shared_dir)
        self.process: Process = start(command, environment, output, self._errors)
        line = first_line(self.process, output)
        assert line, f"the service exited with {self.process.poll()}: {self._errors.read_text()}"
        announced = json.loads(line)
        self.address: str = announced["address"]
        self.run_id: str = announced["run_id"]
        self.journal = Path(announced["journal"])
        self.metrics_url: str = announced["metrics_url"]
        self.board_url: str = announced["board_url"]

    def __enter__(self) -> Self:
        """The service."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self.stop()

    def status(self) -> pb.LineStatus:
        """The line's status."""
        with open_channel(self.address, (), self._certs) as channel:
            return CoordinatorStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10).status

    def await_status(self, reached: Callable[[pb.LineStatus], bool]) -> pb.LineStatus:
        """Watches the status until it is as wanted, and returns it."""
        with open_channel(self.address, (), self._certs) as channel:
            watch = CoordinatorStub(channel).WatchStatus(
                pb.WatchStatusRequest(), timeout=_PATIENCE_S
            )
            for update in watch:
                if reached(update.status):
                    watch.cancel()
                    return update.status
        raise AssertionError("the service ended the watch")

    def await_waiting_for(self, text: str) -> None:
        """Waits until the line says that it waits for this."""
        self.await_status(lambda line: line.waiting_for == text)

    def await_halt(self) -> HaltEvidence:
        """Waits until the line is halted; returns the evidence."""
        return self.await_status(lambda line: line.state == pb.LINE_STATE_HALTED).halt

    def pull_cord(self) -> None:
        """Halts the line, as `andon halt` does."""
        with open_channel(self.address, (), self._certs) as channel:
            CoordinatorStub(channel).PullCord(pb.PullCordRequest(operator="ann"), timeout=10)

    def clear_halt(
        self, halt_id: int, answer: pb.HaltAnswer = pb.HALT_ANSWER_RETRY, **more: Any
    ) -> None:
        """Answers a halt, as `andon resume` does."""
        with open_channel(self.address, (), self._certs) as channel:
            CoordinatorStub(channel).ClearHalt(
                pb.ClearHaltRequest(halt_id=halt_id, answer=answer, operator="ann", **more),
                timeout=10,
            )

    def scrape(self) -> Scrape:
        """Its metrics now."""
        return Scrape.of(self.metrics_url)

    def refusals(self) -> dict[tuple[str, str], float]:
        """The metrics' counts of calls that ended with an error, by service and reason."""
        name, scrape = "andon_refusals_total", self.scrape()
        return {
            (each["service"], each["reason"]): scrape.value(name, **each)
            for each in scrape.labels_of(name)
        }

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's current values with these labels.

        Without labels it is the metric's only value, which there must be.
        """
        scrape = self.scrape()
        return scrape.total(name, **labels) if labels else scrape.value(name)

    def stop(self) -> None:
        """Stops it with a signal, as a person would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(_PATIENCE_S)
        sys.stderr.write(self._errors.read_text())


@dataclass
class Worker:
    """One training process and its output files."""

    process: Child
    out: Path
    output: str = field(default="")

    def wait(self) -> int:
        """Waits for its end; returns the exit code."""
        code = self.process.wait(_PATIENCE_S)
        self.output = self.process.output.read_text()
        return code

    def await_output(self, part: str) -> None:
        """Waits until it has printed `part`."""
        self.await_true(lambda: part in self.process.output.read_text())

    def await_true(self, condition: Callable[[], object]) -> None:
        """Waits until a condition holds, which this process makes true before its end."""

        def holds() -> object:
            assert self.process.poll() is None, self.process.output.read_text()
            return condition()

        wait_until(holds)

    @property
    def seen(self) -> dict[str, Any]:
        """The JSON that it wrote."""
        assert self.out.exists(), self.output
        seen: dict[str, Any] = json.loads(self.out.read_text())
        return seen

    def kill(self) -> None:
        """Kills it, if it still runs."""
        self.process.kill()
        self.wait()


def start_worker(
    folder: Path, spec: dict[str, Any], *, slot: int = 0, script: str = "train.py", **more: str
) -> Worker:
    """Starts one worker, with `more` added to its environment."""
    spec_file, out = folder / f"spec-{slot}.json", folder / f"out-{slot}.json"
    spec_file.write_text(json.dumps({**spec, "slot": slot}))
    process = nursery("trainer").start(
        [str(SCRIPTS / script), str(spec_file), str(out)],
        clean_environment(**more),
        folder / f"output-{slot}.log",
    )
    return Worker(process, out)


def start_host(
    folder: Path,
    service: Service,
    spec: dict[str, Any],
    *,
    script: str = "train.py",
    **more: str,
) -> list[Worker]:
    """Starts the two processes of a host, as a torchrun of its own does; their spec has `ddp`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir()
    return [
        start_worker(
            folder,
            {**spec, "ddp": True},
            slot=slot,
            script=script,
            ANDON_ADDRESS=service.address,
            RANK=str(slot),
            LOCAL_RANK=str(slot),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            **more,
        )
        for slot in range(2)
    ]


def on_line(service: Service, slot: int, workers: int) -> dict[str, str]:
    """The environment variables that connect a worker to a service's line."""
    return {
        "ANDON_ADDRESS": service.address,
        "ANDON_RUN_ID": service.run_id,
        "RANK": str(slot),
        "WORLD_SIZE": str(workers),
    }


@contextmanager
def start_workers(
    folder: Path,
    service: Service,
    spec: dict[str, Any],
    workers: int,
    *,
    script: str = "train.py",
    each: Sequence[dict[str, str]] = (),
    **more: str,
) -> Iterator[list[Worker]]:
    """Starts `workers` workers of a service; kills whatever still runs at the end.

    `more` is added to the environment of all, and `each` to that of each by its slot. Workers that
    the test appends to the list are killed, too.
    """
    started: list[Worker] = []
    with ExitStack() as stack:
        stack.callback(_kill, started)
        for slot in range(workers):
            where = {**on_line(service, slot, workers), **more, **(each[slot] if each else {})}
            started.append(start_worker(folder, spec, slot=slot, script=script, **where))
        yield started


@contextmanager
def start_line(
    folder: Path,
    spec: dict[str, Any],
    workers: int,
    *flags: str,
    script: str = "train.py",
    **more: str,
) -> Iterator[tuple[Service, list[Worker]]]:
    """A service with these flags, and its workers; the service shares memory in their folder."""
    folder.mkdir(exist_ok=True)
    shared_dir = more.get("ANDON_SHARED_DIR", "")
    with (
        Service(folder / "run", workers, *flags, shared_dir=shared_dir) as service,
        start_workers(folder, service, spec, workers, script=script, each=(), **more) as started,
    ):
        yield service, started


@contextmanager
def start_line_with_host(
    folder: Path,
    specs: tuple[dict[str, Any], dict[str, Any]],
    workers: int,
    *flags: str,
    script: str,
    **more: str,
) -> Iterator[tuple[Service, list[Worker]]]:
    """A service, a host of two processes in slots 0 and 1, and workers in slots from 2 on.

    `specs`: the host's, and the workers'.
    """
    shared_dir = more.get("ANDON_SHARED_DIR", "")
    with (
        Service(folder / "run", 1 + workers, *flags, shared_dir=shared_dir) as service,
        start_workers(folder, service, specs[1], 0) as started,
    ):
        started += start_host(folder / "host", service, specs[0], script=script, **more)
        for slot in range(2, 2 + workers):
            where = {**on_line(service, slot - 1, 1 + workers), **more}
            started.append(start_worker(folder, specs[1], slot=slot, script=script, **where))
        yield service, started


def _kill(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.kill()


def await_exit(workers: Sequence[Worker], code: int = 0) -> None:
    """Waits until workers have ended, all with this exit code."""
    for worker in workers:
        assert worker.wait() == code, worker.output


def finish(workers: Sequence[Worker], expect_exit: int = 0) -> list[dict[str, Any]]:
    """Waits until workers have ended as expected; returns what each wrote."""
    await_exit(workers, expect_exit)
    return [worker.seen for worker in workers]


def train(
    folder: Path,
    spec: dict[str, Any],
    workers: int,
    *flags: str,
    script: str = "train.py",
    expect_exit: int = 0,
    **more: str,
) -> list[dict[str, Any]]:
    """Trains on a line of `workers` processes; returns what each wrote, by slot."""
    with start_line(folder, spec, workers, *flags, script=script, **more) as (_, started):
        return finish(started, expect_exit)


def train_alone(folder: Path, spec: dict[str, Any], script: str = "train.py") -> Worker:
    """Trains in one process without a line."""
    folder.mkdir(exist_ok=True)
    worker = start_worker(folder, spec, script=script)
    finish([worker])
    return worker
