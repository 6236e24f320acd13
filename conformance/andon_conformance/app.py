"""`andon conformance`: judges a server or a client of andon.v1 by what it sends.

The `andon` command finds `main` by the entry point `conformance` of the group `andon.commands`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from andon.host.errors import CommandError, ExitCode
from andon_conformance import report
from andon_conformance.config import JudgeConfig, RunnerConfig, read_config
from andon_conformance.judge.bench import Waits
from andon_conformance.judge.client import start_command
from andon_conformance.judge.trial import Judgement, refuse_strange_names
from andon_conformance.runner.app import results_of

__all__ = ["judge_client", "judge_server", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `andon conformance` with the arguments after its name; returns the exit code."""
    try:
        config = read_config(sys.argv[1:] if argv is None else argv)
        if isinstance(config, RunnerConfig):
            return asyncio.run(judge_server(config))
        return asyncio.run(judge_client(config))
    except CommandError as error:
        print(f"andon: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


async def judge_server(config: RunnerConfig) -> int:
    """Judges a server: 0 if no check failed, else 1.

    Raises:
        CommandError: there is no server at the target, or its line is not a new one.
    """
    log = config.log
    if config.start and log is None:
        log = _new_log()
    results, failed = [], True
    try:
        async for result in results_of(replace(config, log=log)):
            results.append(result)
            if config.format == "table":
                print(report.check_line(result), flush=True)
        failed = any(result.outcome == "fail" for result in results)
        if config.format == "json":
            print(
                report.server_json(
                    results, target=config.reach.address, log=log if failed else config.log
                )
            )
        else:
            print(report.server_summary(results), flush=True)
    finally:
        if failed and log is not None:
            print(report.last_words(log), file=sys.stderr)
        elif log is not None and log != config.log:
            log.unlink()
    return ExitCode.FAILED if failed else ExitCode.COMPLETE


async def judge_client(config: JudgeConfig) -> int:
    """Judges a client: 0 if it did all that it must, else 1.

    Raises:
        UsageError: there is no check of a name that was asked for.
    """
    refuse_strange_names(config.only)
    began, all_played = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="andon-judge-") as folder:
        trial = Judgement(
            start_command(config.command),
            Path(folder),
            waits=Waits(patience_s=config.timeout_s, quiet_s=config.quiet_s),
            jobs=config.jobs,
            only=config.only,
        )
        async for played in trial.play():
            all_played.append(played)
            if config.format != "json":
                print("\n".join(report.scenario_lines(played)), flush=True)
    seconds = time.monotonic() - began
    show = report.client_json if config.format == "json" else report.client_summary
    print(show(all_played, seconds))
    return ExitCode.COMPLETE if all(played.holds for played in all_played) else ExitCode.FAILED


def _new_log() -> Path:
    """An empty file for the server's output, which must not be mixed with the report."""
    with tempfile.NamedTemporaryFile(
        prefix="andon-conformance-", suffix=".log", delete=False
    ) as file:
        return Path(file.name)
