"""Defects: what is wrong with a step, with the evidence that a halt carries.

These are checks without side effects. The evidence names worker, block, parameter and element as
far as they are known, because a person has to find the cause with it.

Who says so is a part of it. A worker may be wrong, or lie: what it reports of itself stands in its
own name, and what it reports of another worker is shown as its claim. The reducer of this process
knows by its session token which worker sent what, so what it saw is no claim.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from andon.protocol.halts import HaltReason, describe_place, describe_value
from andon.protocol.layout import Layout
from andon_coordinator.core.events import Fault, FaultKind, Ready

__all__ = [
    "LineDefect",
    "ModelPlace",
    "corruption",
    "in_fault",
    "in_ready",
    "in_reducer",
    "place_of",
    "violation",
]

_REASONS = {
    FaultKind.NON_FINITE_GRADIENT: HaltReason.NON_FINITE_GRADIENT,
    FaultKind.NON_FINITE_LOSS: HaltReason.NON_FINITE_LOSS,
    FaultKind.ENCODING_OVERFLOW: HaltReason.ENCODING_OVERFLOW,
    FaultKind.NON_FINITE_AVERAGE: HaltReason.NON_FINITE_AVERAGE,
    FaultKind.PROTOCOL: HaltReason.PROTOCOL_VIOLATION,
    FaultKind.CHECKPOINT: HaltReason.CHECKPOINT,
}

# Only the worker itself can know of these, so a rank that it names does not count.
_OWN = {FaultKind.NON_FINITE_LOSS, FaultKind.CHECKPOINT}

# Nobody's fault, whatever the message says: all contributions were finite.
_NOBODYS = {FaultKind.NON_FINITE_AVERAGE}


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where in the model something is wrong, as far as that is known."""

    block: int | None = None
    parameter: str = ""
    element: tuple[int, ...] = ()

    def __str__(self) -> str:
        """As a part of a sentence: `blocks.3.attn.weight[17, 204] (block 3)`; may be empty."""
        return describe_place(self.block, self.parameter, self.element)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineDefect:
    """One thing that is wrong; its `HaltEvidence` says the same."""

    reason: HaltReason
    message: str
    worker: int | None = None
    place: ModelPlace = ModelPlace()
    value: str = ""
    reported_by: int | None = None


def violation(worker: int, what: str, value: str = "") -> LineDefect:
    """The defect of a worker that broke the protocol; `what` it did: `reported the weight -1`."""
    return LineDefect(
        reason=HaltReason.PROTOCOL_VIOLATION,
        message=f"worker {worker} {what}",
        worker=worker,
        value=value,
    )


def in_fault(
    fault: Fault, reporter: int, roster: tuple[int, ...], layout: Layout | None
) -> LineDefect | None:
    """The defect that a fault reports; None if the fault voids the round without halting the line.

    Args:
        fault: what a worker saw.
        reporter: that worker.
        roster: of the fault's round, in rank order; its ranks are the fault's ranks.
        layout: names the parameter and the element.
    """
    reason = _REASONS.get(fault.kind)
    if reason is None:
        return None
    worker = _worker_of(fault, roster)
    if fault.kind in _OWN:
        worker = reporter
    elif fault.kind in _NOBODYS:
        worker = None
    elif fault.kind is FaultKind.NON_FINITE_GRADIENT and fault.rank is None:
        worker = reporter  # An older client may leave its own rank out.
    defect = _defect(reason, fault, worker, layout)
    said = defect.message
    if worker != reporter:
        # Nothing of this, and no free text, may be taken for the service's own words.
        free_text = worker is None and fault.kind is FaultKind.PROTOCOL
        said = f"worker {reporter} {'reports:' if free_text else 'says that'} {said}"
    return replace(defect, message=said, reported_by=reporter)


def in_reducer(
    fault: Fault,
    senders: Collection[tuple[int, int]],
    roster: tuple[int, ...],
    layout: Layout | None,
) -> LineDefect | None:
    """The defect that the reducer of this process saw; None if it halts nothing.

    Args:
        fault: what it saw; its ranks are those that the messages said.
        senders: ranks, and the workers that sent as them, by their session tokens.
        roster: of the fault's round.
        layout: names the parameter and the element.
    """
    reason = _REASONS.get(fault.kind)
    if reason is None:
        return None
    for rank, worker in senders:
        if rank < len(roster) and roster[rank] == worker:
            continue
        # A reducer does not know the roster: of two workers it may take the wrong one for the
        # rank's owner, and its fault blames the right one.
        whose = f"worker {roster[rank]}'s" if rank < len(roster) else "nobody's"
        what = f"broke the protocol: it sent as rank {rank}, which is {whose}"
        return violation(worker, what, str(rank))
    return _defect(reason, fault, _worker_of(fault, roster), layout)


