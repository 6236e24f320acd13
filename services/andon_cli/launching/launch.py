"""One launch: a service and its workers, from their start until none is left.

Theory of operation. A worker that dies is started again (`restarts`), and so is a service that this
launch started (`own_service`).

The first thing to go wrong decides the verdict: a worker that fails, a service that can't be
brought back, or a person who interrupts. The line tells the other workers, so they have some
seconds to end by themselves. Then they are terminated, and killed if that does not help. `end` runs
in any case.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from andon.host.errors import CommandError, ExitCode
from andon.host.manifest import step_of
from andon_cli.client import LineClient
from andon_cli.config import LASTING, RunConfig
from andon_cli.drawing.screen import Screen
from andon_cli.kept_command import KeptCommand
from andon_cli.launching.crash_book import CrashBook, WorkerEnd
from andon_cli.launching.follower import Follower
from andon_cli.launching.interrupting import WorkerInterrupts
from andon_cli.launching.output import OutputLog
from andon_cli.launching.own_service import STANDBY_AFTER_S, OwnService
from andon_cli.launching.processes import (
    Child,
    ServiceStart,
    ended_how,
    exit_code_of,
    free_port,
    line_slot,
    start_service,
    start_worker,
    worker_environment,
)
from andon_cli.launching.restarts import Restarts, Returns
from andon_cli.launching.template import TemplateGone
from andon_cli.launching.warm import WarmStarts
from andon_cli.settings import as_flags
from andon_server.book import dropped_workers, noticed_workers
from andon_server.process import Interrupts
from andon_server.runs import (
    JOURNAL,
    RUNS,
    ServiceAddress,
    make_run_dir,
    service_of,
    worker_log,
)

__all__ = ["Launch"]

_GRACE_S = 5.0
"""How long the other workers may take to end by themselves once the verdict is known."""
_INTERRUPTED_GRACE_S = 20.0
"""How long they may take after Ctrl-C: one may be writing a checkpoint."""
_KILL_AFTER_S = 3.0
"""How long a process may take to end after SIGTERM."""
_NO_TORCH = (
    f"PyTorch is not installed for {sys.executable}: pip install 'andon[trainer]', about 190 MB as "
    "a CPU build (--extra-index-url https://download.pytorch.org/whl/cpu) and gigabytes with CUDA"
)
_ENDED_WELL = (ExitCode.COMPLETE, ExitCode.TERMINATED)
"""After these ends a worker's last words explain nothing."""


