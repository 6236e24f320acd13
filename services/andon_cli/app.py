"""The `andon` command: reads its configuration, runs one verb, and ends with its exit code."""

# Each verb is imported when it is run: `andon status` needs no server, `andon serve` no screen,
# and `andon health`, which containers run every few seconds, next to nothing.

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from andon_cli.questions import (
    QUESTIONS,
    CertsConfig,
    DoctorConfig,
    DrainConfig,
    HaltConfig,
    HealthConfig,
    HistoryConfig,
    ResumeConfig,
    certs_config,
    health_config,
)
from andon_cli.settings import Settings, read_settings
from andon_server.errors import ConsoleError, ExitCode

__all__ = ["main"]

_OWN = {"run", "serve", *QUESTIONS}
"""Verbs of this package: the metadata of installed packages is read for others only."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `andon` command and returns its exit code."""
    try:
        code = _answer(argv)
    except BrokenPipeError:  # `andon status | head -1`: nobody reads any more
        code = ExitCode.UNREAD
    except SystemExit as ended:  # argparse showed help or refused a flag
        code = ended.code if isinstance(ended.code, int) else ExitCode.COMPLETE
    return _flushed(code)


def _flushed(code: int) -> int:
    """The exit code of a verb that ended with `code`, once all that it printed is written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is buffered must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code or ExitCode.UNREAD
        print(f"andon: the output can't be written: {error.strerror}", file=sys.stderr)
        return code or ExitCode.FAILED
    return code


def _answer(argv: Sequence[str] | None) -> int:
    """Runs one verb; its exit code.

    Raises:
        BrokenPipeError: nobody reads what it prints.
    """
    try:
        given = list(sys.argv[1:] if argv is None else argv)
        plugin = _plugin(given[0]) if given else None
        if plugin is not None:
            return plugin(given[1:])
        settings = read_settings(given)
        if settings.verb == "health":
            from andon_cli.health import show_health

            return show_health(health_config(settings))
        if settings.verb == "certs":
            from andon_cli.certs import make_certificates

            return make_certificates(certs_config(settings))
        return asyncio.run(_run(settings))
    except ConsoleError as error:
        print(f"andon: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _plugin(verb: str) -> Callable[[Sequence[str]], int] | None:
    """The verb of another installed package, such as `andon conformance`; None if it is ours.

    A package offers a verb by an entry point of the group `andon.commands`: a function that takes
    the arguments after the verb and returns the exit code.
    """
    if verb.startswith("-") or verb in _OWN:
        return None
    for found in entry_points(group="andon.commands", name=verb):
        command: Callable[[Sequence[str]], int] = found.load()
        return command
    return None


async def _run(settings: Settings) -> int:
    from andon_cli.config import RunConfig, ServeConfig, config_of
    from andon_cli.reducer_config import ReducerConfig

    match config_of(settings):
        case RunConfig() as config:
            from andon_cli.run import run

            return await run(config)
        case ServeConfig() as config:
            from andon_cli.serve import serve

            return await serve(config)
        case ReducerConfig() as config:
            from andon_cli.serve_reducer import serve_reducer

            return await serve_reducer(config)
        case HaltConfig() as config:
            from andon_cli.operate import halt_line

            return await halt_line(config)
        case ResumeConfig() as config:
            from andon_cli.operate import resume_line

            return await resume_line(config)
        case DrainConfig() as config:
            from andon_cli.operate import drain_line

            return await drain_line(config)
        case HistoryConfig() as config:
            from andon_cli.history import show_history

            return show_history(config)
        case DoctorConfig() as config:
            from andon_cli.doctor.app import examine

            return await examine(config)
        case HealthConfig() | CertsConfig():
            raise AssertionError("answered already")
        case config:
            from andon_cli.status import show_status

            return await show_status(config)
