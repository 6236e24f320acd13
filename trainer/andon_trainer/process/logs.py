"""Logs of a worker: what the library says in a script's process, as text or as JSON.

Theory of operation. A script's logging is its own. As long as it has set up none, Python prints
warnings on stderr, and that is how the library speaks by default. Under `andon run` such a line
begins with `WARNING`, so that it can be told from what the script prints.

As JSON, the library sets up the logging of a script that has not done it: then the script's own
records, and those of other libraries, are JSON too. Where the script did it before, only the
library's records are: they go to stderr, and not to the script's handlers. What a script prints is
not a record, and stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from andon.host.logs import JsonLines, LogFormat

__all__ = ["write_logs"]

_OURS = ("andon", "andon_trainer")
"""The library's loggers."""


class _Marked(logging.Formatter):
    """Text that says of a warning that it is one."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"WARNING: {text}" if record.levelno == logging.WARNING else text


class _WhileNobodyListens(logging.StreamHandler[Any]):
    """Speaks as long as the script has set up no logging, like Python's own last resort."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers and bool(super().filter(record))


def write_logs(
    form: LogFormat, facts: Callable[[], Mapping[str, Any]], *, marked: bool
) -> Callable[[], None]:
    """Writes this process's logs to stderr from now on. Returns what ends that.

    Args:
        form: `text` or `json`.
        facts: the run, the worker and its step, as far as they are known; for JSON.
        marked: whether warnings as text begin with `WARNING`.
    """
    if form == "json":
        return _write_json(facts)
    if not marked:
        return lambda: None
    target = _WhileNobodyListens()
    target.setLevel(logging.WARNING)
    target.setFormatter(_Marked())
    return _listen(target, _OURS)


def _write_json(facts: Callable[[], Mapping[str, Any]]) -> Callable[[], None]:
    target = logging.StreamHandler()
    target.setFormatter(JsonLines(facts))
    ours = [logging.getLogger(name) for name in _OURS]
    before = [(each, each.level, each.propagate) for each in ours]
    alone = not logging.getLogger().handlers
    stop = _listen(target, ("",) if alone else _OURS)
    for each in ours:
        if each.level == logging.NOTSET:
            each.setLevel(logging.INFO)
        each.propagate = alone

    def restore() -> None:
        stop()
        for each, level, propagate in before:
            each.setLevel(level)
            each.propagate = propagate

    return restore


def _listen(target: logging.Handler, names: tuple[str, ...]) -> Callable[[], None]:
    loggers = [logging.getLogger(name) for name in names]
    for each in loggers:
        each.addHandler(target)

    def stop() -> None:
        for each in loggers:
            each.removeHandler(target)

    return stop
