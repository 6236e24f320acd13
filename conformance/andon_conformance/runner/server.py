"""The server under test as a process that the suite starts, kills and restarts."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path

import grpc.aio

from andon.host.errors import CommandError
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_conformance.reach import Reach

__all__ = ["ServerProcess", "ask_status", "listens"]

_STARTING_S = 60.0
_GRACE_S = 5.0
_ENDING_S = 1.0
"""How long the end of a process is waited for after its connection broke."""
_LOOK_S = 0.05
"""As long, while a server that starts answers nothing yet."""


class ServerProcess:
    """The process that a command starts, with its children."""

    def __init__(self, command: str, reach: Reach, log: Path) -> None:
        """Starts nothing yet.

        Args:
            command: as in a shell, without its operators. Started again, it must serve the same
                run from the same journal at the same address.
            reach: where it serves.
            log: what it prints is appended to this file.
        """
        self._command = shlex.split(command)
        self._reach = reach
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def ended(self, within_s: float = _ENDING_S) -> str:
        """How the process ended by itself; empty if it is alive after `within_s`."""
        if self._process is None:
            return ""
        try:  # a broken connection may be seen before the process that broke it is gone
            async with asyncio.timeout(within_s):
                code = await self._process.wait()
        except TimeoutError:
            return ""
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"the server's process has ended: {how}"

    async def start(self) -> None:
        """Starts the server, and waits until it answers.

        Raises:
            CommandError: it ended before, or says nothing for too long.
        """
        try:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # A group of its own, so that a signal also reaches what the command has
                    # started.
                    process_group=0,
                )
        except OSError as error:
            raise CommandError(f"--start: {self._command[0]} can't be started: {error}") from error
        deadline = asyncio.get_running_loop().time() + _STARTING_S
        while await ask_status(self._reach, timeout_s=1.0) is None:
            if ended := await self.ended(_LOOK_S):
                raise CommandError(f"--start: nothing answered at {self._reach.address}: {ended}")
            if asyncio.get_running_loop().time() > deadline:
                raise CommandError(
                    f"--start: nothing answers at {self._reach.address} after {_STARTING_S:g} s, "
                    f"though process {self._process.pid} is alive: it must serve at --target"
                )

    async def kill(self) -> None:
        """Kills it with SIGKILL."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Ends it with SIGTERM, as a person would."""
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        # Taken away first: an end that the suite wants is not one that `ended` reports.
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def listens(address: str) -> bool:
    """Whether any process accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_GRACE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def ask_status(reach: Reach, *, timeout_s: float) -> pb.LineStatus | None:
    """The line's status; None if no coordinator answers."""
    channel = reach.channel()
    try:
        call = CoordinatorStub(channel).GetStatus(
            pb.GetStatusRequest(), timeout=timeout_s, metadata=reach.metadata
        )
        answer = await call  # type: ignore[misc]  # the stubs know the synchronous calls only
        status: pb.LineStatus = answer.status
        return status
    except grpc.aio.AioRpcError:
        return None
    finally:
        await channel.close()
