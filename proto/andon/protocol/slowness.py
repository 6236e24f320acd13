"""Slowness: what a worker says of itself when the others wait for it, and what is made of it.

All of it is for people. A worker may lie in it, so whoever reads it off the wire calls `bounded`:
then it is short, and on one line each.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields, replace

from andon.protocol.limits import clipped, on_one_line

__all__ = [
    "LOADING",
    "MAX_STACKS",
    "MAX_STACK_LINES",
    "CodeLine",
    "Explanation",
    "ProcessFacts",
    "SlowPhase",
    "Slowness",
    "ThreadStack",
    "bounded",
]

MAX_STACKS = 4
MAX_STACK_LINES = 24
LOADING = "loading process"
"""The name of a loading process's stack begins so; its number follows."""
_MAX_FILE_BYTES, _MAX_FUNCTION_BYTES = 200, 100


class SlowPhase(enum.Enum):
    """In which part of its work a worker is; values are those of `andon.v1.SlowPhase`."""

    UNSPECIFIED = 0
    """Not known."""
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    EXCHANGE = 5
    DISK = 6
    SCRIPT = 7

    @property
    def label(self) -> str:
        """As in metrics, the journal and JSON."""
        return self.name.lower() if self.value else "unknown"


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of code that a thread is in."""

    file: str
    line: int
    """From 1; 0: not known."""
    function: str
    own: bool = False
    """Whether it is the user's: neither PyTorch's, Python's, Andon's, nor an installed package's.
    """

    def __str__(self) -> str:
        """As people write it, with the file's name alone: `dataset.py:42 in __getitem__`."""
        name = self.file.replace("\\", "/").rpartition("/")[2]
        return f"{name}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Where a thread is: its innermost calls, the innermost first."""

    thread: str
    lines: tuple[CodeLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What a process and its host did between two looks; the fields are those of the message.

    None: the machine does not say.
    """

    apart_s: float = 0.0
    script_cores: float | None = None
    process_cores: float | None = None
    child_cores: float | None = None
    children: int = 0
    waited_for_core: float | None = None
    host_busy_cores: float | None = None
    host_cores: int = 0
    major_faults: float | None = None
    swapped_in: float | None = None
    swap_bytes: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    waited_for_disk: float | None = None
    disk_bytes: float | None = None
    retransmitted: int | None = None
    unsent_bytes: int | None = None
    delivered: float | None = None
    gpu_mhz: float | None = None
    gpu_most_mhz: float | None = None
    gpu_throttled: str = ""
    held_s: float = 0.0
    threads_waited: float | None = None
    allowed_cores: float | None = None
    throttled: float | None = None
    stolen_cores: float | None = None
    cpu_pressure: float | None = None
    memory_pressure: float | None = None
    disk_pressure: float | None = None
    busiest: str = ""
    busiest_cores: float | None = None
    largest: str = ""
    largest_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A worker's answer."""

    number: int
    phase: SlowPhase
    detail: str = ""
    """The script's own words."""
    stacks: tuple[ThreadStack, ...] = ()
    """The script's thread first."""
    facts: ProcessFacts = ProcessFacts()

    @property
    def guilty(self) -> CodeLine | None:
        """The innermost line of the user's own code; None: no thread is in any.

        Backward calls hooks on threads of its own, so the script's thread comes first, and others
        count only where it is in no code of the user below PyTorch's backward. A worker tells of
        loading processes only where its script waits for them: then they are what it waits for.
        """
        if not self.stacks:
            return None
        script, *others = self.stacks
        if self.loads is not None:
            return _innermost_own(self.loads)
        mine = _innermost_own(script)
        if self.phase is SlowPhase.BACKWARD and (mine is None or _is_in_backward(script)):
            mine = next((found for each in others if (found := _innermost_own(each))), mine)
        return mine

    @property
    def loads(self) -> ThreadStack | None:
        """The loading process that is in code of the user; None: none, or it is not known."""
        if self.phase is not SlowPhase.DATA:
            return None
        loading = (each for each in self.stacks if each.thread.startswith(f"{LOADING} "))
        return next((each for each in loading if _innermost_own(each) is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """Why a worker was slow."""

    worker: int
    step: int
    phase: SlowPhase
    late_s: float
    text: str
    guilty: CodeLine | None = None
    at_unix_s: float = 0.0
    stacks: tuple[ThreadStack, ...] = ()
    facts: ProcessFacts | None = None


def bounded(answer: Explanation) -> Explanation:
    """The same within the limits of the protocol, and with texts on one line.

    A number that no machine has counts as not said.
    """
    return replace(
        answer,
        detail=on_one_line(clipped(answer.detail)),
        stacks=tuple(map(_bounded_stack, answer.stacks[:MAX_STACKS])),
        facts=_bounded_facts(answer.facts),
    )


def _bounded_stack(stack: ThreadStack) -> ThreadStack:
    lines = tuple(
        CodeLine(
            _last_bytes(on_one_line(each.file)),
            each.line,
            on_one_line(clipped(each.function, _MAX_FUNCTION_BYTES)),
            each.own,
        )
        for each in stack.lines[:MAX_STACK_LINES]
    )
    return ThreadStack(on_one_line(clipped(stack.thread, _MAX_FUNCTION_BYTES)), lines)


def _bounded_facts(facts: ProcessFacts) -> ProcessFacts:
    kept: dict[str, object] = {}
    for each in fields(facts):
        value = getattr(facts, each.name)
        if isinstance(value, str):
            kept[each.name] = on_one_line(clipped(value, _MAX_FUNCTION_BYTES))
        if isinstance(value, float) and not 0.0 <= value < math.inf:
            kept[each.name] = each.default
    return replace(facts, **kept)  # type: ignore[arg-type]  # each value is its field's default


def _last_bytes(path: str) -> str:
    """The end of a long path: what is left says more than what goes."""
    data = path.encode(errors="replace")
    if len(data) <= _MAX_FILE_BYTES:
        return data.decode()
    return "…" + data[3 - _MAX_FILE_BYTES :].decode(errors="ignore")


def _innermost_own(stack: ThreadStack) -> CodeLine | None:
    return next((each for each in stack.lines if each.own), None)


def _is_in_backward(stack: ThreadStack) -> bool:
    """Whether the innermost call that is known is PyTorch's backward, which may call hooks."""
    return bool(stack.lines) and "run_backward" in stack.lines[0].function