def _defect(
    reason: HaltReason, fault: Fault, worker: int | None, layout: Layout | None
) -> LineDefect:
    """What a fault says, with the worker at fault."""
    place = place_of(layout, fault.block, fault.element)
    return LineDefect(
        reason=reason,
        message=_sentence(reason, worker, place, fault),
        worker=worker,
        place=place,
        value=fault.value,
    )


def corruption(
    fault: Fault,
    reporter: int,
    roster: tuple[int, ...],
    layout: Layout | None,
    *,
    step: int,
    attempts: int,
) -> LineDefect:
    """The defect of a line that had a corrupted chunk in each of `attempts` attempts at `step`.

    `fault` is the last report, of the worker `reporter`; it names the rank at one end of the link.
    """
    worker = _worker_of(fault, roster)
    who = "a worker" if worker is None else f"worker {worker}"
    if worker != reporter:
        who += f", as worker {reporter} says"
    said = fault.message or "a chunk does not match its checksum"
    return LineDefect(
        reason=HaltReason.REPEATED_FAILURE,
        message=f"step {step}: a chunk was corrupted in transit in {attempts} attempts, the last "
        f"one on the link of {who}: {said}. Check its network card, cables and memory",
        worker=worker,
        place=place_of(layout, fault.block, fault.element),
        reported_by=reporter,
    )


def in_ready(worker: int, ready: Ready, samples: range) -> LineDefect | None:
    """What is wrong with one worker's report; `samples` are the counts that its share allows."""
    if ready.samples not in samples and (ready.samples or ready.weight):
        what = f"reported {ready.samples} samples, and its share has {samples[-1]}"
        return violation(worker, what, str(ready.samples))
    defect = in_loss(worker, ready.weight, ready.loss_sum)
    if defect is not None:
        return defect
    for norm in (ready.gradient_norm, ready.own_gradient_norm, *ready.block_norms):
        if norm is not None and not (math.isfinite(norm) and norm >= 0):
            value = describe_value(norm)
            return violation(worker, f"reported the gradient norm {value}", value)
    return None


def in_loss(worker: int, weight: float, loss_sum: float, node: str = "") -> LineDefect | None:
    """What is wrong with a weight and its loss in a report, of a `node` or of the whole share."""
    if not (math.isfinite(weight) and weight >= 0):
        value = describe_value(weight)
        return violation(worker, f"reported the weight {value}{node and f' of {node}'}", value)
    if not math.isfinite(loss_sum):
        value = describe_value(loss_sum)
        return LineDefect(
            reason=HaltReason.NON_FINITE_LOSS,
            message=f"worker {worker}'s loss is {value}{node and f' in {node}'}",
            worker=worker,
            value=value,
        )
    return None


def _worker_of(fault: Fault, roster: tuple[int, ...]) -> int | None:
    """The worker of the rank that a fault names; None if it names none, or one that is no rank."""
    return roster[fault.rank] if fault.rank is not None and fault.rank < len(roster) else None


def place_of(layout: Layout | None, block: int | None, element: int) -> ModelPlace:
    """The place of an element of a block, as far as the layout knows it."""
    if block is None or layout is None:
        return ModelPlace(block)
    try:
        place = layout.place(block, element)
    except IndexError:
        return ModelPlace(block)  # A peer's mistake. Only the number of the block is known then.
    return ModelPlace(block, place.parameter, place.element)


def _sentence(reason: HaltReason, worker: int | None, place: ModelPlace, fault: Fault) -> str:
    said = fault.message
    if worker is None and reason is HaltReason.PROTOCOL_VIOLATION:
        # No worker is blamed: the cause may be a failure of the reducer itself.
        return said or "the protocol was violated; no details were reported"
    who = "a worker" if worker is None else f"worker {worker}"
    what = fault.value or "a non-finite value"
    where = f" in {place}" if str(place) else ""
    match reason:
        case HaltReason.NON_FINITE_GRADIENT:
            return f"{who} sent {what}{where}"
        case HaltReason.NON_FINITE_LOSS:
            return f"{who}'s loss is {what}"
        case HaltReason.ENCODING_OVERFLOW:
            whose = "the mean" if worker is None else who
            fact = f"{whose} has {fault.value or 'a value'}{where}"
            fact += ", which its encoding can't hold"
            return f"{fact}: {said}" if said else fact
        case HaltReason.NON_FINITE_AVERAGE:
            return f"the mean is {what}{where}, though every contribution is finite"
        case HaltReason.CHECKPOINT:
            return f"{who} could not write a checkpoint: {said}"
        case _:
            fact = f"{who} broke the protocol"
            return f"{fact}: {said}" if said else fact
