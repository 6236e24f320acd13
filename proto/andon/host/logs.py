"""Logs: events with fields, which a process writes as text for people or as JSON for programs.

An event is a message of Python's logging: `log.info(LogEvent("worker_joined", worker=1))`. A
formatter of any kind writes it as text, `worker_joined worker=1`; `JsonLines` finds its fields.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from andon.host.strict_json import strict_json

__all__ = ["TEXT_FORMAT", "JsonLines", "LogEvent", "LogFormat"]

LogFormat = Literal["text", "json"]
"""How a process writes its log."""

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""A line of a service's log as text."""

_BARE = re.compile(r"[A-Za-z0-9_.:/@+-]+")
"""Text that needs no quotes beside other fields."""
_RESERVED = frozenset({"time", "level", "logger", "event", "error"})
_SAFE_INTEGER = 2**53
"""Above this, a reader in JavaScript would take one whole number for another."""


class LogEvent:
    """Something that happened, with fields; the message of a log record."""

    __slots__ = ("fields", "name", "text")

    def __init__(self, name: str, text: str = "", /, **fields: Any) -> None:
        """An event.

        Args:
            name: what happened, such as `worker_joined`; from a closed set.
            text: the event as a sentence for people. Default: the name and the fields.
            fields: facts about it. Names must not be those that every record has.
        """
        assert not _RESERVED & fields.keys(), f"{name} has a field that every record has"
        self.name = name
        self.text = text
        self.fields = fields

    def __str__(self) -> str:
        """The event as text, on one line if it has no sentence of its own."""
        if self.text:
            return self.text
        pairs = (f"{field}={_worded(value)}" for field, value in self.fields.items())
        return " ".join([self.name, *pairs])


class JsonLines(logging.Formatter):
    """Writes each record as one line of JSON.

    `time` (UTC, ISO 8601), `level` and `logger` are always there. `event` is the name of a
    `LogEvent`, whose fields follow; any other message is `message`. `run`, `worker` and `step` are
    there as far as they are known, and `error` is a traceback.
    """

    def __init__(self, context: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Takes the facts that hold for the whole process from `context`.

        Args:
            context: `run`, `worker` and `step`, as far as they are known now. An event's own fields
                win. Any thread may ask, at any moment.
        """
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end."""
        at = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
        }
        message: object = record.msg
        if isinstance(message, LogEvent):
            entry["event"] = message.name
            entry |= self._context()
            entry |= {name: _value(value) for name, value in message.fields.items()}
            if message.text:
                entry["message"] = message.text
        else:
            entry |= self._context()
            entry["message"] = record.getMessage()
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return strict_json(entry)


def _value(value: Any) -> Any:
    """A field's value for JSON."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _SAFE_INTEGER:
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _worded(value: Any) -> str:
    """A field's value as text: quoted if it would not end where it ends."""
    text = str(value)
    return repr(text) if isinstance(value, str) and not _BARE.fullmatch(text) else text
