"""A line of real workers in several languages, which a test may kill, halt and restart."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from andon.protocol.records import RecordKind
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_coordinator.transport.reader import JournalReader
from chaos.rig import free_port
from clients.languages import built
from integration.harness import Service, clean_environment, on_line
from integration.nursery import Process, nursery

__all__ = ["SAMPLES", "MixedLine", "WorkerProcess", "mixed_line"]

SAMPLES = 257
"""Positions in an epoch of clients/data/samples.csv."""
_HELD = Path(__file__).with_name("held.py")
_SMALL_CHUNKS = Path(__file__).with_name("small_chunks.py")
_PATIENCE_S = 90.0


@dataclass
class WorkerProcess:
    """One worker's process, and its output files."""

    process: Process
    output: Path
    errors: Path

    def end(self) -> dict[str, Any]:
        """Waits for its successful exit; returns the JSON that it printed."""
        code = self.process.wait(_PATIENCE_S)
        assert code == 0, f"exit {code}: {self.output.read_text()}{self.errors.read_text()}"
        ended: dict[str, Any] = json.loads(self.output.read_text().splitlines()[-1])
        return ended

    def kill(self) -> None:
        """Kills it with SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_PATIENCE_S)


@dataclass
class MixedLine:
    """A service and workers in several languages, by slot."""

    folder: Path
    workers: int
    steps: int
    flags: Sequence[str]
    small_chunks: bool = False
    grain: int = 0
    """Positions of a grain; 0: none."""
    port: int = field(default_factory=free_port)
    processes: dict[int, WorkerProcess] = field(default_factory=dict)
    _started: int = 0

    def __post_init__(self) -> None:
        """Starts the service."""
        self.serve()

    def serve(self, run_id: str = "mixed") -> None:
        """Starts a service on the line's port and journal, for the first time or again."""
        flags = (*self.flags, "--digest-every", "1", "--run-id", run_id)
        program = (str(_SMALL_CHUNKS),) if self.small_chunks else ("-m", "andon_cli")
        self.service = Service(
            self.folder / "run",
            self.workers,
            *flags,
            port=self.port,
            anew=self.small_chunks,
            program=program,
        )

    def start(self, slot: int, language: str, *, hold_at: str = "", **more: str) -> WorkerProcess:
        """Starts a slot's worker. Only a Python worker can hold before a step, until `go`.

        `more` are additional environment variables.
        """
        self._started += 1
        place = self.folder / f"worker-{slot}-{self._started}"
        output, errors = place.with_suffix(".out"), place.with_suffix(".err")
        mine = {
            **on_line(self.service, slot, self.workers),
            "ANDON_ON_HALT": "wait",
            "ANDON_METRICS_BIND": "off",
            "HOLD_AT": hold_at,
            "FOLDER": str(self.folder),
        }
        environment = clean_environment(**{**mine, **more})
        process: Process
        options = ["--steps", str(self.steps)]
        if self.grain:
            options += ["--grain", str(self.grain)]
        if language == "python":
            command = [str(_HELD), *options]
            process = nursery("trainer").start(command, environment, output, errors)
        else:
            command = [*built(language).run, *options]
            with output.open("wb") as out, errors.open("wb") as err:
                process = subprocess.Popen(command, env=environment, stdout=out, stderr=err)
        self.processes[slot] = worker = WorkerProcess(process, output, errors)
        return worker

    def go(self, step: int) -> None:
        """Lets the worker that holds before a step continue."""
        (self.folder / f"go-{step}").touch()

    def await_step(self, step: int) -> pb.LineStatus:
        """Waits until a step is committed."""
        return self.service.await_status(lambda status: status.step >= step)

    def await_live(self, workers: int) -> pb.LineStatus:
        """Waits until `workers` workers are live."""
        return self.service.await_status(lambda status: status.live == workers)

    def halt(self) -> int:
        """Pulls the cord; returns the halt's id."""
        with grpc.insecure_channel(self.service.address) as channel:
            request = pb.PullCordRequest(reason="a test", operator="test")
            return CoordinatorStub(channel).PullCord(request, timeout=10).halt.id

    def drain(self) -> None:
        """Ends the run after the present step."""
        with grpc.insecure_channel(self.service.address) as channel:
            CoordinatorStub(channel).Drain(pb.DrainRequest(operator="test"), timeout=10)

    def ended_alike(self) -> dict[str, Any]:
        """Checks that all workers ended with the same step, digest and weights; returns them."""
        ends = {slot: worker.end() for slot, worker in self.processes.items()}
        first = next(iter(ends.values()))
        for name in ("step", "digest", "weights"):
            assert {slot: end[name] for slot, end in ends.items()} == dict.fromkeys(
                ends, first[name]
            )
        return first

    def chain(self) -> Sequence[Any]:
        """The journal's records, from the first one."""
        with JournalReader(self.service.journal) as reader:
            return reader.chain()

    def judge(self) -> Sequence[Any]:
        """Checks the journal: every step once, and every position once per epoch (F-DP-002)."""
        with JournalReader(self.service.journal) as reader:
            chain = reader.chain()
            assert reader.ledger_faults() == []
            assert len(set(reader.digests().values())) == 1
        kinds = [entry.record.kind for entry in chain]
        assert kinds == [RecordKind.INITIAL] + [RecordKind.STEP] * self.steps
        taken = Counter(
            (entry.result.epoch, position)
            for entry in chain
            if entry.result is not None
            for part in entry.result.contributions
            for run in part.positions
            for position in range(run.start, run.stop)
        )
        end = chain[-1].record.cursor
        wanted = {(epoch, at) for epoch in range(end.epoch) for at in range(SAMPLES)}
        assert taken == Counter(wanted | {(end.epoch, at) for at in range(end.position)})
        return chain

    def close(self) -> None:
        """Kills all processes that still run."""
        for worker in self.processes.values():
            worker.kill()
        self.service.stop()


@contextmanager
def mixed_line(
    folder: Path,
    workers: int,
    steps: int,
    *flags: str,
    small_chunks: bool = False,
    grain: int = 0,
) -> Iterator[MixedLine]:
    """A line that waits for `workers` workers, which the test starts."""
    line = MixedLine(folder, workers, steps, flags, small_chunks, grain)
    try:
        yield line
    finally:
        line.close()
