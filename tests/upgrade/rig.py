"""A line whose coordinator, reducer and workers are processes of either version.

Those of the current version are forked from a nursery.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from safetensors.torch import load_file

from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from integration.harness import clean_environment
from integration.nursery import Process, nursery
from upgrade.versions import Version, Versions

__all__ = ["MixedLine", "Trained", "mixed_line"]

SCRIPT = Path(__file__).parent / "train.py"
SECRET = "a secret of the tests, longer than sixteen bytes"
PATIENCE_S = 90.0


@dataclass
class Program:
    """One process, and the file with its output."""

    process: Process
    output: Path
    was_ended: bool = False
    """Whether the test ended it: its exit code is no failure then."""

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text()

    def wait(self) -> int:
        """Waits for its end."""
        return self.process.wait(PATIENCE_S)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it with a signal, if it still runs."""
        if self.process.poll() is None:
            self.was_ended = True
            self.process.send_signal(number)
            self.wait()

    def await_that(self, what: str, done: Callable[[], bool]) -> None:
        """Waits until `done`, as long as the process runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"waited for {what}:\n{self.text}"
            time.sleep(0.02)

    def announcement(self) -> dict[str, Any]:
        """What a service says on its first line."""
        self.await_that("its announcement", lambda: "\n" in self.text)
        line = next(line for line in self.text.splitlines() if line.startswith("{"))
        announced: dict[str, Any] = json.loads(line)
        return announced


@dataclass(frozen=True)
class Trained:
    """What a worker wrote at its end."""

    weights: dict[str, torch.Tensor]
    steps: list[int]
    losses: list[float]
    mean: float


@dataclass
class MixedLine:
    """The processes of one line, each started from the environment of a version."""

    versions: Versions
    folder: Path
    run_id: str = "mixed"
    programs: list[Program] = field(default_factory=list)
    address: str = ""

    def start(self, version: Version, name: str, *arguments: str, **variables: str) -> Program:
        """Starts `python ARGUMENTS` of a version; its output is in a file of that name."""
        output = self.folder / f"{name}.log"
        environment = clean_environment(
            ANDON_SHARED_DIR=str(self.folder / "shared"), PYTHONSAFEPATH="1", **variables
        )
        python = self.versions.python(version)
        process: Process
        if version == "current":
            warm = nursery("trainer")  # It starts at its first use, and not in `folder`.
            with chdir(self.folder):
                process = warm.start(arguments, environment, output)
        else:
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [python, *arguments],
                    cwd=self.folder,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
        self.programs.append(Program(process, output))
        return self.programs[-1]

    def serve(self, version: Version, *flags: str) -> Program:
        """Starts the coordinator, again at the same address if there was one."""
        port = self.address.rpartition(":")[2] or "0"
        service = self.start(
            version,
            f"service-{len(self.programs)}",
            *("-m", "andon_cli", "serve", "--bind", "127.0.0.1", "--port", port),
            *("--metrics-port", "0", "--run-id", self.run_id, "--run-dir", "run"),
            *("--digest-every", "1", "--announce", *flags),
        )
        self.address = service.announcement()["address"]
        return service

    def reduce(self, version: Version) -> Program:
        """Starts a reducer of its own, which registers with the coordinator."""
        return self.start(
            version,
            f"reducer-{len(self.programs)}",
            *("-m", "andon_cli", "serve", "--role", "reducer", "--coordinator", self.address),
            *("--secret-file", str(self.secret()), "--port", "0", "--metrics-port", "0"),
            "--announce",
        )

    def secret(self) -> Path:
        """The file with the reducers' secret."""
        file = self.folder / "secret"
        file.write_text(SECRET + "\n")
        return file

    def work(self, version: Version, slot: int, spec: dict[str, Any], **variables: str) -> Program:
        """Starts the worker of a slot."""
        spec_file = self.folder / f"spec-{slot}.json"
        spec_file.write_text(json.dumps(spec))
        where = {
            "ANDON_ADDRESS": self.address,
            "ANDON_RUN_ID": self.run_id,
            "RANK": str(slot),
            "WORLD_SIZE": "2",
        }
        return self.start(
            version,
            f"worker-{len(self.programs)}",
            *(str(SCRIPT), str(spec_file), str(self.out(slot))),
            **{**where, **variables},
        )

    def out(self, slot: int) -> Path:
        """Where the worker of a slot writes."""
        return self.folder / f"out-{slot}"

    def trained(self, slot: int) -> Trained:
        """What the worker of a slot wrote."""
        out = self.out(slot)
        written = json.loads(out.with_suffix(".json").read_text())
        steps, losses = zip(*written["seen"], strict=True)
        weights = load_file(out.with_suffix(".safetensors"))
        return Trained(weights, list(steps), list(losses), written["mean"])

    def drain(self) -> None:
        """Ends the run after the current step, as `andon drain` does."""
        with grpc.insecure_channel(self.address) as channel:
            CoordinatorStub(channel).Drain(pb.DrainRequest(operator="test"), timeout=10)

    def await_steps(self, more: int, workers: int) -> int:
        """Waits until so many workers have made so many more steps; returns the step."""
        began = self.await_status("the line", lambda status: status.step > 0).step

        def reached(status: pb.LineStatus) -> bool:
            return status.step >= began + more and status.participating == workers

        return self.await_status(f"{more} steps of {workers} workers", reached).step

    def await_hold(self, worker: Program, slot: int) -> None:
        """Waits until a worker stands still in the step of its spec's `hold_at`."""
        worker.await_that("its hold", self.out(slot).with_suffix(".holds").exists)

    def await_status(self, what: str, reached: Callable[[pb.LineStatus], bool]) -> pb.LineStatus:
        """Waits until the line's status is as wanted."""
        deadline, status = time.monotonic() + PATIENCE_S, pb.LineStatus()
        while time.monotonic() < deadline:
            with grpc.insecure_channel(self.address) as channel:
                try:
                    answer = CoordinatorStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10)
                    status = answer.status
                except grpc.RpcError:  # It is starting again.
                    status = pb.LineStatus()
            if reached(status):
                return status
            for each in self.programs:
                failed = not each.was_ended and each.process.poll()
                assert not failed, f"{each.output.name} failed before {what}\n{self.output()}"
            time.sleep(0.05)
        raise AssertionError(f"waited for {what}: {status}\n{self.output()}")

    def output(self) -> str:
        """What all processes have printed."""
        return "\n".join(f"--- {each.output.name}\n{each.text}" for each in self.programs)


@contextmanager
def mixed_line(versions: Versions, folder: Path) -> Iterator[MixedLine]:
    """A line without processes yet; those that still run at the end are killed."""
    folder.mkdir(exist_ok=True)
    (folder / "shared").mkdir()
    line = MixedLine(versions, folder)
    try:
        yield line
    finally:
        for each in line.programs:
            each.end()
