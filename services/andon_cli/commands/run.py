"""`andon run`: a service, its workers, their progress, and a report at the end."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, cast

from andon.host.errors import ExitCode
from andon.host.manifest import checkpoints_in
from andon.host.private_files import make_folder, write_whole
from andon.protocol.records import accuracy_of
from andon_cli.commands.report import REPORT, write_report
from andon_cli.commands.trace import TraceUnreadable, merge_run
from andon_cli.config import RunConfig
from andon_cli.drawing.screen import RunConsole, Screen
from andon_cli.drawing.texts import accuracy_text, duration
from andon_cli.kept_command import KeptCommand, resuming
from andon_cli.launching.launch import Launch
from andon_cli.launching.output import RunOutput
from andon_cli.launching.processes import ServiceStart, start_service
from andon_cli.launching.warm import WarmStarts
from andon_cli.settings import as_table
from andon_coordinator.transport.store import JournalError
from andon_server.book import RunBook, halt_fields, outcomes_of
from andon_server.past_runs import state_of
from andon_server.process import Interrupts
from andon_server.runs import JOURNAL, RUNS
from andon_server.settings import ServeConfig

__all__ = ["RunReport", "read_report", "run"]


_REDRAW_EVERY_S = 0.2


async def run(
    config: RunConfig, warm: WarmStarts | None = None, serve: ServiceStart = start_service
) -> int:
    """Runs the script to its end. Returns the exit code.

    Args:
        config: what is run.
        warm: as `Launch` has it.
        serve: as `Launch` has it.

    Raises:
        CommandError: the service could not be started, or the line was not found.
    """
    began = time.monotonic()
    output = cast(TextIO, RunOutput(sys.stdout))  # rich uses nothing else of a file
    screen = Screen(
        RunConsole(file=output, highlight=False),
        on_halt=config.settings.on_halt,
        output=config.settings.output,
    )
    if config.unused:
        unused = ", ".join(config.unused)
        screen.say(f"not used, since the line is served elsewhere: {unused}")
    with Interrupts() as interrupts:
        launch = Launch(config, screen, interrupts, warm, serve)
        drawing = asyncio.create_task(_redraw(screen), name="board")
        with screen:
            try:
                verdict = await launch.run()
            finally:
                drawing.cancel()
                await launch.end()
        _merge_trace(config, launch, screen)
        return _conclude(config, launch, screen, verdict, time.monotonic() - began)


async def _redraw(screen: Screen) -> None:
    """Draws the board again and again: workers print, and time passes, between two statuses."""
    while screen.has_board:
        screen.draw(time.monotonic())
        await asyncio.sleep(_REDRAW_EVERY_S)


def _merge_trace(config: RunConfig, launch: Launch, screen: Screen) -> None:
    """Merges the parts of the trace, however the run ended."""
    trace = config.settings.trace
    if trace is None or launch.line is None:
        return
    try:
        parts = merge_run(trace, launch.line.run_id)
    except TraceUnreadable as error:
        screen.say(str(error))
        return
    if parts:
        screen.say(f"trace {trace}: andon trace shows where the time went, Perfetto shows it all")
    else:
        screen.say(f"the trace {trace} was not written: no worker here got as far as to join")


def _conclude(
    config: RunConfig, launch: Launch, screen: Screen, verdict: ExitCode, seconds: float
) -> int:
    if config.service is None:
        screen.say(f"the workers here have left the line at {config.settings.join}")
        return verdict
    report = read_report(
        config.service.folder / JOURNAL,
        run_id=config.service.run_id,
        seconds=seconds,
        metrics_url=launch.line.metrics_url if launch.line else "",
        verdict=verdict,
    )
    report = replace(report, restarts=launch.restarts, settings=as_table(config.settings))
    if not launch.joined and verdict is ExitCode.COMPLETE:
        screen.say(
            "the script ended and was never on the line: does it make a Line(), call line.prepare, "
            "and iterate the loader that it returns? docs/guide/plain-script.md has whole scripts, "
            "and docs/guide/pytorch.md what to write for each feature of PyTorch"
        )
    screen.say(report.outcome)
    if config.settings.report is not None:
        try:
            report.write(config.settings.report)
            screen.say(f"report {config.settings.report}")
        except OSError as error:
            screen.say(f"the report {config.settings.report} can't be written: {error.strerror}")
    _write_page(config.service.folder, report, screen)
    if report.exit_code != ExitCode.COMPLETE and checkpoints_in(config.service.folder):
        kept = KeptCommand.read(config.service.folder)
        command = resuming(kept, _named(config.service), config.settings.workers)
        screen.say(f"go on from its newest checkpoint: {command}")
    if launch.line is not None:
        screen.say(f"journal {report.journal}  metrics were at {launch.line.metrics_url}")
    return report.exit_code


def _write_page(folder: Path, report: RunReport, screen: Screen) -> None:
    """Writes the run's page for people; a run of which nothing is known has none."""
    if report.problem:
        return
    try:
        screen.say(f"page {write_report(folder)}: all that happened, for a browser")
    except JournalError as error:
        screen.say(f"no page of the run: {error}")
    except OSError as error:
        screen.say(f"the page {folder / REPORT} can't be written: {error.strerror}")


