"""A worker's part of a trace: a file of JSON lines that is readable at any moment.

Theory of operation. Each worker appends to a file of its own, in the folder `FILE.parts` beside the
trace FILE that its launcher merges at the end. Times are microseconds of the worker's monotonic
clock. Lines that compare that clock with the coordinator's are among the events, so whoever merges
the parts can put them on one clock. Processes of one kernel share the monotonic clock: `clock` says
which one it is. A part that ends in the middle of a line is of a worker that was killed, and whole
up to there.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from andon.host.private_files import make_folder, open_private

__all__ = [
    "ClockSample",
    "EventKind",
    "PartHeader",
    "PartWriter",
    "TraceDamaged",
    "TraceEvent",
    "TracePart",
    "Track",
    "WorkerKnown",
    "is_part",
    "parts_folder",
    "read_part",
    "this_clock",
]

_FORMAT = 1
_MAGIC = "andon_trace_part"


class TraceDamaged(ValueError):
    """A file is no part of a trace, or no trace."""


class Track(enum.IntEnum):
    """The rows of one worker."""

    SCRIPT = 1
    """What the training script's thread does."""
    COPIES = 2
    """Gradients on their way to host memory, and averages back."""
    EXCHANGE = 3
    """Gradients on their way to the other workers and back."""
    FILES = 4
    """Checkpoints that are written beside training."""
    CALLS = 5
    """Calls between the ranks of a session. They may overlap, so they take as many rows as that
    needs: this track is the last one."""


class EventKind(enum.StrEnum):
    """Kinds of events, as the trace event format names them."""

    SPAN = "X"
    INSTANT = "i"
    COUNTER = "C"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeader:
    """The first line of a part."""

    run_id: str
    host: str
    process: int
    """The worker's process id."""
    clock: str
    """Names the monotonic clock; parts with the same name have the same clock. Empty: unknown."""
    at_us: int
    """The monotonic clock when the part was begun."""
    unix_us: int
    """The host's own time then."""
    notes: tuple[str, ...] = ()
    """What is not in the part, for people."""
    called: str = "worker"
    """What people call the process: `worker`, or `rank` in a session."""


@dataclass(frozen=True, slots=True)
class WorkerKnown:
    """The line gave the worker its id; that of a rank is its rank."""

    worker: int


@dataclass(frozen=True, slots=True)
class ClockSample:
    """The coordinator's time at a moment of the worker's monotonic clock, give or take an error."""

    at_us: int
    unix_us: int
    error_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Something that happened at a moment, or that took some time."""

    kind: EventKind
    name: str
    track: Track
    at_us: int
    us: int = 0
    """How long it took; 0 unless it is a SPAN."""
    args: Mapping[str, Any] = field(default_factory=dict)


Line = TraceEvent | ClockSample | WorkerKnown


@dataclass(slots=True)
class TracePart:
    """What a part holds."""

    header: PartHeader
    worker: int | None = None
    """The worker's id; None if it never joined."""
    samples: list[ClockSample] = field(default_factory=list)
    events: list[TraceEvent] = field(default_factory=list)


def parts_folder(trace: Path) -> Path:
    """Where workers write their parts of `trace`."""
    return trace.with_name(f"{trace.name}.parts")


def this_clock() -> str:
    """The name of this process's monotonic clock; empty if it can't be told."""
    # `time.perf_counter` is CLOCK_MONOTONIC on Linux, one clock for the kernel, but for processes
    # in a time namespace of their own.
    if sys.platform != "linux":
        return ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    return ""


class PartWriter:
    """Appends lines to a part. Nothing is buffered in this process."""

    def __init__(self, folder: Path, header: PartHeader) -> None:
        """Makes the folder and the part.

        Raises:
            OSError: that is not possible.
        """
        make_folder(folder)
        self.path = folder / f"{header.host}-{header.process}-{header.at_us}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = open_private(self.path, flags)
        self._append([{_MAGIC: _FORMAT, **asdict(header)}])

    def write(self, lines: Iterable[Line]) -> None:
        """Appends lines, in one call of the system.

        Raises:
            OSError: the disk is full, for example.
        """
        self._append(map(_fields_of, lines))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        # os.write, not a file object: a forked loading process would have a copy of its buffer, and
        # write it a second time.
        text = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in lines)
        left = memoryview(text.encode())
        while left:
            left = left[os.write(self._file, left) :]


def is_part(path: Path) -> bool:
    """Whether a file begins as a part does."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC) + 2) == f'{{"{_MAGIC}'.encode()


def read_part(path: Path) -> TracePart:
    """Reads a part as far as it is whole.

    Raises:
        TraceDamaged: it is no part of a trace, or of a version that is not known here.
        OSError: it can't be read.
    """
    part: TracePart | None = None
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break  # The worker was killed while it wrote.
            try:
                fields = json.loads(line)
                if part is None:
                    part = TracePart(_header(fields))
                else:
                    _take(part, fields)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise TraceDamaged(f"{path} is no part of a trace: {error}") from None
    if part is None:
        raise TraceDamaged(f"{path} is no part of a trace: it has no first line")
    return part


def _header(fields: dict[str, Any]) -> PartHeader:
    if fields.pop(_MAGIC) != _FORMAT:
        raise ValueError("it is of another version of andon")
    header = PartHeader(**{**fields, "notes": tuple(map(str, fields["notes"]))})
    _check(int, header.process, header.at_us, header.unix_us)
    _check(str, header.run_id, header.host, header.clock, header.called)
    return header


def _take(part: TracePart, fields: Mapping[str, Any]) -> None:
    if "worker" in fields:
        _check(int, fields["worker"])
        part.worker = fields["worker"]
    elif "sync" in fields:
        _check(int, *fields["sync"])
        part.samples.append(ClockSample(*fields["sync"]))
    else:
        _check(int, fields["ts"], fields.get("dur", 0))
        _check(str, fields["name"])
        part.events.append(
            TraceEvent(
                kind=EventKind(fields["ph"]),
                name=fields["name"],
                track=Track(fields["tid"]),
                at_us=fields["ts"],
                us=fields.get("dur", 0),
                args=fields.get("args", {}),
            )
        )


def _check(kind: type, *values: Any) -> None:
    if not all(isinstance(each, kind) for each in values):
        raise TypeError(f"{values} should be of {kind.__name__}")


def _fields_of(line: Line) -> dict[str, Any]:
    match line:
        case WorkerKnown(worker):
            return {"worker": worker}
        case ClockSample():
            return {"sync": [line.at_us, line.unix_us, line.error_us]}
    fields: dict[str, Any] = {"ph": str(line.kind), "name": line.name, "tid": int(line.track)}
    fields["ts"] = line.at_us
    if line.kind is EventKind.SPAN:
        fields["dur"] = line.us
    if line.args:
        fields["args"] = line.args
    return fields
