"""Worker output: which lines of a worker a person has to see while the run goes on.

Theory of operation. A run of sixteen workers prints sixteen times as much as a person can read. All
of it is in the logs. The screen shows the last line of each worker, and passes on what should not
be missed: warnings, and tracebacks. Equal ones of several workers, or of several steps, are passed
on once. When a worker fails, its last lines are passed on too, since not every failure prints a
traceback.
"""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Literal

__all__ = ["Alarms", "OutputMode", "WorkerOutput", "colored", "plain"]

OutputMode = Literal["all", "last", "off"]
"""What is shown of the workers' output: every line, the last one, or only that of a failure."""

_LAST_LINES = 10
"""So many lines of a worker that fails are shown."""
_LONGEST_LINE = 2000
"""Characters of a line that are kept here; the log has all of them."""
_LONGEST_TRACEBACK = 60
"""Lines of a traceback that are shown; of a longer one, the first and the last."""
_MOST_ALARMS = 200
"""So many different warnings are shown. Later ones are only in the logs."""

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_WARNING = re.compile(
    r"^.{0,80}?(?:\b(?:WARNING|ERROR|CRITICAL|FATAL)\b|\w*Warning: |Fatal Python error: )"
)
_RANK = re.compile(r"^\[rank\d+\]: ?")
"""What torch.distributed puts before each line of a traceback."""
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
_COLOR = re.compile(r"(\x1b\[[0-9;:]*m)")
# Control sequences, operating system commands (with what they say), and two-byte escapes.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def plain(line: str) -> str:
    """A line without anything that a terminal would obey: colours, cursor movements, bells."""
    return _CONTROL.sub("", _ESCAPE.sub("", line)).expandtabs(4)


def colored(line: str) -> str:
    """A line with nothing that a terminal would obey but colours, which end with the line."""
    pieces = _COLOR.split(line)
    if len(pieces) == 1:
        return plain(line)
    # The odd pieces are the colours themselves.
    kept = [piece if place % 2 else plain(piece) for place, piece in enumerate(pieces)]
    return "".join(kept) + "\x1b[0m"


def _message_of(line: str) -> str:
    """A line as a person reads it: of a log record in JSON, its level and its message."""
    if not line.startswith('{"time"'):
        return line
    try:
        record = json.loads(line)
    except ValueError:
        return line
    return f"{record.get('level')}: {record.get('message') or record.get('event')}"


class Alarms:
    """The warnings and tracebacks of all workers, of which equal ones are shown once."""

    def __init__(self) -> None:
        """None was shown."""
        self._first: dict[str, str] = {}

    def is_new(self, text: str, worker: str) -> bool:
        """Whether nothing like this was shown. Numbers in it do not count: a step, an address."""
        key = _VARYING.sub("#", text)
        if key in self._first or len(self._first) >= _MOST_ALARMS:
            return False
        self._first[key] = worker
        return True

    def shown_by(self, text: str) -> str:
        """The worker whose text was shown in place of this one; empty if none was."""
        return self._first.get(_VARYING.sub("#", text), "")


class WorkerOutput:
    """The output of one worker, of which some is to be shown."""

    def __init__(self, name: str, mode: OutputMode, alarms: Alarms) -> None:
        """`alarms` are shared by all workers of the run."""
        self.name = name
        self.last = ""
        """The last line that is neither empty nor a warning, plain."""
        self._mode = mode
        self._alarms = alarms
        self._traceback: list[str] | None = None
        """The lines of a traceback that has not ended."""
        self._held: list[str] = []
        """The last traceback, if it was not shown."""
        self._unshown: deque[str] = deque(maxlen=_LAST_LINES)
        """The last lines since the last traceback."""

    def forget(self) -> None:
        """What it said last is not true any more."""
        self.last = ""

    def take(self, line: str) -> list[str]:
        """Takes the next line. Returns the lines to show now."""
        if self._mode == "all":
            return [line]
        text = plain(_message_of(line)[:_LONGEST_LINE]).rstrip()
        alarming = _WARNING.match(text) or text.startswith(_CHAINED)
        if text.strip() and not alarming:
            # A warning is told above the board. Here it would stay when it is long over, such as
            # that the worker waits for a coordinator.
            self.last = text
        if self._traceback is not None:
            return self._go_on(text)
        if _TRACEBACK in text:
            self._traceback = [text]
            return []
        if text.strip():
            self._unshown.append(text)
        if self._mode == "last" and alarming and self._alarms.is_new(text, self.name):
            self._unshown.pop()
            return [text]
        return []

    def end(self, *, failed: bool) -> list[str]:
        """The worker's process has ended. Returns the lines that tell of a failure."""
        cut_short = self._end_traceback() if self._traceback is not None else []
        lines = [*cut_short, *self._what_was_held(), *self._unshown]
        self._unshown.clear()
        self._held = []
        return lines if failed and self._mode != "all" else []

    def _go_on(self, text: str) -> list[str]:
        """Takes a line of the present traceback, whose last one is the first without indent."""
        assert self._traceback is not None
        self._traceback.append(text)
        if len(self._traceback) > _LONGEST_TRACEBACK:
            del self._traceback[_LONGEST_TRACEBACK // 2]
        line = _RANK.sub("", text)
        inside = not line or line[0] in " |+" or _TRACEBACK in line
        return [] if inside else self._end_traceback()

    def _end_traceback(self) -> list[str]:
        """Ends the present traceback. Returns its lines if they are to be shown now."""
        found, self._traceback = self._traceback or [], None
        self._unshown.clear()
        shown = self._mode == "last" and self._alarms.is_new("\n".join(found), self.name)
        self._held = [] if shown else found
        return found if shown else []

    def _what_was_held(self) -> list[str]:
        """The last traceback if it was not shown, or whose it is if one like it was."""
        if not self._held:
            return []
        text = "\n".join(self._held)
        if self._alarms.is_new(text, self.name) or not (other := self._alarms.shown_by(text)):
            return self._held
        return [f"{self._held[-1]}  (with the traceback of {other}, above)"]
