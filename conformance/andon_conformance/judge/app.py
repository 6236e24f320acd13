"""`andon conformance judge`: plays a scripted line to a client, and says what it did wrong."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from andon_conformance.judge.bench import Waits
from andon_conformance.judge.client import start_command
from andon_conformance.judge.config import JudgeConfig
from andon_conformance.judge.report import report_json, scenario_lines, summary_line
from andon_conformance.judge.trial import Trial, refuse_strange_names
from andon_server.errors import ExitCode

__all__ = ["judge_client"]


async def judge_client(config: JudgeConfig) -> int:
    """Judges a client: 0 if it did all that it must, else 1.

    Raises:
        UsageError: there is no such check.
    """
    refuse_strange_names(config.only)
    began, all_played = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="andon-judge-") as folder:
        trial = Trial(
            start_command(config.command),
            Path(folder),
            waits=Waits(patience_s=config.timeout_s, quiet_s=config.quiet_s),
            jobs=config.jobs,
            only=config.only,
        )
        async for played in trial.play():
            all_played.append(played)
            if config.format != "json":
                print("\n".join(scenario_lines(played)), flush=True)
    seconds = time.monotonic() - began
    show = report_json if config.format == "json" else summary_line
    print(show(all_played, seconds))
    holds = all(played.holds for played in all_played)
    return ExitCode.COMPLETE if holds else ExitCode.FAILED
