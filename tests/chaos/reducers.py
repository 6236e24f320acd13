"""Reducers as separate processes, for tests that kill, stop and restart them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from andon.v1 import coordinator_pb2 as pb
from chaos.rig import PATIENCE_S, ChaosLine, chaos_line, free_port
from integration.harness import clean_environment
from integration.nursery import Process, first_line, nursery

__all__ = ["SECRET", "ReducedLine", "Reducer", "reduced_line"]

SECRET = "a secret of the tests, longer than sixteen bytes"


@dataclass
class Reducer:
    """One `andon serve --role reducer`; its address is the same after a restart."""

    coordinator: str
    folder: Path
    flags: Sequence[str] = ()
    address: str = ""
    metrics_port: int | None = None
    process: Process | None = None

    def start(self) -> None:
        """Starts its process, for the first time or again."""
        port = self.address.rpartition(":")[2] or str(free_port())
        command = [
            *("-m", "andon_cli", "serve", "--role", "reducer", "--announce"),
            *("--coordinator", self.coordinator, "--secret-file", str(self.folder / "secret")),
            *("--port", port, "--metrics-port", "0", "--liveness", "1", *self.flags),
        ]
        said, errors = (self.folder / name for name in (f"reducer-{port}.txt", "reducers.txt"))
        said.unlink(missing_ok=True)
        self.process = nursery("service").start(command, clean_environment(), said, errors)
        line = first_line(self.process, said)
        assert line, errors.read_text()
        announced = json.loads(line)
        self.address = announced["address"]
        self.metrics_port = urlsplit(announced["metrics_url"]).port

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal; after SIGKILL, waits for its end."""
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.close()

    def close(self) -> None:
        """Ends the process, even if it is stopped."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)


@dataclass
class ReducedLine:
    """A line and the reducers that share its model."""

    line: ChaosLine
    reducers: list[Reducer]

    def start_reducer(self, *flags: str) -> Reducer:
        """Starts one more reducer."""
        reducer = Reducer(self.line.service.address, self.line.folder, flags)
        self.reducers.append(reducer)
        reducer.start()
        return reducer

    def await_reducers(self, *reducers: Reducer, own: bool = True) -> pb.LineStatus:
        """Waits until these reducers, and the coordinator's own if it has one, share the model."""
        wanted = {each.address for each in reducers} | ({""} if own else set())

        def reached(status: pb.LineStatus) -> bool:
            sharing = {each.address for each in status.reducers if each.elements}
            return sharing == wanted == {each.address for each in status.reducers}

        return self.line.await_status(f"reducers at {sorted(wanted)}", reached)


@contextmanager
def reduced_line(
    folder: Path,
    count: int,
    *flags: str,
    workers: int = 3,
    **of_line: Any,
) -> Iterator[ReducedLine]:
    """A line of `workers` workers with `count` reducer processes, in addition to the service.

    `of_line` is more for `chaos_line`.
    """
    (folder / "secret").write_text(SECRET + "\n")
    own = "coordinator" not in flags
    more = ("--reducers", str(count + own), "--secret-file", str(folder / "secret"), *flags)
    with chaos_line(folder, workers, *more, **of_line) as line:
        reduced = ReducedLine(line, [])
        try:
            for _ in range(count):
                reduced.start_reducer()
            yield reduced
        finally:
            for reducer in reduced.reducers:
                reducer.close()
