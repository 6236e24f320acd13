"""Errors that end `andon conformance`, each with the exit code of the `andon` command."""

from __future__ import annotations

__all__ = ["ConformanceError", "ServerUnreachable", "UsageError"]


class ConformanceError(Exception):
    """The suite can't do its work: the fact, then the remedy."""

    exit_code = 1


class UsageError(ConformanceError):
    """An argument makes no sense, alone or beside another."""

    exit_code = 2


class ServerUnreachable(ConformanceError):
    """Nobody serves a line at the target."""

    exit_code = 5
