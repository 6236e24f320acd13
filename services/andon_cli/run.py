"""`andon run`: one service, its workers, their progress, and what the run came to."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TextIO, cast

from andon.host.errors import ExitCode
from andon.host.manifest import checkpoints_in
from andon_cli.config import RunConfig
from andon_cli.launch import Launch
from andon_cli.output import RunOutput
from andon_cli.report import read_report
from andon_cli.screen import RunConsole, Screen
from andon_server.process import Interrupts
from andon_server.runs import JOURNAL, RUNS
from andon_server.settings import ServeConfig

__all__ = ["run"]


async def run(config: RunConfig) -> int:
    """Runs the script to its end; the exit code.

    Raises:
        CommandError: the service could not be started, or the line not be found.
    """
    began = time.monotonic()
    output = cast(TextIO, RunOutput(sys.stdout))  # a console asks for no more of a file
    screen = Screen(RunConsole(file=output, highlight=False), on_halt=config.settings.on_halt)
    with Interrupts() as interrupts:
        launch = Launch(config, screen, interrupts)
        with screen:
            try:
                verdict = await launch.run()
            finally:
                await launch.end()
        return _conclude(config, launch, screen, verdict, time.monotonic() - began)


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
    report = replace(report, restarts=launch.restarts)
    if not launch.joined and verdict is ExitCode.COMPLETE:
        screen.say("the script ended and was never on the line: does it make a Line() and prepare?")
    screen.say(report.outcome)
    if config.settings.report is not None:
        try:
            report.write(config.settings.report)
            screen.say(f"report {config.settings.report}")
        except OSError as error:
            screen.say(f"the report {config.settings.report} can't be written: {error.strerror}")
    if report.exit_code != ExitCode.COMPLETE and checkpoints_in(config.service.folder):
        screen.say(f"go on from its newest checkpoint: andon run --resume {_named(config.service)}")
    if launch.line is not None:
        screen.say(f"journal {report.journal}  metrics were at {launch.line.metrics_url}")
    return report.exit_code


def _named(service: ServeConfig) -> str:
    """The run's id if that finds it, else its folder."""
    usual = RUNS / service.run_id
    return service.run_id if service.folder.absolute() == usual.absolute() else str(service.folder)
