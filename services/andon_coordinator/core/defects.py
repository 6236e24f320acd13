"""Defects: what is wrong with a step, with the evidence that a halt carries.

These are checks without side effects. The evidence names worker, block, parameter and element as
far as they are known, because a person has to find the cause with it.

Who says so is a part of it. A worker may be wrong, or lie: what it reports of itself stands in its
own name, and what it reports of another worker is shown as its claim. The reducer of this process
knows by its session token which worker sent what, so what it saw is no claim.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from andon.protocol.halts import HaltEvidence, HaltReason, describe_value
from andon.protocol.layout import Layout
from andon.protocol.limits import PREFIX_BYTES
from andon_coordinator.core.events import Fault, FaultKind, Ready
from andon_coordinator.core.round import StepRound

__all__ = [
    "LineDefect",
    "corruption",
    "divergence",
    "in_fault",
    "in_ready",
    "in_reducer",
    "in_round",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LineDefect:
    """One thing that is wrong; the fields are those of `HaltEvidence`."""

    reason: HaltReason
    message: str
    worker: int | None = None
    block: int | None = None
    parameter: str = ""
    element: tuple[int, ...] = ()
    value: str = ""
    reported_by: int | None = None


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
    if worker == reporter:
        said = defect.message
    elif worker is not None or fault.rank is not None:
        said = f"worker {reporter} says that {defect.message}"
    elif fault.kind is FaultKind.PROTOCOL:
        # Free text, which must not be taken for the service's own words.
        said = f"worker {reporter} reports: {defect.message}"
    else:
        said = defect.message
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
        return LineDefect(
            reason=HaltReason.PROTOCOL_VIOLATION,
            message=f"worker {worker} broke the protocol: it sent as rank {rank}, which is {whose}",
            worker=worker,
            value=str(rank),
        )
    return _defect(reason, fault, _worker_of(fault, roster), layout)


def _defect(
    reason: HaltReason, fault: Fault, worker: int | None, layout: Layout | None
) -> LineDefect:
    """What a fault says, with the worker at fault."""
    parameter, element = _place_of(fault, layout)
    evidence = HaltEvidence(
        id=0,
        reason=reason,
        step=0,
        worker=worker,
        block=fault.block,
        parameter=parameter,
        element=element,
        value=fault.value,
    )
    return LineDefect(
        reason=reason,
        message=_sentence(evidence, fault.message),
        worker=worker,
        block=fault.block,
        parameter=parameter,
        element=element,
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
    parameter, element = _place_of(fault, layout)
    who = "a worker" if worker is None else f"worker {worker}"
    if worker != reporter:
        who += f", as worker {reporter} says"
    said = fault.message or "a chunk does not match its checksum"
    return LineDefect(
        reason=HaltReason.REPEATED_FAILURE,
        message=f"step {step}: a chunk was corrupted in transit in {attempts} attempts, the last "
        f"one on the link of {who}: {said}. Check its network card, cables and memory",
        worker=worker,
        block=fault.block,
        parameter=parameter,
        element=element,
        reported_by=reporter,
    )


def in_ready(worker: int, ready: Ready, samples: range) -> LineDefect | None:
    """What is wrong with one worker's report; `samples` are the counts that its share allows."""
    if ready.samples not in samples and (ready.samples or ready.weight):
        return LineDefect(
            reason=HaltReason.PROTOCOL_VIOLATION,
            message=f"worker {worker} reported {ready.samples} samples, and its share has "
            f"{samples[-1]}",
            worker=worker,
            value=str(ready.samples),
        )
    if not (math.isfinite(ready.weight) and ready.weight >= 0):
        value = describe_value(ready.weight)
        return LineDefect(
            reason=HaltReason.PROTOCOL_VIOLATION,
            message=f"worker {worker} reported the weight {value}",
            worker=worker,
            value=value,
        )
    if not math.isfinite(ready.loss_sum):
        value = describe_value(ready.loss_sum)
        return LineDefect(
            reason=HaltReason.NON_FINITE_LOSS,
            message=f"worker {worker}'s loss is {value}",
            worker=worker,
            value=value,
        )
    for norm in (ready.gradient_norm, ready.own_gradient_norm):
        if norm is not None and not (math.isfinite(norm) and norm >= 0):
            value = describe_value(norm)
            return LineDefect(
                reason=HaltReason.PROTOCOL_VIOLATION,
                message=f"worker {worker} reported the gradient norm {value}",
                worker=worker,
                value=value,
            )
    return None


def in_round(round_: StepRound, layout: Layout | None) -> LineDefect | None:
    """What is wrong with a complete round whose reports are right one by one."""
    # Only digests of the head that the round started from can be compared (rule 17).
    digests = {
        worker: ready.digest
        for worker, ready in round_.in_rank_order
        if ready.digest and ready.digest_head == round_.parent
    }
    prefixes = {worker: ready.digest_prefixes for worker, ready in round_.in_rank_order}
    hashed = {worker for worker, ready in round_.in_rank_order if ready.digest_base_hashed}
    return (
        divergence(digests, round_.step - 1, prefixes, layout, hashed)
        or _weights_differ(round_)
        or _loss_overflows(round_)
    )


def divergence(
    digests: Mapping[int, bytes],
    step: int,
    prefixes: Mapping[int, bytes],
    layout: Layout | None,
    hashed: Collection[int] = (),
) -> LineDefect | None:
    """The defect if workers have different weights after `step` (rule 17).

    If there is a majority, the evidence names the lowest worker outside it. If the workers sent
    prefixes of their digests, it names the first parameter that differs. The digests of the workers
    in `hashed` have hashes of frozen parameters in the place of their elements: of equal weights
    they differ from those of the other workers, so each kind is compared within itself.
    """
    for same_kind in (True, False):
        kind = {each: it for each, it in digests.items() if (each in hashed) is same_kind}
        defect = _divergence(kind, step, prefixes, layout)
        if defect is not None:
            return defect
    return None


