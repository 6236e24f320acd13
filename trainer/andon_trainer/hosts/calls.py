"""Calls that the processes of a host make together: what each brings, and what the leader answers.

A call begins with a meeting, in which each process says what it calls: if these differ, all of them
raise, and do not wait for each other. If the leader can't answer, the others raise what it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from andon.protocol.halts import HaltEvidence
from andon_trainer.errors import (
    HostLost,
    JoinRefused,
    LineHalted,
    LineLost,
    RunOver,
    WorkerDropped,
)
from andon_trainer.hosts.group import HostGroup
from andon_trainer.termination import Terminated

__all__ = [
    "BACKWARD",
    "Failure",
    "RefusedLoss",
    "answer_in_host",
    "failing_together",
    "meet",
    "refuse_other_weights",
    "told_by_leader",
]

_T = TypeVar("_T")

BACKWARD = "line.backward"
"""What the processes call with the last micro-batch of a step."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of one process, to be raised by the others of its host."""

    kind: str
    message: str = ""
    facts: tuple[Any, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What the others are told of `error`."""
        match error:
            case LineHalted():
                return cls("LineHalted", facts=(error.evidence,))
            case JoinRefused():
                facts = (error.reason, error.component, error.mine, error.theirs)
                return cls("JoinRefused", str(error), facts)
            case LineLost():
                return cls(type(error).__name__, str(error), (error.address, error.last_step))
            case Terminated():
                return cls("Terminated")
        return cls("", f"{type(error).__name__}: {error}")

    def error(self) -> BaseException:
        """The exception to raise."""
        match self.kind, self.facts:
            case "LineHalted", (HaltEvidence() as evidence,):
                return LineHalted(evidence)
            case "JoinRefused", (reason, component, mine, theirs):
                return JoinRefused(reason, self.message, component, mine, theirs)
            case "Terminated", _:
                return Terminated()
            case kind, (address, last_step) if kind in _LOST:
                return _LOST[kind](self.message, address, last_step)
        return HostLost(f"another process of this host failed, and so its host: {self.message}")


_LOST: dict[str, type[LineLost]] = {
    each.__name__: each for each in (LineLost, RunOver, WorkerDropped)
}


@dataclass(frozen=True, slots=True)
class RefusedLoss:
    """A process's loss that is not finite."""

    value: float


@dataclass(frozen=True, slots=True)
class _Called:
    """What one process calls, and with what."""

    name: str
    given: Any
    terminated: bool


def meet(group: HostGroup, name: str, given: Any, *, terminated: bool = False) -> list[Any]:
    """What each process gives to the call `name`, which all of them must make.

    Raises:
        RuntimeError: they make different calls.
        HostLost: one of them failed.
    """
    called = group.meet(_Called(name, given, terminated))
    for each in called:
        if isinstance(each, Failure):
            raise each.error()
    for number, each in enumerate(called):
        if each.name != called[0].name:
            raise RuntimeError(
                "the processes of this host do not run the same loop: process 0 calls "
                f"{called[0].name}, process {number} calls {each.name}. Under "
                "DistributedDataParallel all of them make the same calls in the same order: leave "
                "the loop, and call line.mean, by what is the same on all (line.step, line.loss, a "
                "mean), not by a process's own loss, time or rank"
            )
    return called


def answer_in_host(group: HostGroup, name: str, given: Any, ask: Callable[[list[Any]], _T]) -> _T:
    """The leader's answer to a call, in every process: what `ask` makes of all that they give."""
    called = meet(group, name, given)
    if group.rank:
        answer: _T = told_by_leader(group)
        return answer
    with failing_together(group):
        answer = ask([each.given for each in called])
    group.tell(answer)
    return answer


def told_by_leader(group: HostGroup) -> Any:
    """The leader's message.

    Raises:
        LineHalted, HostLost, ...: the leader failed, and raises the same.
    """
    told = group.hear()
    if isinstance(told, Failure):
        raise told.error()
    return told


@contextmanager
def failing_together(group: HostGroup) -> Iterator[None]:
    """Tells the others, who wait for the leader's answer, if it can't give one."""
    try:
        yield
    except HostLost:
        raise
    except BaseException as error:
        # The error is raised in any case. That the others are gone too would say less.
        with suppress(HostLost):
            group.tell(Failure.of(error))
        raise


def refuse_other_weights(digests: list[bytes], step: int) -> None:
    """Raises RuntimeError if a process of the host holds other weights than its leader."""
    for number, digest in enumerate(digests):
        if digest != digests[0]:
            raise RuntimeError(
                f"after step {step} process {number} of this host holds other weights than process "
                "0: something in the script moves them apart, such as another optimizer, learning "
                "rate or registered object. The host leaves the line; start its processes again"
            )
