"""A service to measure: `andon serve` in its own process, on free ports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SECRET", "Service", "announced", "serving"]

SECRET = "a secret of the benchmark only, on links that nobody else has"
"""Of a line whose reducers are several services."""

_PATIENCE_S = 60


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    address: str
    """The line's address, as host:port."""
    run_id: str
    pid: int
    metrics_url: str = ""


@contextmanager
def serving(
    folder: Path,
    workers: int,
    flags: Sequence[str] = (),
    *,
    inside: Sequence[str] = (),
    bind: str = "127.0.0.1",
    program: Sequence[str] = (sys.executable, "-m", "andon_cli"),
) -> Iterator[Service]:
    """Serves a line of `workers` workers until the context exits; its files go to `folder`.

    `flags` are additional flags of `andon serve`. `inside` is the command prefix that runs a
    command on another host, and `bind` is the address that it listens on there. `program` is the
    command that serves.

    Raises:
        RuntimeError: the service did not start. The message holds its output.
    """
    command = [*inside, *program, "serve", "--bind", bind, "--port", "0"]
    command += ["--metrics-port", "0", "--workers", str(workers), "--announce"]
    command += ["--run-dir", str(folder / "run"), *flags]
    with announced(command, folder / "service.err") as (pid, told):
        yield Service(told["address"], told["run_id"], pid, told["metrics_url"])


@contextmanager
def announced(
    command: Sequence[str], errors: Path, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Runs an `andon serve --announce` until the context exits; its log goes to `errors`.

    Yields:
        Its process, and what it announced.

    Raises:
        RuntimeError: it did not start. The message holds its output.
    """
    with (
        errors.open("w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the service did not start: {errors.read_text()}")
            yield process.pid, json.loads(line)
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)
