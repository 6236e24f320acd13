"""Explanations and slownesses: plain values and their messages."""

from __future__ import annotations

from andon.protocol.slowness import (
    MAX_STACK_LINES,
    MAX_STACKS,
    CodeLine,
    Explanation,
    ProcessFacts,
    Slowness,
    SlowPhase,
    ThreadStack,
    bounded,
)
from andon.v1 import coordinator_pb2 as pb
from andon.wire.converter import Converter

__all__ = [
    "explanation_from_proto",
    "explanation_to_proto",
    "slowness_from_proto",
    "slowness_to_proto",
]

_FACTS = Converter(ProcessFacts, pb.ProcessFacts)
_LINE = Converter(CodeLine, pb.CodeLine)


def explanation_to_proto(answer: Explanation) -> pb.Explanation:
    """A worker's answer, within the limits."""
    kept = bounded(answer)
    return pb.Explanation(
        number=kept.number,
        phase=kept.phase.value,  # type: ignore[arg-type]  # a number at run time
        detail=kept.detail,
        stacks=_stacks_to(kept.stacks),
        facts=_FACTS.to_generated(kept.facts),  # type: ignore[arg-type]  # of this class
    )


def explanation_from_proto(message: pb.Explanation) -> Explanation:
    """A worker's answer; what is beyond the limits is cut off."""
    return bounded(
        Explanation(
            number=message.number,
            phase=_phase(message.phase),
            detail=message.detail,
            stacks=_stacks_from(message.stacks[:MAX_STACKS]),
            facts=_FACTS.from_generated(message.facts),
        )
    )


def slowness_to_proto(slow: Slowness, *, stacks: bool = True) -> pb.Slowness:
    """Why a worker was slow; without `stacks` where many are told of."""
    message = pb.Slowness(
        worker=slow.worker,
        step=slow.step,
        phase=slow.phase.value,  # type: ignore[arg-type]  # a number at run time
        late_s=slow.late_s,
        text=slow.text,
        at_unix_s=slow.at_unix_s,
        stacks=_stacks_to(slow.stacks) if stacks else (),
    )
    if slow.guilty is not None:
        message.guilty.MergeFrom(_LINE.to_generated(slow.guilty))  # type: ignore[arg-type]
    if slow.facts is not None and stacks:
        message.facts.MergeFrom(_FACTS.to_generated(slow.facts))  # type: ignore[arg-type]
    return message


def slowness_from_proto(message: pb.Slowness) -> Slowness:
    """Why a worker was slow, as a status says it."""
    return Slowness(
        worker=message.worker,
        step=message.step,
        phase=_phase(message.phase),
        late_s=message.late_s,
        text=message.text,
        guilty=_LINE.from_generated(message.guilty) if message.HasField("guilty") else None,
        at_unix_s=message.at_unix_s,
        stacks=_stacks_from(message.stacks),
        facts=_FACTS.from_generated(message.facts) if message.HasField("facts") else None,
    )


def _phase(number: int) -> SlowPhase:
    try:
        return SlowPhase(number)
    except ValueError:
        return SlowPhase.UNSPECIFIED  # For people only; later versions may add values.


def _stacks_to(stacks: tuple[ThreadStack, ...]) -> list[pb.ThreadStack]:
    return [
        pb.ThreadStack(
            thread=each.thread,
            lines=[_LINE.to_generated(line) for line in each.lines],  # type: ignore[misc]
        )
        for each in stacks
    ]


def _stacks_from(messages: object) -> tuple[ThreadStack, ...]:
    return tuple(
        ThreadStack(
            each.thread,
            # Not all of a hostile answer is converted: most would be cut off after it.
            tuple(_LINE.from_generated(line) for line in each.lines[:MAX_STACK_LINES]),
        )
        for each in messages  # type: ignore[attr-defined]  # a repeated field, or a slice of it
    )