class Launch:
    """The processes of one `andon run`."""

    def __init__(
        self,
        config: RunConfig,
        screen: Screen,
        interrupts: Interrupts,
        warm: WarmStarts | None = None,
        serve: ServiceStart = start_service,
    ) -> None:
        """Starts nothing yet.

        Args:
            config: what is run.
            screen: where people see it.
            interrupts: what people want.
            warm: starts all workers; it is ended with the launch. None: new interpreters start them
                the first time, and one that begins once they train starts them again.
            serve: starts a service.
        """
        self._config = config
        self._screen = screen
        self._interrupts = interrupts
        self._service = self._make_service(serve)
        self._warm = warm
        """Starts workers again, sooner than a new interpreter would."""
        self._warming: asyncio.Task[None] | None = None
        self._workers: list[Child] = []
        self._follower: Follower | None = None
        self._verdict = ExitCode.COMPLETE
        self._restarts = Restarts(config.settings.restarts)
        self._returns: Returns | None = None
        self._crashes: CrashBook | None = None
        self._late: list[Child] = []
        """Workers that came back after the run was over."""
        self._passed_on = WorkerInterrupts(config, screen, interrupts, self._workers)
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
        """Starts everything and waits until all workers have ended. Returns the run's verdict.

        Raises:
            CommandError: the service could not be started, or the line was not found.
        """
        line = await self._find_line()
        if line is None:
            return self._passed_on.verdict
        self.line = line
        self._keep_command(line)
        self._follower = Follower(self._config, line, self._screen)
        self._returns = Returns(self._config, self._follower, self._workers)
        has_journal = self._service is not None
        self._crashes = CrashBook(
            self._run_dir(line), self._workers, self._screen.say, has_journal=has_journal
        )
        # Before the first worker starts: SIGUSR1 ends a process that does not handle it.
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR1, self._passed_on.ask_for_checkpoint
        )
        settings = self._config.settings
        for slot in range(settings.workers + settings.spares):
            self._workers.append(await self._start_worker(line, slot))
        if self._service is not None:
            self._service.stand_by(self._follower)
        if settings.restarts and self._warm is None:
            self._warming = asyncio.create_task(self._warm_up(line), name="template")
        await self._until_workers_end()
        return self._verdict

    async def end(self) -> None:
        """Ends what is still running, the service last."""
        self._passed_on.stop()
        if self._crashes is not None:
            await self._crashes.close()
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        if self._warm is not None:
            self._warm.end()
        if self._service is not None:
            await self._service.end_standby(grace_s=_KILL_AFTER_S)
        workers = [worker.end(grace_s=_KILL_AFTER_S) for worker in self._workers]
        await asyncio.gather(*workers, return_exceptions=True)
        service = None if self._service is None else self._service.child
        if service is not None:
            if self._verdict is ExitCode.COMPLETE and self.joined:
                # The service of a complete line ends by itself once its streams are closed. Give it
                # time for that: terminated earlier, it could not write its last record.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_GRACE_S):
                        await service.process.wait()
            await service.end(grace_s=_KILL_AFTER_S)
        if self._follower is not None:
            await self._follower.close()

    async def _find_line(self) -> ServiceAddress | None:
        """Where the line is served; None if a person interrupted."""
        if self._service is not None:
            try:
                line = await self._service.start(self._interrupts.first)
            except CommandError:
                self._verdict = ExitCode.FAILED
                raise
            if line is None:
                self._verdict = self._passed_on.verdict
            return line
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

    def _make_service(self, serve: ServiceStart) -> OwnService | None:
        """The service to start; None: the line is served elsewhere."""
        config, checkpoint = self._config.service, self._config.checkpoint
        if config is None:
            return None
        begun_at = 0 if checkpoint is None else step_of(checkpoint)
        return OwnService(config, begun_at=begun_at, say=self._say_of_service, start=serve)

    async def _start_worker(
        self, line: ServiceAddress, slot: int, checkpoint: Path | None = None
    ) -> Child:
        """Starts the worker in a slot; with a `checkpoint`, it is there to bring it to the line."""
        run_dir = self._run_dir(line)
        make_run_dir(run_dir)
        self._screen.keep_output_in(f"{run_dir}/worker-N.log")
        return await (start_worker if self._warm is None else self._warm.start)(
            f"worker {slot}",
            self._command,
            environment=self._environment(line, slot, checkpoint),
            log=OutputLog(worker_log(run_dir, slot), self._screen.say),
            show=self._shower(slot),
        )

    def _run_dir(self, line: ServiceAddress) -> Path:
        service = self._config.service
        return service.folder if service else RUNS / line.run_id

    def _keep_command(self, line: ServiceAddress) -> None:
        """Leaves the script's command in the run's folder, for `andon audit` and the report."""
        service, settings = self._config.service, self._config.settings
        if service is None:
            return
        kept = KeptCommand.of(
            self._command,
            self._environment(line, 0),
            folder=Path.cwd(),
            answer_encoding=service.line.answer_encoding,
            # Said also if it is the default: who looks later knows only how many were there.
            flags=(f"--workers={settings.workers}", *as_flags(settings, LASTING)),
        )
        try:
            kept.write(service.folder)
        except OSError as error:
            self._screen.say(f"andon audit will ask for the command: {error}")

    @property
    def _command(self) -> list[str]:
        """The command of every worker."""
        module = ["-m"] if self._config.settings.module else []
        return [sys.executable, *module, *self._config.command]

    def _environment(
        self, line: ServiceAddress, slot: int, checkpoint: Path | None = None
    ) -> dict[str, str]:
        config = self._config
        if checkpoint is not None:
            config = replace(config, checkpoint=checkpoint)
        variables = {
            "ANDON_ADDRESS": line.address,
            "ANDON_RUN_ID": line.run_id,
            "ANDON_RUN_DIR": str(self._run_dir(line).absolute()),
        }
        return worker_environment(
            config,
            slot,
            base=os.environ,
            line=variables,
            master_port=self._master_port,
            spare=self._is_spare(slot) and checkpoint is None,
        )

    def _is_spare(self, slot: int) -> bool:
        """Whether the next process in a slot is a spare.

        If there are spares, one may have the place of a worker that died. The worker is a spare
        when it comes back, and gets the place at once if it is still free. Before the first step
        nobody can take a place, and the line waits for workers that are none.
        """
        settings, follower = self._config.settings, self._follower
        again = slot < len(self._workers) and follower is not None and follower.trained
        return slot >= settings.workers or (settings.spares > 0 and again)

    def _shower(self, slot: int) -> Callable[[str], None]:
        hear = self._screen.hear(slot)

        def show(line: str) -> None:
            # After Ctrl-C every script ends in a traceback of KeyboardInterrupt, which would only
            # hide what matters. The logs have it.
            if not self._interrupts.first.is_set():
                hear(line)

        return show

    def _keep_crash(self, event: _ProcessEvent, *, starts_again: bool) -> None:
        """Keeps a report of a worker that failed or had to leave, and says why it did."""
        child, book, follower = event.child, self._crashes, self._follower
        if child is None or book is None or follower is None or child not in self._workers:
            return
        if event.code == ExitCode.COMPLETE or self._interrupts.first.is_set():
            return
        if child in self._late or self._is_over or self._was_dropped(child):
            return
        book.keep(
            WorkerEnd(
                child=child,
                slot=self._workers.index(child),
                code=event.code,
                step=follower.step,
                starts_again=starts_again,
                notice=self._notice_of(child),
            )
        )

    def _show_end(self, child: Child | None, code: int) -> None:
        """Shows the last words of a worker that failed."""
        if child in self._workers and not self._interrupts.first.is_set():
            failed = code not in _ENDED_WELL and not self._was_dropped(child)
            self._screen.worker_ended(self._workers.index(child), failed=failed)

    async def _until_workers_end(self) -> None:
        events: asyncio.Queue[_ProcessEvent] = asyncio.Queue()
        watchers = [
            asyncio.create_task(_watch(events, worker.wait(), worker)) for worker in self._workers
        ]
        watchers.append(asyncio.create_task(_watch(events, self._interrupts.first.wait())))
        watchers.append(asyncio.create_task(_watch(events, self._interrupts.again.wait())))
        if self._service is not None and (service := self._service.child) is not None:
            watchers.append(asyncio.create_task(_watch(events, service.process.wait(), service)))
        running, deadline = len(self._workers), None
        try:
            while running:
                async with asyncio.timeout_at(deadline):
                    event = await events.get()
                if event.failure is not None:
                    raise event.failure
                self._show_end(event.child, event.code)
                # A worker that starts again is still one of the running ones: it has a new watcher,
                # and its old process decides nothing.
                again = await self._again(event, events) or self._revived(event, events)
                self._keep_crash(event, starts_again=again is not None)
                if again is not None:
                    watchers.append(again)
                    continue
                running -= event.child in self._workers
                # One deadline, from the first failure on: later events do not extend it.
                if self._judge(event) is not ExitCode.COMPLETE and deadline is None:
                    interrupted = self._verdict in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
                    grace_s = _INTERRUPTED_GRACE_S if interrupted else _GRACE_S
                    grace_s += self._passed_on.grace_s
                    deadline = asyncio.get_running_loop().time() + grace_s
                if self._interrupts.again.is_set():
                    return
        except TimeoutError:
            self._screen.say("the other workers did not end by themselves: they are terminated")
        finally:
            for watcher in watchers:
                watcher.cancel()

    async def _again(
        self, event: _ProcessEvent, events: asyncio.Queue[_ProcessEvent]
    ) -> asyncio.Task[None] | None:
        """Starts a worker that died again, if another try may succeed."""
        child, code = event.child, event.code
        if child is None or child not in self._workers or self._was_dropped(child):
            return None
        follower, returns = self._follower, self._returns
        assert follower is not None
        assert returns is not None
        if self._is_ending or self._is_over or self._notice_of(child):
            return None
        checkpoint = await returns.checkpoint_for(child, self._screen.say)
        if checkpoint is None and not returns.may_get_state(child, code):
            return None
        slot = self._workers.index(child)
        now = time.monotonic()
        wait_s = self._restarts.spend(
            code, now, trained=follower.trained, slot=slot, recovered=returns.has_recovered(slot)
        )
        if wait_s is None:
            return None
        whence = ""
        if checkpoint is not None:
            whence = (
                f", from the checkpoint of step {step_of(checkpoint)}, since no worker has the "
                "line's state any more"
            )
        most = self._restarts.most
        self._screen.say(
            f"{child.name} {ended_how(code)}: it starts again {_when(wait_s)} "
            f"(restart {most - self._restarts.left(now)} of {most}){whence}"
        )
        return asyncio.create_task(self._start_again(child, wait_s, events, checkpoint))

    @property
    def _is_ending(self) -> bool:
        """Whether something went wrong, or a person interrupted: nothing is started any more."""
        return self._verdict is not ExitCode.COMPLETE or self._interrupts.first.is_set()

    @property
    def _is_over(self) -> bool:
        """Whether the run is complete: by the last status, or by what its service left."""
        if self._follower is not None and self._follower.complete:
            return True
        service = self._config.service
        # A status may be missed: a line that was served again can end before anybody asks it.
        left = None if service is None else service_of(service.folder)
        return left is not None and left.complete_at_unix_s > 0

    def _is_late(self, child: Child) -> bool:
        """Whether a worker was started again and did not reach the line before the run was over."""
        returns = self._returns
        if returns is None or not self._is_over:
            return False
        return returns.is_missing(self._workers.index(child))

    def _end_late(self) -> None:
        """Ends workers that are looking for a line that is gone."""
        self._late = [each for each in self._workers if not each.ended and self._is_late(each)]
        for worker in self._late:
            worker.send(signal.SIGTERM)

    async def _start_again(
        self,
        child: Child,
        wait_s: float,
        events: asyncio.Queue[_ProcessEvent],
        checkpoint: Path | None,
    ) -> None:
        assert self.line is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._interrupts.first.wait()
        if self._is_ending or self._is_over:
            # While we waited, the run ended some other way: the worker counts as done.
            events.put_nowait(_ProcessEvent(child, ExitCode.COMPLETE))
            return
        slot = self._workers.index(child)
        try:
            # The new process takes the slot, so that the line knows it as the same worker.
            worker = await self._start_worker(self.line, slot, checkpoint)
            self._workers[slot] = worker
            assert self._returns is not None
            self._returns.started(slot)
        except (OSError, CommandError) as error:
            self._screen.say(f"{child.name} could not be started again: {error}")
            events.put_nowait(_ProcessEvent(child, ExitCode.FAILED))
            return
        await _watch(events, worker.wait(), worker)

    def _revived(
        self, event: _ProcessEvent, events: asyncio.Queue[_ProcessEvent]
    ) -> asyncio.Task[None] | None:
        """Starts the service again on its journal if it died; the workers wait for it."""
        service = self._service
        if service is None or event.child is not service.child or self._follower is None:
            return None
        if self._is_ending or self._is_over:
            return None
        wait_s = service.spend_restart(event.code)
        if wait_s is None:
            return None
        self._screen.say(
            f"the service {ended_how(event.code)}: it starts again on its journal {_when(wait_s)} "
            f"({service.tries})"
        )
        return asyncio.create_task(self._serve_again(service, wait_s, events))

    async def _serve_again(
        self, service: OwnService, wait_s: float, events: asyncio.Queue[_ProcessEvent]
    ) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._interrupts.first.wait()
            return
        try:
            child = await service.serve_again()
        except OSError as error:
            self._screen.say(f"the service could not be started again: {error}")
            events.put_nowait(_ProcessEvent(service.child, ExitCode.FAILED))
            return
        await _watch(events, child.process.wait(), child)

    async def _warm_up(self, line: ServiceAddress) -> None:
        # Not while workers start: they need the processor, and most mistakes of a script show then.
        assert self._follower is not None
        await self._follower.is_beyond(self._follower.step)
        await asyncio.sleep(STANDBY_AFTER_S)
        if self._restarts.left(time.monotonic()) == 0:
            return
        with suppress(OSError, TemplateGone):  # Without one, workers start as the first time.
            self._warm = WarmStarts.begin(self._command, self._environment(line, 0))

    def _say_of_service(self, line: str) -> None:
        self._screen.say(f"[service] {line}")

    def _judge(self, event: _ProcessEvent) -> ExitCode:
        """The verdict after this event. The first failure decides; later ones change nothing."""
        child, code = event.child, event.code
        if child is None:
            first = self._verdict is ExitCode.COMPLETE
            verdict = self._passed_on.pass_on(self._follower, first=first)
        elif self._service is not None and child is self._service.child:
            verdict = self._judge_service(code)
        else:
            verdict = self._judge_worker(child, code)
        # When one worker fails, the others fail because of it: their codes say nothing new.
        if self._verdict is ExitCode.COMPLETE:
            self._verdict = verdict
        return self._verdict

    def _judge_service(self, code: int) -> ExitCode:
        # The service of a complete line ends by itself, maybe before the last worker has. Any other
        # end of the service loses the line.
        if self._is_over:
            self._end_late()
            return ExitCode.COMPLETE
        self._screen.say(f"the service {ended_how(code)}: the line is lost")
        return ExitCode.LOST

    def _judge_worker(self, child: Child, code: int) -> ExitCode:
        if child in self._late or (code == ExitCode.COMPLETE and self._is_late(child)):
            self._screen.say(f"{child.name} came back too late: the others have ended the run")
        elif self._was_dropped(child):
            self._screen.say(f"{child.name} was dropped: the others go on without it")
        elif code == ExitCode.TERMINATED:
            self._screen.say(f"{child.name} was told to terminate: the others go on without it")
        elif code < 0 and (notice := self._notice_of(child)):
            self._screen.say(
                f"{child.name} {ended_how(code)} after a notice ({notice}): the others go on "
                "without it"
            )
        elif code < 0 and self._is_over and self._restarts.left(time.monotonic()):
            # It would be back, had the run gone on.
            self._screen.say(f"{child.name} {ended_how(code)} as the others ended the run")
        elif code != 0:
            self._screen.say(f"{child.name} {ended_how(code)}: its output is in {child.log}")
            if not self.joined and find_spec("torch") is None:
                self._screen.say(_NO_TORCH)
            return exit_code_of(code)
        return ExitCode.COMPLETE

    def _was_dropped(self, child: Child) -> bool:
        """Whether an operator dropped this worker.

        The journal has it before the worker hears of it, so that this can't be asked too early.
        Slots of a line that is served elsewhere are not known here.
        """
        service = self._config.service
        if service is None or child not in self._workers:
            return False
        slot = line_slot(self._config, self._workers.index(child))
        return slot in dropped_workers(service.folder / JOURNAL)

    def _notice_of(self, child: Child) -> str:
        """Why the machine of this worker is about to go; empty: it gave no notice, as far as the
        journal says. Whoever gave one is not started again, however its process ended."""
        service = self._config.service
        if service is None or child not in self._workers:
            return ""
        slot = line_slot(self._config, self._workers.index(child))
        return noticed_workers(service.folder / JOURNAL).get(slot, "")


@dataclass(frozen=True, slots=True)
class _ProcessEvent:
    """A process ended with an exit code; or, without a process, a person interrupted."""

    child: Child | None
    code: int
    failure: Exception | None = None
    """A bug of this program; the launch raises it when it takes the event from the queue."""


def _when(wait_s: float) -> str:
    return f"in {wait_s:g} s" if wait_s else "at once"


async def _watch(
    events: asyncio.Queue[_ProcessEvent], what: Awaitable[int], child: Child | None = None
) -> None:
    try:
        event = _ProcessEvent(child, await what)
    except Exception as error:  # raised by the task that reads the queue
        event = _ProcessEvent(child, ExitCode.FAILED, error)
    events.put_nowait(event)
