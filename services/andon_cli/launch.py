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
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from andon.host.errors import CommandError, ExitCode
from andon.host.manifest import checkpoints_in
from andon_cli.book import dropped_workers
from andon_cli.client import LineClient
from andon_cli.config import RunConfig
from andon_cli.follower import Follower
from andon_cli.output import OutputLog
from andon_cli.processes import (
    Child,
    Restarts,
    ended_how,
    exit_code_of,
    free_port,
    start_service,
    start_worker,
    worker_environment,
)
from andon_cli.resuming import checkpoints_written
from andon_cli.screen import Screen
from andon_server.process import Interrupts
from andon_server.runs import JOURNAL, RUNS, ServiceAddress, make_run_dir, worker_log

__all__ = ["Launch"]

_GRACE_S = 5.0
"""How long the others have to end by themselves once the verdict is known."""
_INTERRUPTED_GRACE_S = 20.0
"""How long they have at Ctrl-C: a checkpoint may be on its way to the disk."""
_CHECKPOINT_S = 20.0
"""How long a step and its checkpoint may take at Ctrl-C, before the workers are interrupted."""
_ASK_EVERY_S = 0.1
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
        self._restarts = Restarts(config.settings.restarts)
        self._reborn: dict[int, float] = {}
        """When a worker was started again last, by slot: a monotonic time in seconds."""
        self._late: list[Child] = []
        self._keeping: asyncio.Task[None] | None = None
        """Waits for the checkpoint that is written at Ctrl-C."""
        self._master_port = free_port()
        self.line: ServiceAddress | None = None

    @property
    def joined(self) -> bool:
        """Whether any worker was ever on the line."""
        return self._follower is not None and self._follower.joined

    @property
    def restarts(self) -> int:
        """How often a worker was started again."""
        return self._restarts.used

    async def run(self) -> ExitCode:
        """Starts everything and waits for the workers' end; what their ends say of the run.

        Raises:
            CommandError: the service could not be started, or the line not be found.
        """
        line = await self._find_line()
        if line is None:
            return self._interrupted
        self.line = line
        self._follower = Follower(self._config, line, self._screen)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._ask_for_checkpoint)
        for slot in range(self._config.settings.workers):
            self._workers.append(await self._start_worker(line, slot))
        await self._until_workers_end()
        return self._verdict

    async def end(self) -> None:
        """Ends what still runs, the service last."""
        self._keep_no_more()
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
        async with LineClient(
            self._config.settings.join, access=self._config.settings.access
        ) as client:
            status = await client.status()
        return ServiceAddress(
            address=self._config.settings.join,
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
            self._verdict = self._interrupted
            return None
        try:
            return ServiceAddress.from_json(reading.result().decode())
        except ValueError:
            self._verdict = ExitCode.FAILED
            code = await self._service.wait()
            raise CommandError(
                f"the service ended with exit code {code} before it served: what it said is above"
            ) from None

    async def _start_worker(self, line: ServiceAddress, slot: int) -> Child:
        config = self._config
        run_dir = config.service.folder if config.service else RUNS / line.run_id
        make_run_dir(run_dir)
        variables = {
            "ANDON_ADDRESS": line.address,
            "ANDON_RUN_ID": line.run_id,
            "ANDON_RUN_DIR": str(run_dir.absolute()),
        }
        module = ["-m"] if config.settings.module else []
        return await start_worker(
            f"worker {slot}",
            [sys.executable, *module, *config.command],
            environment=worker_environment(
                config, slot, base=os.environ, line=variables, master_port=self._master_port
            ),
            log=OutputLog(worker_log(run_dir, slot), self._screen.say),
            show=self._shower(slot),
        )

    def _ask_for_checkpoint(self) -> None:
        """Passes SIGUSR1 on: rank 0, if it is here, writes after the present step."""
        for worker in self._workers:
            worker.send(signal.SIGUSR1)

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
                if happened.failure is not None:
                    raise happened.failure
                if (again := self._again(happened, happenings)) is not None:
                    watchers.append(again)
                    continue
                running -= happened.child in self._workers
                if self._judge(happened) is not ExitCode.COMPLETE and deadline is None:
                    interrupted = self._verdict in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
                    grace_s = _INTERRUPTED_GRACE_S if interrupted else _GRACE_S
                    grace_s += 0.0 if self._keeping is None else _CHECKPOINT_S
                    deadline = asyncio.get_running_loop().time() + grace_s
                if self._interrupts.again.is_set():
                    return
        except TimeoutError:
            self._screen.say("the other workers did not end by themselves: they are terminated")
        finally:
            for watcher in watchers:
                watcher.cancel()

    def _again(
        self, happened: _Happening, happenings: asyncio.Queue[_Happening]
    ) -> asyncio.Task[None] | None:
        """Starts a worker that died again, if another try may mend it."""
        child, code = happened.child, happened.code
        if child is None or child not in self._workers or self._was_dropped(child):
            return None
        follower = self._follower
        assert follower is not None
        over = self._verdict is not ExitCode.COMPLETE or self._interrupts.first.is_set()
        if over or self._is_over or not self._has_others(child):
            return None
        wait_s = self._restarts.spend(code, trained=follower.trained)
        if wait_s is None:
            return None
        self._screen.say(
            f"{child.name} {ended_how(code)}: it starts again in {wait_s:g} s "
            f"(restart {self._restarts.used} of {self._restarts.most})"
        )
        return asyncio.create_task(self._start_again(child, wait_s, happenings))

    @property
    def _is_over(self) -> bool:
        """Whether the line has ended the run, as far as was seen."""
        return self._follower is not None and self._follower.complete

    def _is_late(self, child: Child) -> bool:
        """Whether a worker that was started again was not on the line before the run was over."""
        slot = self._workers.index(child)
        reborn, follower = self._reborn.get(slot), self._follower
        if reborn is None or follower is None or not self._is_over:
            return False
        return not follower.was_live_since(slot, reborn)

    def _end_late(self) -> None:
        """Ends workers that look for a line that is no more."""
        self._late = [each for each in self._workers if not each.ended and self._is_late(each)]
        for worker in self._late:
            worker.send(signal.SIGTERM)

    def _has_others(self, child: Child) -> bool:
        """Whether another worker may still hold what this one must get once it starts again."""
        service = self._config.service
        elsewhere = service is None or service.workers > self._config.settings.workers
        return elsewhere or any(each is not child and not each.ended for each in self._workers)

    async def _start_again(
        self, child: Child, wait_s: float, happenings: asyncio.Queue[_Happening]
    ) -> None:
        assert self.line is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._interrupts.first.wait(), wait_s)
        if (
            self._verdict is not ExitCode.COMPLETE
            or self._interrupts.first.is_set()
            or self._is_over
        ):
            happenings.put_nowait(_Happening(child, ExitCode.COMPLETE))  # The run is over anyway.
            return
        slot = self._workers.index(child)
        try:
            self._workers[slot] = worker = await self._start_worker(self.line, slot)
            self._reborn[slot] = time.monotonic()
        except (OSError, CommandError) as error:
            self._screen.say(f"{child.name} could not be started again: {error}")
            happenings.put_nowait(_Happening(child, ExitCode.FAILED))
            return
        await _watch(happenings, worker.wait(), worker)

    def _judge(self, happened: _Happening) -> ExitCode:
        """What the run comes to, now that this happened; the first failure decides."""
        child, code = happened.child, happened.code
        if child is None:
            verdict = self._pass_on()
        elif child is self._service:
            verdict = self._judge_service(code)
        else:
            verdict = self._judge_worker(child, code)
        if self._verdict is ExitCode.COMPLETE:
            self._verdict = verdict
        return self._verdict

    def _pass_on(self) -> ExitCode:
        """Passes a signal on to the workers."""
        verdict = self._interrupted
        first = self._verdict is ExitCode.COMPLETE
        self._keep_no_more()
        run_dir = self._checkpoints_at if first and verdict is ExitCode.INTERRUPTED else None
        if first:
            what = "end" if run_dir is None else "write a checkpoint and end"
            self._screen.say(f"interrupted: the workers {what}; once more ends them at once")
        if run_dir is not None:
            self._keeping = asyncio.create_task(self._keep_then_interrupt(run_dir))
            return verdict
        for worker in self._workers:
            worker.send(signal.SIGTERM if verdict is ExitCode.TERMINATED else signal.SIGINT)
        return verdict

    @property
    def _checkpoints_at(self) -> Path | None:
        """The run's folder, if the run writes checkpoints there and is about to commit a step."""
        service, follower = self._config.service, self._follower
        if service is None or follower is None or not follower.runs:
            return None
        wanted = self._config.settings.checkpoint_every is not None or checkpoints_in(
            service.folder
        )
        return service.folder if wanted else None

    async def _keep_then_interrupt(self, run_dir: Path) -> None:
        """Asks rank 0 for a checkpoint of the present step until it is there, or was due."""
        before = checkpoints_written(run_dir)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CHECKPOINT_S):
                while checkpoints_written(run_dir) <= before:
                    # A wish at a step whose checkpoint is there already is a wish fulfilled.
                    self._ask_for_checkpoint()
                    await asyncio.sleep(_ASK_EVERY_S)
        for worker in self._workers:
            worker.send(signal.SIGINT)

    def _keep_no_more(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()

    def _judge_service(self, code: int) -> ExitCode:
        if self._is_over:
            self._end_late()
            return ExitCode.COMPLETE
        self._screen.say(f"the service {ended_how(code)}: the line is lost")
        return ExitCode.LOST

    def _judge_worker(self, child: Child, code: int) -> ExitCode:
        if child in self._late or (code == ExitCode.REFUSED and self._is_late(child)):
            self._screen.say(f"{child.name} came back too late: the others have ended the run")
        elif self._was_dropped(child):
            self._screen.say(f"{child.name} was dropped: the others go on without it")
        elif code == ExitCode.TERMINATED:
            self._screen.say(f"{child.name} was told to terminate: the others go on without it")
        elif code != 0:
            self._screen.say(f"{child.name} {ended_how(code)}: its output is in {child.log}")
            return exit_code_of(code)
        return ExitCode.COMPLETE

    @property
    def _interrupted(self) -> ExitCode:
        """What a signal makes of the run: SIGTERM is passed on, any other ends it as Ctrl-C."""
        terminated = self._interrupts.number == signal.SIGTERM
        return ExitCode.TERMINATED if terminated else ExitCode.INTERRUPTED

    def _was_dropped(self, child: Child) -> bool:
        """Whether a person sent this worker away; the journal is given that before the worker is.

        The slots of a line that is served elsewhere are not known here.
        """
        service = self._config.service
        if service is None or child not in self._workers:
            return False
        return self._workers.index(child) in dropped_workers(service.folder / JOURNAL)


@dataclass(frozen=True, slots=True)
class _Happening:
    """A process ended with a code; or, without one, a person interrupted."""

    child: Child | None
    code: int
    failure: Exception | None = None
    """A mistake of this program: it must end the launch, which waits for happenings alone."""


async def _watch(
    happenings: asyncio.Queue[_Happening], what: Awaitable[int], child: Child | None = None
) -> None:
    try:
        happened = _Happening(child, await what)
    except Exception as error:  # told and raised by whoever waits
        happened = _Happening(child, ExitCode.FAILED, error)
    happenings.put_nowait(happened)
