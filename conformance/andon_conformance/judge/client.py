"""The process of the client under test, from its start to its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from andon.host.errors import UsageError
from andon.host.tether import tether_command

__all__ = ["Launch", "Running", "line_environment", "start_command"]

_GRACE_S = 1.0
_DROPPED = ("ANDON_", "TORCHELASTIC_", "MASTER_")
"""Prefixes of variables that the client must not inherit from the judge."""
_DROPPED_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}


class Running(Protocol):
    """A running process of the client."""

    async def wait(self) -> int:
        """Waits for its end; returns the exit code, negative if a signal ended it."""

    async def end(self) -> None:
        """Ends it, if it still runs: SIGTERM, then SIGKILL."""


Launch = Callable[[Mapping[str, str], Path], Awaitable[Running]]
"""Starts the client with an environment; its output goes to the file."""


def line_environment(
    address: str, run_id: str, slot: int, workers: int, token_file: Path | None
) -> dict[str, str]:
    """This process's environment, with the variables that a launcher sets for a worker."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_DROPPED) and name not in _DROPPED_NAMES
    }
    line = {
        "ANDON_ADDRESS": address,
        "ANDON_RUN_ID": run_id,
        "ANDON_ON_HALT": "wait",
        "RANK": str(slot),
        "WORLD_SIZE": str(workers),
    }
    token = {} if token_file is None else {"ANDON_TOKEN_FILE": str(token_file)}
    return {**kept, **line, **token}


class _Process:
    """A command that leads its own process group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait(self) -> int:
        """See `Running`."""
        return await self._process.wait()

    async def end(self) -> None:
        """See `Running`; also kills whatever it left in its process group."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await self._process.wait()
        # Whatever the client started is in its group, even after the client itself ended.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


def start_command(command: Sequence[str]) -> Launch:
    """A `Launch` that runs `command`; the process ends with the judge, however that ends."""

    async def start(environment: Mapping[str, str], output: Path) -> Running:
        with output.open("ab") as file:
            try:
                process = await asyncio.create_subprocess_exec(
                    *tether_command(list(command), signal.SIGKILL),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=file,
                    stderr=asyncio.subprocess.STDOUT,
                    env=dict(environment),
                    process_group=0,
                )
            except OSError as error:
                raise UsageError(f"the client can't be started: {error}") from error
        return _Process(process)

    return start
