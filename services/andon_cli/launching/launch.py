"""One launch: a service and its workers, from their start until none is left.

Theory of operation. A worker that dies is started again. If no other process has the line's state
any more, it brings the newest whole checkpoint of the run, and the line goes on from there.

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
from urllib.parse import urlsplit

from andon.host.errors import CommandError, ExitCode, ResumeRefused
from andon.host.manifest import checkpoints_in, step_of
from andon_cli.client import LineClient
from andon_cli.config import RunConfig
from andon_cli.drawing.screen import Screen
from andon_cli.launching.follower import Follower
from andon_cli.launching.output import OutputLog
from andon_cli.launching.processes import (
    Child,
    Restarts,
    Standby,
    ended_how,
    exit_code_of,
    free_port,
    line_slot,
    start_service,
    start_worker,
    worker_environment,
)
from andon_cli.launching.template import TemplateGone
from andon_cli.launching.warm import WarmStarts
from andon_server.book import dropped_workers
from andon_server.process import Interrupts
from andon_server.resuming import checkpoints_written, search_history
from andon_server.runs import (
    JOURNAL,
    RUNS,
    ServiceAddress,
    make_run_dir,
    service_of,
    worker_log,
)
from andon_server.settings import ServeConfig

__all__ = ["Launch"]

_GRACE_S = 5.0
"""How long the other workers may take to end by themselves once the verdict is known."""
_INTERRUPTED_GRACE_S = 20.0
"""How long they may take after Ctrl-C: one may be writing a checkpoint."""
_CHECKPOINT_S = 20.0
"""How long a step and its checkpoint may take after Ctrl-C, before workers are interrupted."""
_ASK_EVERY_S = 0.1
_KILL_AFTER_S = 3.0
"""How long a process may take to end after SIGTERM."""
_STANDBY_AFTER_S = 5.0
"""How long a line takes steps before a standby and a template are started: most short runs need
none."""
_REVIVALS = 4
"""How often in a row a service that died is started again while the line takes no step."""
_NO_TORCH = (
    f"PyTorch is not installed for {sys.executable}: pip install 'andon[trainer]', about 190 MB as "
    "a CPU build (--extra-index-url https://download.pytorch.org/whl/cpu) and gigabytes with CUDA"
)
_ENDED_WELL = (ExitCode.COMPLETE, ExitCode.TERMINATED)
"""These ends of a worker need no explanation."""


class Launch:
    """The processes of one `andon run`."""

    def __init__(self, config: RunConfig, screen: Screen, interrupts: Interrupts) -> None:
        """Starts nothing yet."""
        self._config = config
        self._screen = screen
        self._interrupts = interrupts
        self._service: Child | None = None
        self._standby: Standby | None = None
        """Takes the service's place when it dies."""
        self._standing_by: asyncio.Task[None] | None = None
        """Starts a standby."""
        self._warm: WarmStarts | None = None
        """Starts workers again, sooner than a new interpreter would."""
        self._warming: asyncio.Task[None] | None = None
        self._workers: list[Child] = []
        self._follower: Follower | None = None
        self._verdict = ExitCode.COMPLETE
        self._restarts = Restarts(config.settings.restarts)
        self._revivals = Restarts(_REVIVALS)
        self._step_of_revival = 0
        """The line's step when its service was last started again."""
        self._restarted_at: dict[int, float] = {}
        """When the worker in a slot was last started again: a monotonic time in seconds."""
        self._step_of_restart: dict[int, int] = {}
        """The line's step then."""
        self._late: list[Child] = []
        """Workers that came back after the run was over."""
        self._checkpointing: asyncio.Task[None] | None = None
        """Waits for the checkpoint of a Ctrl-C."""
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
            return self._interrupted
        self.line = line
        self._follower = Follower(self._config, line, self._screen)
        # Before the first worker starts: SIGUSR1 ends a process that does not handle it.
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._ask_for_checkpoint)
        settings = self._config.settings
        for slot in range(settings.workers + settings.spares):
            self._workers.append(await self._start_worker(line, slot))
        self._have_standby()
        if settings.restarts:
            self._warming = asyncio.create_task(self._warm_up(line), name="template")
        await self._until_workers_end()
        return self._verdict

    async def end(self) -> None:
        """Ends what is still running, the service last."""
        self._stop_checkpointing()
        for starting in (self._standing_by, self._warming):
            if starting is not None:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
        if self._warm is not None:
            self._warm.end()
        if self._standby is not None:
            await self._standby.end(grace_s=_KILL_AFTER_S)
        workers = [worker.end(grace_s=_KILL_AFTER_S) for worker in self._workers]
        await asyncio.gather(*workers, return_exceptions=True)
        if self._service is not None:
            if self._verdict is ExitCode.COMPLETE and self.joined:
                # The service of a complete line ends by itself once its streams are closed. Give it
                # time for that: terminated earlier, it could not write its last record.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._service.process.wait(), _GRACE_S)
            await self._service.end(grace_s=_KILL_AFTER_S)
        if self._follower is not None:
            await self._follower.close()

    async def _find_line(self) -> ServiceAddress | None:
        """Where the line is served; None if a person interrupted."""
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
        self._service, announced = await start_service(self._config.service, self._say_of_service)
        reading = asyncio.create_task(announced.readline())
        stopping = asyncio.create_task(self._interrupts.first.wait())
        # The service may hang, for example on a journal that is locked: Ctrl-C must work here, too.
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
                f"the service ended with exit code {code} before it served: its output is above"
            ) from None

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

    def _ask_for_checkpoint(self) -> None:
        """Passes SIGUSR1 on. The writer, if here, writes a checkpoint after the current step."""
        for worker in self._workers:
            worker.send(signal.SIGUSR1)

    def _shower(self, slot: int) -> Callable[[str], None]:
        hear = self._screen.hear(slot)

        def show(line: str) -> None:
            # After Ctrl-C every script ends in a traceback of KeyboardInterrupt, which would only
            # hide what matters. The logs have it.
            if not self._interrupts.first.is_set():
                hear(line)

        return show

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
        if self._service is not None:
            ending = self._service.process.wait()
            watchers.append(asyncio.create_task(_watch(events, ending, self._service)))
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
                if again is not None:
                    watchers.append(again)
                    continue
                running -= event.child in self._workers
                # One deadline, from the first failure on: later events do not extend it.
                if self._judge(event) is not ExitCode.COMPLETE and deadline is None:
                    interrupted = self._verdict in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
                    grace_s = _INTERRUPTED_GRACE_S if interrupted else _GRACE_S
                    grace_s += 0.0 if self._checkpointing is None else _CHECKPOINT_S
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
        follower = self._follower
        assert follower is not None
        over = self._verdict is not ExitCode.COMPLETE or self._interrupts.first.is_set()
        if over or self._is_over:
            return None
        checkpoint = None if self._has_holder(child) else await self._newest_checkpoint()
        if checkpoint is None and not self._has_others(child):
            return None
        slot = self._workers.index(child)
        recovered = slot in self._step_of_restart and self._took_part(slot)
        wait_s = self._restarts.spend(
            code, trained=follower.trained, slot=slot, recovered=recovered
        )
        if wait_s is None:
            return None
        whence = ""
        if checkpoint is not None:
            whence = (
                f", from the checkpoint of step {step_of(checkpoint)}, since no worker has the "
                "line's state any more"
            )
        self._screen.say(
            f"{child.name} {ended_how(code)}: it starts again {_when(wait_s)} "
            f"(restart {self._restarts.used} of {self._restarts.most}){whence}"
        )
        return asyncio.create_task(self._start_again(child, wait_s, events, checkpoint))

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
        slot = self._workers.index(child)
        restarted_at, follower = self._restarted_at.get(slot), self._follower
        if restarted_at is None or follower is None or not self._is_over:
            return False
        return not follower.was_live_since(line_slot(self._config, slot), restarted_at)

    def _end_late(self) -> None:
        """Ends workers that are looking for a line that is gone."""
        self._late = [each for each in self._workers if not each.ended and self._is_late(each)]
        for worker in self._late:
            worker.send(signal.SIGTERM)

    def _has_others(self, child: Child) -> bool:
        """Whether another worker may still be on the line, or is about to come back to it."""
        return self._has_elsewhere or any(
            each is not child and not each.ended for each in self._workers
        )

    def _has_holder(self, child: Child) -> bool:
        """Whether another worker may still have the state that this one needs after a restart."""
        return self._has_elsewhere or any(
            each is not child and not each.ended and self._took_part(slot)
            for slot, each in enumerate(self._workers)
        )

    @property
    def _has_elsewhere(self) -> bool:
        """Whether workers are expected that this launch did not start."""
        service = self._config.service
        return service is None or service.workers > self._config.settings.workers

    def _took_part(self, slot: int) -> bool:
        """Whether the process in a slot has had the line's state, as far as is known here."""
        since, follower = self._step_of_restart.get(slot), self._follower
        assert follower is not None
        return since is None or follower.step_of(slot) > since

    async def _newest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint in the run's history; None: there is none."""
        service = self._config.service
        if service is None or not checkpoints_in(service.folder):
            return None
        try:
            # On a thread: it reads all of it, and Ctrl-C must work meanwhile.
            found = (await asyncio.to_thread(search_history, service.folder)).newest
        except ResumeRefused as error:
            self._screen.say(f"no checkpoint can be looked for: {error}")
            return None
        return None if found is None else found[0].absolute()

    async def _start_again(
        self,
        child: Child,
        wait_s: float,
        events: asyncio.Queue[_ProcessEvent],
        checkpoint: Path | None,
    ) -> None:
        assert self.line is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._interrupts.first.wait(), wait_s)
        if (
            self._verdict is not ExitCode.COMPLETE
            or self._interrupts.first.is_set()
            or self._is_over
        ):
            # While we waited, the run ended some other way: the worker counts as done.
            events.put_nowait(_ProcessEvent(child, ExitCode.COMPLETE))
            return
        slot = self._workers.index(child)
        try:
            # The new process takes the slot, so that the line knows it as the same worker.
            worker = await self._start_worker(self.line, slot, checkpoint)
            self._workers[slot] = worker
            self._restarted_at[slot] = time.monotonic()
            assert self._follower is not None
            self._step_of_restart[slot] = self._follower.step
        except (OSError, CommandError) as error:
            self._screen.say(f"{child.name} could not be started again: {error}")
            events.put_nowait(_ProcessEvent(child, ExitCode.FAILED))
            return
        await _watch(events, worker.wait(), worker)

    def _revived(
        self, event: _ProcessEvent, events: asyncio.Queue[_ProcessEvent]
    ) -> asyncio.Task[None] | None:
        """Starts the service again on its journal if it died; the workers wait for it."""
        child, follower = event.child, self._follower
        if child is None or child is not self._service or follower is None:
            return None
        over = self._verdict is not ExitCode.COMPLETE or self._interrupts.first.is_set()
        if over or self._is_over:
            return None
        if follower.step > self._step_of_revival:
            # The one before did its work: this is another accident, and not the same again.
            self._revivals = Restarts(_REVIVALS)
        self._step_of_revival = follower.step
        wait_s = self._revivals.spend(event.code, trained=follower.trained)
        if wait_s is None:
            return None
        self._screen.say(
            f"the service {ended_how(event.code)}: it starts again on its journal {_when(wait_s)} "
            f"({self._revivals.used} of {self._revivals.most})"
        )
        return asyncio.create_task(self._serve_again(wait_s, events))

    async def _serve_again(self, wait_s: float, events: asyncio.Queue[_ProcessEvent]) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._interrupts.first.wait(), wait_s)
            return
        standby, self._standby = self._standby, None
        served = None if standby is None else standby.serve()
        try:
            served = served or await start_service(self._service_again(), self._say_of_service)
        except OSError as error:
            self._screen.say(f"the service could not be started again: {error}")
            events.put_nowait(_ProcessEvent(self._service, ExitCode.FAILED))
            return
        self._service, _ = served
        self._have_standby()
        await _watch(events, self._service.process.wait(), self._service)

    def _service_again(self) -> ServeConfig:
        """What a service that takes the first one's place serves."""
        config, line, follower = self._config.service, self.line, self._follower
        assert config is not None
        assert line is not None
        assert follower is not None
        # At the same places: the workers and whoever reads the metrics know no others.
        config = replace(
            config,
            port=urlsplit(f"//{line.address}").port,
            metrics_port=urlsplit(line.metrics_url).port,
        )
        if follower.step > self._begun_at:
            # The journal goes on from there by now: rolled back again, it would lose these steps.
            config = replace(config, resume_from=None)
        return config

    @property
    def _begun_at(self) -> int:
        """The step of the checkpoint that the run was begun from; 0: from none."""
        return 0 if self._config.checkpoint is None else step_of(self._config.checkpoint)

    def _have_standby(self) -> None:
        """Starts a standby, unless the service is somebody else's."""
        if self._config.service is not None:
            self._standing_by = asyncio.create_task(self._stand_by(), name="standby")

    async def _stand_by(self) -> None:
        # Not before the line has made a step that it had not when it began: then it is known from
        # where a service goes on, and starting workers are not held up.
        assert self._follower is not None
        await self._follower.is_beyond(max(self._begun_at, self._follower.step))
        await asyncio.sleep(_STANDBY_AFTER_S)
        with suppress(OSError):  # Without one, the service starts as slowly as the first.
            self._standby = await Standby.start(self._service_again(), self._say_of_service)

    async def _warm_up(self, line: ServiceAddress) -> None:
        # Not while workers start: they need the processor, and most mistakes of a script show then.
        assert self._follower is not None
        await self._follower.is_beyond(self._follower.step)
        await asyncio.sleep(_STANDBY_AFTER_S)
        if self._restarts.used == self._restarts.most:
            return
        with suppress(OSError, TemplateGone):  # Without one, workers start as the first time.
            self._warm = WarmStarts(self._command, self._environment(line, 0))

    def _say_of_service(self, line: str) -> None:
        self._screen.say(f"[service] {line}")

    def _judge(self, event: _ProcessEvent) -> ExitCode:
        """The verdict after this event. The first failure decides; later ones change nothing."""
        child, code = event.child, event.code
        if child is None:
            verdict = self._pass_on()
        elif child is self._service:
            verdict = self._judge_service(code)
        else:
            verdict = self._judge_worker(child, code)
        # When one worker fails, the others fail because of it: their codes say nothing new.
        if self._verdict is ExitCode.COMPLETE:
            self._verdict = verdict
        return self._verdict

    def _pass_on(self) -> ExitCode:
        """Passes an interrupt on to the workers, after a checkpoint if the run writes any."""
        verdict = self._interrupted
        first = self._verdict is ExitCode.COMPLETE
        self._stop_checkpointing()
        run_dir = self._checkpoints_at if first and verdict is ExitCode.INTERRUPTED else None
        if first:
            what = "end" if run_dir is None else "write a checkpoint and end"
            self._screen.say(f"interrupted: the workers {what}; once more ends them at once")
        if run_dir is not None:
            self._checkpointing = asyncio.create_task(self._checkpoint_then_interrupt(run_dir))
            return verdict
        self._interrupt_workers()
        return verdict

    def _interrupt_workers(self) -> None:
        """Passes SIGTERM on as itself, and anything else as Ctrl-C."""
        # Whoever is started where SIGINT is ignored goes on ignoring it, and so do the workers.
        deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        terminated = deaf or self._interrupted is ExitCode.TERMINATED
        for worker in self._workers:
            worker.send(signal.SIGTERM if terminated else signal.SIGINT)

    @property
    def _checkpoints_at(self) -> Path | None:
        """The run's folder if the run writes checkpoints and is taking steps; else None."""
        service, follower = self._config.service, self._follower
        if service is None or follower is None or not follower.runs:
            return None
        wanted = self._config.settings.checkpoint_every is not None or checkpoints_in(
            service.folder
        )
        return service.folder if wanted else None

    async def _checkpoint_then_interrupt(self, run_dir: Path) -> None:
        """Asks the writer for a checkpoint until one is new or time is up, then interrupts."""
        before = checkpoints_written(run_dir)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CHECKPOINT_S):
                while checkpoints_written(run_dir) <= before:
                    # Ask repeatedly: rank 0 ignores a request at a step that it has just saved.
                    self._ask_for_checkpoint()
                    await asyncio.sleep(_ASK_EVERY_S)
        self._interrupt_workers()

    def _stop_checkpointing(self) -> None:
        if self._checkpointing is not None:
            self._checkpointing.cancel()

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
        elif code < 0 and self._is_over and self._restarts.used < self._restarts.most:
            # It would be back, had the run gone on.
            self._screen.say(f"{child.name} {ended_how(code)} as the others ended the run")
        elif code != 0:
            self._screen.say(f"{child.name} {ended_how(code)}: its output is in {child.log}")
            if not self.joined and find_spec("torch") is None:
                self._screen.say(_NO_TORCH)
            return exit_code_of(code)
        return ExitCode.COMPLETE

    @property
    def _interrupted(self) -> ExitCode:
        """The verdict after a signal: SIGTERM counts as itself, any other as Ctrl-C."""
        terminated = self._interrupts.number == signal.SIGTERM
        return ExitCode.TERMINATED if terminated else ExitCode.INTERRUPTED

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
