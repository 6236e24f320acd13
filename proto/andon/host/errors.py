"""Errors that end a command, each with its exit code and the remedy in its text."""

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
    """Exit codes of the `andon` command. Those of a worker mean the same."""

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
    """Something that the person at the terminal can fix. The text has the fact, then the remedy."""

    exit_code = ExitCode.FAILED


class UsageError(CommandError):
    """A flag or an environment variable makes no sense, alone or beside another."""

    exit_code = ExitCode.USAGE


class LineRefused(CommandError):
    """The line refuses what it was asked to do."""

    exit_code = ExitCode.REFUSED


class ResumeRefused(CommandError):
    """A run can't be resumed: there is no checkpoint, or it is damaged."""

    exit_code = ExitCode.REFUSED


class WrongRun(CommandError):
    """Another run is served at the address."""

    exit_code = ExitCode.REFUSED


class LineUnreachable(CommandError):
    """No line is served at the address."""

    exit_code = ExitCode.LOST