def _divergence(
    digests: Mapping[int, bytes],
    step: int,
    prefixes: Mapping[int, bytes],
    layout: Layout | None,
) -> LineDefect | None:
    # A majority is only a hint for people: nothing is repaired by it.
    votes = Counter(digests.values())
    if len(votes) < 2:
        return None
    common, count = votes.most_common(1)[0]
    odd = sorted(worker for worker, digest in digests.items() if digest != common)
    other = min(worker for worker, digest in digests.items() if digest == common)
    block, parameter = _first_apart(prefixes.get(odd[0], b""), prefixes.get(other, b""), layout)
    where = "" if block is None else f", first in {parameter} (block {block})"
    if 2 * count <= len(digests):
        return LineDefect(
            reason=HaltReason.REPLICA_DIVERGENCE,
            message=f"the weights of workers {_listed(sorted(digests))} differ after step {step}"
            f"{where}",
            block=block,
            parameter=parameter,
        )
    return LineDefect(
        reason=HaltReason.REPLICA_DIVERGENCE,
        message=f"the weights of {_workers(odd)} differ from the others' after step {step}{where}",
        worker=odd[0],
        block=block,
        parameter=parameter,
        value=digests[odd[0]].hex(),
    )


def _worker_of(fault: Fault, roster: tuple[int, ...]) -> int | None:
    """The worker of the rank that a fault names; None if it names none, or one that is no rank."""
    return roster[fault.rank] if fault.rank is not None and fault.rank < len(roster) else None


def _place_of(fault: Fault, layout: Layout | None) -> tuple[str, tuple[int, ...]]:
    """The parameter that a fault names, and the element in it."""
    if fault.block is None or layout is None:
        return "", ()
    try:
        place = layout.place(fault.block, fault.element)
    except IndexError:
        return "", ()  # A peer's mistake. Only the number of the block is known then.
    return place.parameter, place.element


def _first_apart(mine: bytes, theirs: bytes, layout: Layout | None) -> tuple[int | None, str]:
    """Block and name of the first component whose prefixes differ."""
    blocks = layout.blocks if layout is not None else ()
    # Prefixes come in this order: from the layout's last block to its first.
    names = [
        (block, component.name)
        for block in reversed(range(len(blocks)))
        for component in blocks[block].components
    ]
    # Workers may leave prefixes out, and a faulty one may send too many or too few.
    if not len(mine) == len(theirs) == len(names) * PREFIX_BYTES:
        return None, ""
    for index, name in enumerate(names):
        part = slice(index * PREFIX_BYTES, (index + 1) * PREFIX_BYTES)
        if mine[part] != theirs[part]:
            return name
    return None, ""


def _weights_differ(round_: StepRound) -> LineDefect | None:
    # All averages must be over the whole roster (rule 15). A reducer that missed a rank, or had it
    # twice, shows in one of these two numbers.
    total, size = round_.weight, len(round_.roster)
    for worker, ready in round_.in_rank_order:
        if ready.world_size != size:
            return LineDefect(
                reason=HaltReason.PROTOCOL_VIOLATION,
                message=f"worker {worker} holds averages over {ready.world_size} workers, "
                f"the round has {size}",
                worker=worker,
                value=str(ready.world_size),
            )
        if ready.total_weight != total:
            value = describe_value(ready.total_weight)
            return LineDefect(
                reason=HaltReason.PROTOCOL_VIOLATION,
                message=f"worker {worker} holds averages of total weight {value}, "
                f"the round's weights sum to {describe_value(total)}",
                worker=worker,
                value=value,
            )
    return None


def _loss_overflows(round_: StepRound) -> LineDefect | None:
    # Each report was checked when it arrived, but a sum of finite numbers can overflow.
    if math.isfinite(round_.loss) and math.isfinite(round_.weight):
        return None
    return LineDefect(
        reason=HaltReason.NON_FINITE_LOSS,
        message="the mean of the losses is not finite, though every worker's loss is",
        value=describe_value(round_.loss),
    )


def _sentence(evidence: HaltEvidence, said: str) -> str:
    if evidence.worker is None and evidence.reason is HaltReason.PROTOCOL_VIOLATION:
        # No worker is blamed: the cause may be a failure of the reducer itself.
        return said or "the protocol was violated; no details were reported"
    who = "a worker" if evidence.worker is None else f"worker {evidence.worker}"
    what = evidence.value or "a non-finite value"
    where = f" in {evidence.place}" if evidence.place else ""
    match evidence.reason:
        case HaltReason.NON_FINITE_GRADIENT:
            return f"{who} sent {what}{where}"
        case HaltReason.NON_FINITE_LOSS:
            return f"{who}'s loss is {what}"
        case HaltReason.ENCODING_OVERFLOW:
            whose = "the mean" if evidence.worker is None else who
            fact = f"{whose} has {evidence.value or 'a value'}{where}"
            fact += ", which its encoding can't hold"
            return f"{fact}: {said}" if said else fact
        case HaltReason.NON_FINITE_AVERAGE:
            return f"the mean is {what}{where}, though every contribution is finite"
        case HaltReason.CHECKPOINT:
            return f"{who} could not write a checkpoint: {said}"
        case _:
            fact = f"{who} broke the protocol"
            return f"{fact}: {said}" if said else fact


def _listed(workers: list[int]) -> str:
    names = [str(worker) for worker in workers]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _workers(workers: list[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {_listed(workers)}"
