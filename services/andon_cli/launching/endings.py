"""Endings: why a worker that failed did so, in words with a remedy.

The exit code, the signal, the last lines of its output, the kernel's count of processes that it
killed for memory, and the line's last halt say it. Nothing here reads or waits: the caller looks.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from andon.host.errors import ExitCode
from andon.protocol.halts import HaltReason
from andon.protocol.run_settings import RunPlan
from andon_server.crashes import CrashKind

__all__ = ["Ending", "explained", "kind_of", "oom_kills_in", "traceback_in"]

_GRACE_ENDED = (-signal.SIGKILL, -signal.SIGTERM)
"""How a process ends that was still there when its machine's grace was over."""
_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
_OF_GPU = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "CUDA out of memory",
           "CUDA error: out of memory")  # fmt: skip
_OF_HOST = ("MemoryError", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
_NON_FINITE = frozenset(
    {
        HaltReason.NON_FINITE_GRADIENT,
        HaltReason.NON_FINITE_LOSS,
        HaltReason.NON_FINITE_AVERAGE,
    }
)
_BY_CODE: dict[int, CrashKind] = {
    ExitCode.REFUSED: CrashKind.REFUSED,
    ExitCode.LOST: CrashKind.LINE_LOST,
}
_HALTED = "the line halted, and its script did not wait for an answer"
_IN_WORDS: dict[CrashKind, str] = {
    CrashKind.FAULT: (
        "code in C made it end; PYTHONFAULTHANDLER=1 prints where. An extension, a driver or the "
        "machine's memory may be broken"
    ),
    CrashKind.KILLED: "somebody or something killed it from outside",
    CrashKind.NON_FINITE: _HALTED,
    CrashKind.WRONG_ARITHMETIC: _HALTED,
    CrashKind.HALTED: _HALTED,
    CrashKind.REFUSED: "the line refused it; its output says why",
    CrashKind.LINE_LOST: "it lost the line, and could not reach it again",
}
"""Of the kinds about which nothing else is known."""
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known of a process that ended."""

    code: int
    """Its exit code; negative: the signal that killed it."""
    output: Sequence[str] = ()
    """Its last lines."""
    killed_for_memory: bool = False
    """Whether the kernel has killed a process for memory since this one started."""
    halt: HaltReason | None = None
    """Of the line's last halt, if it is not answered."""
    notice: str = ""
    """Why its machine was about to go, as it told the line; empty: it told nothing."""


def kind_of(ending: Ending) -> CrashKind:
    """Why the process ended."""
    code = ending.code
    if code == ExitCode.TERMINATED or (code in _GRACE_ENDED and ending.notice):
        return CrashKind.NOTICE
    if code < 0:
        if -code in _FAULTS:
            return CrashKind.FAULT
        if -code == signal.SIGKILL and ending.killed_for_memory:
            return CrashKind.KILLED_FOR_MEMORY
        return CrashKind.KILLED
    if code == ExitCode.HALTED:
        if ending.halt in _NON_FINITE:
            return CrashKind.NON_FINITE
        wrong = ending.halt is HaltReason.WRONG_ARITHMETIC
        return CrashKind.WRONG_ARITHMETIC if wrong else CrashKind.HALTED
    if code in _BY_CODE:
        return _BY_CODE[code]
    # The last traceback is the one that ended the script; an earlier one was caught.
    last = traceback_in(ending.output) or ending.output[-5:]
    if any(words in line for line in last for words in _OF_GPU):
        return CrashKind.GPU_OUT_OF_MEMORY
    if any(words in line for line in last for words in _OF_HOST):
        return CrashKind.OUT_OF_MEMORY
    return CrashKind.SCRIPT_ERROR


def explained(kind: CrashKind, ending: Ending, plan: RunPlan | None, workers: int) -> str:
    """What happened, and the remedy.

    Args:
        kind: why the process ended.
        ending: what is known of that.
        plan: the run's; None: nobody has joined it yet.
        workers: how many share a batch.
    """
    match kind:
        case CrashKind.GPU_OUT_OF_MEMORY:
            return f"the GPU's memory is full. {_smaller(plan, workers)}"
        case CrashKind.OUT_OF_MEMORY:
            return f"it asked for memory that the machine does not have. {_smaller(plan, workers)}"
        case CrashKind.KILLED_FOR_MEMORY:
            return (
                "the kernel killed it, very likely because memory ran out (its count of such kills "
                f"rose). {_smaller(plan, workers)} Or give the machine or the container more memory"
            )
        case CrashKind.NOTICE:
            return _after_notice(ending)
        case CrashKind.SCRIPT_ERROR:
            what = _exception_in(ending.output)
            return f"its script failed: {what}" if what else "its script failed"
        case _:
            return _IN_WORDS[kind]


def traceback_in(output: Sequence[str]) -> tuple[str, ...]:
    """The last traceback of Python among lines, to the end; empty: there is none."""
    starts = [at for at, line in enumerate(output) if line.strip() == _TRACEBACK]
    return tuple(output[starts[-1] :]) if starts else ()


def _exception_in(output: Sequence[str]) -> str:
    """What the last traceback among lines says was raised; the last line if there is none."""
    # The calls are indented. Behind them other threads may have said something.
    calls = traceback_in(output)[1:]
    raised = (line for line in calls if line.strip() and not line[0].isspace())
    said = (line for line in reversed(output) if line.strip())
    return next(chain(raised, said), "").strip()


def oom_kills_in(vmstat: str) -> int | None:
    """How many processes the kernel has killed for memory, from the text of /proc/vmstat."""
    for line in vmstat.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdecimal():
            return int(count)
    return None


def _after_notice(ending: Ending) -> str:
    """What became of a worker whose machine was about to go."""
    if ending.code != ExitCode.TERMINATED:
        return (
            f"its machine goes ({ending.notice}), and it was killed before it had left: give the "
            "machine a longer grace, or set ANDON_NOTICE_GRACE below it"
        )
    if not ending.notice:
        return "it was told to terminate before it was on the line, or after it had left"
    return (
        f"its machine goes ({ending.notice}): it left in order, and another one may take its slot"
    )


def _smaller(plan: RunPlan | None, workers: int) -> str:
    """Which batch it is about, and how to make what is in memory at once smaller."""
    if plan is None:
        return "Give line.prepare a smaller micro_batch_size."
    if plan.grain:
        return (
            f"Each forward has {plan.grain} samples of the batch of {plan.global_batch}: give "
            f"line.prepare(..., micro_batch_size={max(1, plan.grain // 2)})."
        )
    share = -(-plan.global_batch // max(1, workers))
    return (
        f"The batch is {plan.global_batch} samples, {share} a worker, and one forward has all of "
        "these unless the script sets micro_batch_size: give line.prepare(..., micro_batch_size="
        f"{max(1, share // 2)}), or a smaller one than now. The optimizer sees the same batch."
    )