def _named(service: ServeConfig) -> str:
    """How `--resume` finds the run: by its id if it is under runs/, else by its folder."""
    usual = (RUNS / service.run_id).absolute()
    return (
        service.run_id if service.folder.absolute() == usual else shlex.quote(f"{service.folder}")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The outcome of a run.

    `state` is that of the run by its journal, as `andon history` says it; empty if there is none.
    `losses`, `samples` and `correct` (None: not counted) hold one number for each committed step.
    `digests` has the SHA-256 of each worker's final weights by worker id. `seconds` is the time of
    the whole command, `training_seconds` the time from the line's first record to its last.
    """

    run_id: str
    steps: int
    state: str
    losses: list[float]
    samples: list[int]
    correct: list[int | None]
    digests: dict[str, str]
    seconds: float
    training_seconds: float
    journal: str
    metrics_url: str
    halts: list[dict[str, Any]]
    complete: bool
    exit_code: int
    restarts: int = 0
    """How often workers were started again."""
    settings: dict[str, str] = field(default_factory=dict)
    """The settings that were chosen for the run, by their keys in a settings file."""
    problem: str = ""
    """Why the journal can't be read, in which case nothing is known of the steps; else empty."""

    @property
    def outcome(self) -> str:
        """The run's last line, such as
        `complete: 1000 steps, loss 1.871, 1m58s, all workers at digest 9c1e04..., runs/7f3a`.
        """
        if self.problem:
            parts = [self.problem]
        else:
            parts = [f"{self.steps} step{'' if self.steps == 1 else 's'}"]
        if self.losses:
            parts.append(f"loss {self.losses[-1]:.3f}")
            accuracy = accuracy_of(self.correct[-1], self.samples[-1])
            parts += [] if accuracy is None else [accuracy_text(accuracy)]
        # The time that the history and the board say, not that of the command.
        parts += [duration(self.training_seconds)] if self.steps else []
        digests = set(self.digests.values())
        if self.complete and len(digests) == 1:
            parts.append(f"all workers at digest {digests.pop()[:6]}...")
        parts.append(str(Path(self.journal).parent))
        return f"{self._ending}: {', '.join(parts)}"

    @property
    def _ending(self) -> str:
        """The run's state, and how the command ended if that says more: `stopped (failed)`."""
        command = _HEADINGS.get(self.exit_code, "failed")
        if not self.state or self.state == command:
            return command
        return self.state if self.exit_code == ExitCode.COMPLETE else f"{self.state} ({command})"

    def write(self, path: Path) -> None:
        """Writes the report as JSON, completely or not at all."""
        make_folder(path.parent)
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")


_HEADINGS: dict[int, str] = {
    ExitCode.COMPLETE: "complete",
    ExitCode.HALTED: "halted",
    ExitCode.REFUSED: "refused",
    ExitCode.LOST: "lost the line",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.TERMINATED: "terminated",
}


def read_report(
    journal: Path, *, run_id: str, seconds: float, metrics_url: str, verdict: ExitCode
) -> RunReport:
    """The report of a run whose service has ended.

    Args:
        journal: the journal's path. If the service failed early, there may be no journal.
        run_id: names the run.
        seconds: how long the command took.
        metrics_url: where the metrics were.
        verdict: what the exit codes say. A run that is not complete by its journal does not count
            as complete, whatever the exit codes say.
    """
    problem = ""
    try:
        book, steps = RunBook.read(journal), outcomes_of(journal)
    except JournalError as error:
        book, steps, problem = None, [], f"{error}"
    complete = book is not None and book.complete
    if verdict is ExitCode.COMPLETE and not complete:
        verdict = ExitCode.HALTED if book and book.unanswered else ExitCode.FAILED
    return RunReport(
        run_id=run_id,
        steps=book.steps if book else 0,
        state=state_of(book, journal.parent) if book else "",
        losses=[step.loss for step in steps],
        samples=[step.samples for step in steps],
        correct=[step.correct for step in steps],
        digests={
            str(worker): digest for worker, digest in sorted(book.digests.items() if book else ())
        },
        seconds=round(seconds, 3),
        training_seconds=round(book.seconds, 3) if book else 0.0,
        journal=str(journal),
        metrics_url=metrics_url,
        halts=[halt_fields(halt) for halt in book.halts] if book else [],
        complete=complete,
        problem=problem,
        exit_code=int(verdict),
    )
