"""One launch: a service and its workers, from their start until none is left.

Theory of operation. Whatever ends first decides the verdict: a worker that fails, the service, or
a person. From then on the others have a grace to end by themselves, for the line tells them; then
they are terminated, and what does not obey is killed. `end` runs whatever happens.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from andon_cli.book import dropped_workers
from andon_cli.client import LineClient
from andon_cli.config import RunConfig
from andon_cli.errors import ConsoleError, ExitCode
from andon_cli.follower import Follower
from andon_cli.interrupts import Interrupts
from andon_cli.processes import (
    Child,
    ended_how,
    exit_code_of,
    free_port,
    start_service,
    start_worker,
    worker_environment,
)
from andon_cli.runs import JOURNAL, RUNS, ServiceAddress, worker_log
from andon_cli.screen import Screen

__all__ = ["Launch"]

_GRACE_S = 5.0
"""How long the others have to end by themselves once the verdict is known."""
_INTERRUPTED_GRACE_S = 20.0
"""How long they have at Ctrl-C: a checkpoint may be on its way to the disk."""
_KILL_AFTER_S = 3.0
"""How long a process has to end once it is told to terminate."""


class Launch:
    """The processes of one `andon run`."""

    def __init__(self, config: RunConfig, screen: Screen, interrupts: Interrupts) -> None:
        """Starts nothing yet."""
        self._config = config
        self._screen = screen
        self._interrupts = interrupts
        self._service: Child | None = None
        self._workers: list[Child] = []
        self._follower: Follower | None = None
        self._verdict = ExitCode.COMPLETE
        self.line: ServiceAddress | None = None

    @property
    def joined(self) -> bool:
        """Whether any worker was ever on the line."""
        return self._follower is not None and self._follower.joined

    async def run(self) -> ExitCode:
        """Starts everything and waits for the workers' end; what their ends say of the run.

        Raises:
            ConsoleError: the service could not be started, or the line not be found.
        """
        line = await self._find_line()
        if line is None:
            return ExitCode.INTERRUPTED
        self.line = line
        self._follower = Follower(self._config, line, self._screen)
        await self._start_workers(line)
        await self._until_workers_end()
        return self._verdict

    async def end(self) -> None:
        """Ends what still runs, the service last."""
        workers = [worker.end(grace_s=_KILL_AFTER_S) for worker in self._workers]
        await asyncio.gather(*workers, return_exceptions=True)
        if self._service is not None:
            if self._verdict is ExitCode.COMPLETE and self.joined:
                # Once the line is complete and its streams are gone it ends by itself.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._service.process.wait(), _GRACE_S)
            await self._service.end(grace_s=_KILL_AFTER_S)
        if self._follower is not None:
            await self._follower.close()

    async def _find_line(self) -> ServiceAddress | None:
        """Where the line is; None if a person interrupted."""
        if self._config.service is not None:
            return await self._serve_line()
        async with LineClient(self._config.join) as client:
            status = await client.status()
        return ServiceAddress(
            address=self._config.join,
            metrics_url=status.metrics_url,
            run_id=status.run_id,
            journal="",
            pid=0,
        )

    async def _serve_line(self) -> ServiceAddress | None:
        assert self._config.service is not None
        self._service, announced = await start_service(
            self._config.service, lambda line: self._screen.say(f"[service] {line}")
        )
        reading = asyncio.create_task(announced.readline())
        stopping = asyncio.create_task(self._interrupts.first.wait())
        done, pending = await asyncio.wait({reading, stopping}, return_when="FIRST_COMPLETED")
        for task in pending:
            task.cancel()
        if reading not in done:
            self._verdict = ExitCode.INTERRUPTED
            return None
        try:
            return ServiceAddress.from_json(reading.result().decode())
        except ValueError:
            self._verdict = ExitCode.FAILED
            code = await self._service.wait()
            raise ConsoleError(
                f"the service ended with exit code {code} before it served: what it said is above"
            ) from None

    async def _start_workers(self, line: ServiceAddress) -> None:
        config = self._config
        run_dir = config.service.run_dir if config.service else RUNS / line.run_id
        run_dir.mkdir(parents=True, exist_ok=True)
        variables = {
            "ANDON_ADDRESS": line.address,
            "ANDON_RUN_ID": line.run_id,
            "ANDON_RUN_DIR": str(run_dir.absolute()),
        }
        module = ["-m"] if config.module else []
        master_port = free_port()
        for slot in range(config.workers):
            environment = worker_environment(
                config, slot, base=os.environ, line=variables, master_port=master_port
            )
            worker = await start_worker(
                f"worker {slot}",
                [sys.executable, *module, *config.command],
                environment=environment,
                log=worker_log(run_dir, slot),
                show=self._shower(slot),
            )
            self._workers.append(worker)

    def _shower(self, slot: int) -> Callable[[str], None]:
        def show(line: str) -> None:
            # A person who interrupts knows why each script's traceback ends in KeyboardInterrupt.
            if not self._interrupts.first.is_set():
                self._screen.say(f"[worker {slot}] {line}")

        return show

    async def _until_workers_end(self) -> None:
        happenings: asyncio.Queue[_Happening] = asyncio.Queue()
        watchers = [
            asyncio.create_task(_watch(happenings, worker.wait(), worker))
            for worker in self._workers
        ]
        watchers.append(asyncio.create_task(_watch(happenings, self._interrupts.first.wait())))
        watchers.append(asyncio.create_task(_watch(happenings, self._interrupts.again.wait())))
        if self._service is not None:
            ending = self._service.process.wait()
            watchers.append(asyncio.create_task(_watch(happenings, ending, self._service)))
        running, deadline = len(self._workers), None
        try:
            while running:
                async with asyncio.timeout_at(deadline):
                    happened = await happenings.get()
                running -= happened.child in self._workers
                if self._judge(happened) is not ExitCode.COMPLETE and deadline is None:
                    interrupted = self._verdict is ExitCode.INTERRUPTED
                    grace_s = _INTERRUPTED_GRACE_S if interrupted else _GRACE_S
                    deadline = asyncio.get_running_loop().time() + grace_s
                if self._interrupts.again.is_set():
                    return
        except TimeoutError:
            self._screen.say("the other workers did not end by themselves: they are terminated")
        finally:
            for watcher in watchers:
                watcher.cancel()

    def _judge(self, happened: _Happening) -> ExitCode:
        """What the run comes to, now that this happened; the first failure decides."""
        child, code = happened.child, happened.code
        verdict = ExitCode.COMPLETE
        if child is None:
            verdict = ExitCode.INTERRUPTED
            if self._verdict is ExitCode.COMPLETE:
                self._screen.say("interrupted: the workers end; once more ends them at once")
            for worker in self._workers:
                worker.send(signal.SIGINT)
        elif child is self._service:
            if self._follower is not None and not self._follower.complete:
                verdict = ExitCode.LOST
                self._screen.say(f"the service {ended_how(code)}: the line is lost")
        elif self._was_dropped(child):
            self._screen.say(f"{child.name} was dropped: the others go on without it")
        elif code != 0:
            verdict = exit_code_of(code)
            self._screen.say(f"{child.name} {ended_how(code)}: its output is in {child.log}")
        if self._verdict is ExitCode.COMPLETE:
            self._verdict = verdict
        return self._verdict

    def _was_dropped(self, child: Child) -> bool:
        """Whether a person sent this worker away; the journal is given that before the worker is.

        The slots of a line that is served elsewhere are not known here.
        """
        service = self._config.service
        if service is None or child not in self._workers:
            return False
        return self._workers.index(child) in dropped_workers(service.run_dir / JOURNAL)


@dataclass(frozen=True, slots=True)
class _Happening:
    """A process ended with a code; or, without one, a person interrupted."""

    child: Child | None
    code: int


async def _watch(
    happenings: asyncio.Queue[_Happening], what: Awaitable[int], child: Child | None = None
) -> None:
    happenings.put_nowait(_Happening(child, await what))
