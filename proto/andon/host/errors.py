"""Errors of the console, each with the exit code that it ends the command with."""

from __future__ import annotations

import enum

__all__ = [
    "CommandError",
    "ExitCode",
    "LineRefused",
    "LineUnreachable",
    "ResumeRefused",
    "UsageError",
    "WrongRun",
]


class ExitCode(enum.IntEnum):
    """How the `andon` command ends; a worker's own codes mean the same."""

    COMPLETE = 0
    FAILED = 1
    USAGE = 2
    HALTED = 3
    REFUSED = 4
    LOST = 5
    INTERRUPTED = 130
    UNREAD = 141
    TERMINATED = 143


class CommandError(Exception):
    """Something that the person at the console can mend: the fact, then the remedy."""

    exit_code = ExitCode.FAILED


class UsageError(CommandError):
    """A flag or an environment variable makes no sense, alone or beside another."""

    exit_code = ExitCode.USAGE


class LineRefused(CommandError):
    """The line does not do what it was asked to."""

    exit_code = ExitCode.REFUSED


class ResumeRefused(CommandError):
    """A run can't go on from what it left: there is no checkpoint, or it holds other bytes."""

    exit_code = ExitCode.REFUSED


class WrongRun(CommandError):
    """Another run is served at the address."""

    exit_code = ExitCode.REFUSED


class LineUnreachable(CommandError):
    """Nobody serves a line at the address."""

    exit_code = ExitCode.LOST
