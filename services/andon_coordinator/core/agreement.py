"""Agreement: what is wrong with a complete round whose reports are right one by one.

These are checks without side effects: of the digests of the workers' weights, of what they say of
the averages that they hold, and of the sum of their losses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from andon.protocol.halts import HaltReason, describe_value
from andon.protocol.layout import Layout
from andon.protocol.limits import PREFIX_BYTES, clipped
from andon_coordinator.core.defects import LineDefect, ModelPlace, violation
from andon_coordinator.core.round import StepRound

__all__ = ["apart", "divergence", "first_apart", "in_round"]


def in_round(round_: StepRound, layout: Layout | None) -> LineDefect | None:
    """What is wrong with a complete round whose reports are right one by one."""
    return _digests_differ(round_, layout) or _weights_differ(round_) or _loss_overflows(round_)


def _digests_differ(round_: StepRound, layout: Layout | None) -> LineDefect | None:
    digests = _digests(round_)
    if not digests:  # As in most rounds.
        return None
    prefixes = {worker: ready.digest_prefixes for worker, ready in round_.in_rank_order}
    hashed = {worker for worker, ready in round_.in_rank_order if ready.digest_base_hashed}
    return divergence(digests, round_.terms.step - 1, prefixes, layout, hashed)


def apart(round_: StepRound, suspects: Collection[int]) -> list[int]:
    """The suspects whose weights differ from those of the others; empty if these differ too."""
    digests, found = _digests(round_), []
    for base_hashed in (True, False):  # Each kind is compared within itself: see `divergence`.
        kind = {
            worker: digests[worker]
            for worker, ready in round_.in_rank_order
            if worker in digests and ready.digest_base_hashed is base_hashed
        }
        others = {digest for worker, digest in kind.items() if worker not in suspects}
        if len(others) > 1:
            return []
        if others:
            found += [worker for worker, digest in kind.items() if digest not in others]
    return found


def _digests(round_: StepRound) -> dict[int, bytes]:
    """The digests that can be compared: of the head that the round started from (rule 17)."""
    return {
        worker: ready.digest
        for worker, ready in round_.in_rank_order
        if ready.digest and ready.digest_head == round_.terms.parent
    }


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
    place = first_apart(prefixes.get(odd[0], b""), prefixes.get(other, b""), layout)
    where = "" if place.block is None else f", first in {place}"
    if 2 * count <= len(digests):
        return LineDefect(
            reason=HaltReason.REPLICA_DIVERGENCE,
            message=f"the weights of workers {_listed(sorted(digests))} differ after step {step}"
            f"{where}",
            place=place,
        )
    return LineDefect(
        reason=HaltReason.REPLICA_DIVERGENCE,
        message=f"the weights of {_workers(odd)} differ from the others' after step {step}{where}",
        worker=odd[0],
        place=place,
        value=digests[odd[0]].hex(),
    )


def first_apart(mine: bytes, theirs: bytes, layout: Layout | None) -> ModelPlace:
    """The place of the first component whose prefixes in two digests of weights differ.

    Nothing of it is known if prefixes are missing, or all are equal.
    """
    blocks = layout.blocks if layout is not None else ()
    # Prefixes come in this order: from the layout's last block to its first.
    places = [
        ModelPlace(block, component.name)
        for block in reversed(range(len(blocks)))
        for component in blocks[block].components
    ]
    # Workers may leave prefixes out, and a faulty one may send too many or too few.
    if not len(mine) == len(theirs) == len(places) * PREFIX_BYTES:
        return ModelPlace()
    for index, place in enumerate(places):
        part = slice(index * PREFIX_BYTES, (index + 1) * PREFIX_BYTES)
        if mine[part] != theirs[part]:
            return place
    return ModelPlace()


def _weights_differ(round_: StepRound) -> LineDefect | None:
    # All averages must be over the whole roster (rule 15). A reducer that missed a rank, or had it
    # twice, shows in one of these two numbers.
    total, size = round_.weight, len(round_.roster)
    for worker, ready in round_.in_rank_order:
        if ready.world_size != size:
            what = f"holds averages over {ready.world_size} workers, the round has {size}"
            return violation(worker, what, str(ready.world_size))
    held = {worker: ready.total_weight for worker, ready in round_.in_rank_order}
    if all(each == total for each in held.values()):
        return None
    # The sum is of what each worker says of itself. One that says something else than it sent makes
    # the sum wrong, and then every honest total differs from it: totals are compared only with each
    # other to find whose is wrong.
    votes = Counter(held.values())
    odd = [worker for worker, its in held.items() if votes[its] == 1]
    if len(votes) == 2 and len(odd) == 1:
        worker, value = odd[0], describe_value(held[odd[0]])
        common = describe_value(votes.most_common(1)[0][0])
        what = f"holds averages of total weight {value}, the others {common}"
        return violation(worker, what, value)
    reported = {worker: ready.weight for worker, ready in round_.in_rank_order}
    message = (
        "a worker reported another weight than it sent, or the averages are wrong: the reported "
        f"weights sum to {describe_value(total)} ({_claims(reported)}), and the averages have "
        f"the total weight {describe_value(next(iter(votes)))}"
        if len(votes) == 1
        else f"the workers hold averages of different total weights ({_claims(held)}); the "
        f"weights that they reported sum to {describe_value(total)} ({_claims(reported)})"
    )
    return LineDefect(reason=HaltReason.PROTOCOL_VIOLATION, message=clipped(message))


def _claims(numbers: Mapping[int, float]) -> str:
    """What each worker says: `worker 0 2.0, worker 1 6.0`."""
    return ", ".join(f"worker {each} {describe_value(it)}" for each, it in numbers.items())


def _loss_overflows(round_: StepRound) -> LineDefect | None:
    # Each report was checked when it arrived, but a sum of finite numbers can overflow.
    if math.isfinite(round_.loss) and math.isfinite(round_.weight):
        return None
    return LineDefect(
        reason=HaltReason.NON_FINITE_LOSS,
        message="the mean of the losses is not finite, though every worker's loss is",
        value=describe_value(round_.loss),
    )


def _listed(workers: list[int]) -> str:
    names = [str(worker) for worker in workers]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _workers(workers: list[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {_listed(workers)}"
