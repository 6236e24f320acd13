"""Real processes for tests: a service on a free port, and workers that join it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from andon.host.tls import open_channel
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from integration.nursery import Child, Process, first_line, nursery, start_anew

__all__ = [
    "SCRIPTS",
    "Service",
    "Worker",
    "benchmark_in_small",
    "clean_environment",
    "on_line",
    "start_line",
    "start_worker",
    "train",
]

SCRIPTS = Path(__file__).parent / "scripts"

benchmark_in_small = pytest.mark.skipif(
    os.environ.get("ANDON_BENCHMARKS") != "1",
    reason="runs a benchmark for ten seconds: `make soak` runs it, with ANDON_BENCHMARKS=1",
)
_PATIENCE_S = 90
_OUTPUTS = ("out", "err")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without the variables of a line or a launcher."""
    launchers = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ANDON_", "TORCHELASTIC_")) and name not in launchers
    }
    return {**kept, "OMP_NUM_THREADS": "1", **more}


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

    def clear_halt(self, halt_id: int, answer: pb.HaltAnswer) -> None:
        """Answers a halt, as `andon resume` does."""
        with open_channel(self.address, (), self._certs) as channel:
            CoordinatorStub(channel).ClearHalt(
                pb.ClearHaltRequest(halt_id=halt_id, answer=answer, operator="test"), timeout=10
            )

    def refusals(self) -> dict[tuple[str, str], float]:
        """The metrics' counts of calls that ended with an error, by service and reason."""
        return {
            (each.labels["service"], each.labels["reason"]): each.value
            for each in self._samples("andon_refusals_total")
        }

    def metric(self, name: str) -> float:
        """The current value of a metric without labels."""
        (sample,) = self._samples(name)
        return float(sample.value)

    def metric_of(self, name: str, **labels: str) -> float:
        """The sum of a metric's current values with these labels."""
        wanted = labels.items()
        return sum(each.value for each in self._samples(name) if wanted <= each.labels.items())

    def _samples(self, name: str) -> list[Sample]:
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return [each for family in families for each in family.samples if each.name == name]

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
        deadline = time.monotonic() + _PATIENCE_S
        while part not in self.process.output.read_text():
            assert self.process.poll() is None, self.process.output.read_text()
            assert time.monotonic() < deadline, self.process.output.read_text()
            time.sleep(0.02)

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


def on_line(service: Service, slot: int, workers: int) -> dict[str, str]:
    """The environment variables that connect a worker to a service's line."""
    return {
        "ANDON_ADDRESS": service.address,
        "ANDON_RUN_ID": service.run_id,
        "RANK": str(slot),
        "WORLD_SIZE": str(workers),
    }


@contextmanager
def start_line(
    folder: Path,
    spec: dict[str, Any],
    workers: int,
    *flags: str,
    script: str = "train.py",
    **more: str,
) -> Iterator[tuple[Service, list[Worker]]]:
    """A service with `workers` workers; kills whatever still runs at the end.

    `more` is added to the workers' environment; the service uses its folder for shared memory.
    """
    shared_dir = more.get("ANDON_SHARED_DIR", "")
    with Service(folder / "run", workers, *flags, shared_dir=shared_dir) as service:
        started = [
            start_worker(
                folder, spec, slot=slot, script=script, **on_line(service, slot, workers), **more
            )
            for slot in range(workers)
        ]
        try:
            yield service, started
        finally:
            for worker in started:
                worker.kill()


def train(
    folder: Path, spec: dict[str, Any], workers: int, *, expect_exit: int = 0, **more: str
) -> list[dict[str, Any]]:
    """Trains on a line of `workers` processes; returns what each wrote, by slot."""
    with start_line(folder, spec, workers, **more) as (_service, started):
        for worker in started:
            code = worker.wait()
            assert code == expect_exit, worker.output
    return [worker.seen for worker in started]
