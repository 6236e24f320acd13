"""Join checks: whether a worker may join, and in which slot. A refusal names what differs.

Everything in a Join is checked before any of it is used. The first check that fails decides the
reason, so their order is a part of what users see: first what concerns access (token, run), then
what concerns the program, then the model and its data, then numbers that can't be true.
"""

from __future__ import annotations

import dataclasses
import hmac

from andon.protocol.capabilities import (
    INT2,
    INT4,
    INT8,
    LEARNING,
    MEAN_BUFFERS,
    NORMS,
    SAME_BITS,
    TOPK,
    TRIMMED,
    VERIFIES,
)
from andon.protocol.grains import TREE_VERSION
from andon.protocol.layout import first_difference
from andon.protocol.limits import COUNT_LIMIT, MAX_GRAINS, PROTOCOL_VERSION
from andon.protocol.reasons import Reason
from andon.protocol.records import TERM_AHEAD_S, Key, RecordKind
from andon.protocol.run_settings import RunPlan, Topology
from andon.protocol.schedules import (
    BALANCE_CAPABILITY,
    CADENCE_CAPABILITY,
    FRAGMENTS_CAPABILITY,
    LOCAL_CAPABILITY,
    OVERLAP_CAPABILITY,
    QUORUM_CAPABILITY,
)
from andon_coordinator.core import arithmetics
from andon_coordinator.core.events import JoinRequest
from andon_coordinator.core.join_answers import JoinRefusal
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.same_bits import obstacle_in
from andon_coordinator.core.spikes import SpikeAction
from andon_coordinator.core.state import CoreState

__all__ = ["adopts", "check_join", "greatest_term", "refusal_of_an_ended_run"]

_TOTALS = ("total_steps", "total_epochs")

_REMEDIES = {
    **dict.fromkeys(
        (BALANCE_CAPABILITY, CADENCE_CAPABILITY, LOCAL_CAPABILITY, OVERLAP_CAPABILITY),
        ": start the line with --schedule every-step --shares equal, or update the client",
    ),
    FRAGMENTS_CAPABILITY: ": start the line without --fragments, or update the client",
    **dict.fromkeys(
        (LEARNING, QUORUM_CAPABILITY),
        ": start the line without --quorum (with --schedule local in place of async), or update "
        "the client",
    ),
    NORMS: ": start the line without --max-grad-norm and --worker-grad-norm, or update the client",
    **dict.fromkeys(
        (INT2, INT4, INT8, TOPK),
        ": start the line with --encoding float32 or bfloat16, or update the client",
    ),
    MEAN_BUFFERS: ": start the line without --average-buffers, or update the client",
    TRIMMED: ": start the line without --mean trimmed, or update the client",
    VERIFIES: ": start the line without --verify, or give the worker same_bits and the package "
    "xxhash (`pip install andon[trainer]`)",
    SAME_BITS: ": leave same_bits out of line and scripts, or update the client",
}
"""What helps a worker that lacks a capability."""

_ADOPTED_LIMIT = COUNT_LIMIT // 2
"""The limit of a number that the line adopts from a worker.

The line counts on from there, and workers report the later numbers in their Joins, where the limit
is COUNT_LIMIT. A lower limit here leaves room for that.
"""


def check_join(
    core: CoreState, request: JoinRequest, *, attends: bool = False
) -> int | JoinRefusal:
    """The slot that a worker gets, or why it gets none; `attends`: the run is one of sessions."""
    refusal = (
        _check_token(core, request)
        or _check_run(core, request)
        or _check_not_dropped(core, request)
        or _check_protocol(core, request)
        or _check_use(attends=attends)
        or _check_not_over(core, request)
        or _check_layout(core, request)
        or _check_fragments(core, request)
        or _check_same_bits(core, request)
        or _check_plan(core, request)
        or _check_checkpoints(core, request)
        or _check_dataset_size(core, request)
        or _check_arithmetic(core, request)
        or _check_plausible(core, request)
    )
    return _slot(core, request) if refusal is None else refusal


def greatest_term(request: JoinRequest) -> int:
    """The greatest term that a worker reports anywhere in its Join."""
    keys: list[Key | None] = [request.head, request.held_key]
    if request.halt is not None:
        keys.append(request.halt.key)
    return max([request.greatest_term, *(key.term for key in keys if key is not None)])


def refusal_of_an_ended_run(core: CoreState) -> JoinRefusal:
    """What a worker is told that comes, or still waits for state, once the run is over."""
    message = (
        f"run {core.settings.run_id} is over after step {core.chain.step}: nothing is left to do, "
        "and another run needs another name"
    )
    return JoinRefusal(reason=Reason.COMPLETE, message=message)


def adopts(core: CoreState, request: JoinRequest) -> bool:
    """Whether the worker's head becomes the line's: it is newer, and recovery is not over."""
    head, ours = request.head, core.chain.head
    return not core.recovery_over and head is not None and (ours is None or head > ours)


def _check_token(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    wanted = core.settings.token
    # A plain comparison would stop at the first byte that differs, and its duration would tell.
    if not wanted or hmac.compare_digest(request.token, wanted):
        return None
    shown = "another" if request.token else "none"
    message = (
        f"the line asks for the run's token, and the worker shows {shown}: give it "
        "the line's file by ANDON_TOKEN_FILE (or --token-file of `andon run`)"
    )
    return JoinRefusal(reason=Reason.TOKEN, message=message, component="token")


def _check_run(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    settings = core.settings
    if request.run_id not in ("", settings.run_id):
        return _differs(
            Reason.WRONG_RUN,
            f"run {settings.run_id} is served here, not {request.run_id}",
            ("run_id", request.run_id, settings.run_id),
        )
    return None


def _check_use(*, attends: bool) -> JoinRefusal | None:
    if not attends:
        return None
    return JoinRefusal(
        reason=Reason.OTHER_USE,
        message="ranks of this run attend sessions, as PyTorch's process groups do, and a run is "
        "for workers of a line or for ranks of sessions: serve another run for this worker",
    )


def _check_not_dropped(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    """Refuses a worker that an operator dropped, whichever slot it asks for now."""
    # A process may claim another incarnation, and not another name than its token has.
    if request.incarnation in core.barred:
        what, fact = "incarnation", "this process"
    elif request.credential in core.barred:
        what, fact = "token", f"the worker that the token {request.credential!r} is for"
    else:
        return None
    message = f"{fact} was dropped: it may not join run {core.settings.run_id} again"
    return JoinRefusal(reason=Reason.DROPPED, message=message, component=what)


def _check_protocol(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    if request.protocol_version != PROTOCOL_VERSION:
        mine, theirs = str(request.protocol_version), str(PROTOCOL_VERSION)
        return _differs(
            Reason.VERSION,
            f"the worker speaks protocol version {mine}, the line {theirs}",
            ("protocol_version", mine, theirs),
        )
    needed = core.settings.capabilities | core.pacing.capabilities
    if core.settings.same_bits or request.plan.grain:
        needed |= {SAME_BITS}
    if core.settings.verify.fraction:
        needed |= {VERIFIES}
    missing = sorted(needed - request.capabilities)
    if missing:
        remedy = _REMEDIES.get(missing[0], "")
        return _differs(
            Reason.CAPABILITY,
            f"the line needs {missing[0]}, which the worker lacks{remedy}",
            (missing[0], "missing", "required"),
        )
    return _check_spare(core, request) if request.spare else None


def _check_spare(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    """Refuses a spare where it could not follow."""
    policy = core.settings.policy
    if policy.topology is Topology.RING or policy.local_steps:
        what = "exchanges on a ring" if policy.topology is Topology.RING else "makes local steps"
        return _differs(
            Reason.CAPABILITY,
            f"a spare can't follow a line that {what}: start the line without that, or this worker "
            "without ANDON_SPARE",
            ("spare", "1", "0"),
        )
    if LEARNING not in request.capabilities:
        return _differs(
            Reason.CAPABILITY,
            f"a spare needs {LEARNING}, which this worker lacks: update its client, see what its "
            "log says of it, or start it without ANDON_SPARE",
            (LEARNING, "missing", "required"),
        )
    return None


def _check_not_over(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    over = core.line_state is LineState.COMPLETE or core.shut_down
    if core.stop_reason and not over:
        # A worker that has the last weights, or is one record short of them, may still come back
        # to leave in order. Nobody is there to bring the others to the last step.
        record = core.chain.record
        missed = (
            record is not None
            and request.head == record.parent
            and (record.kind is RecordKind.MARK or request.held_key == record.key)
        )
        over = request.head != core.chain.head and not missed
    return refusal_of_an_ended_run(core) if over else None


def _check_layout(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    if core.layout is None or request.layout.digest == core.layout.digest:
        return None
    found = first_difference(request.layout, core.layout)
    assert found is not None, "layouts of different digests differ"
    return _differs(
        Reason.LAYOUT_DIFFERS,
        f"{found.component} is {found.mine} at the worker and {found.theirs} on the line",
        (found.component, found.mine, found.theirs),
    )


def _check_fragments(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    """Refuses a model that has fewer blocks than the line has fragments."""
    fragments, blocks = core.settings.policy.fragments, len(request.layout.blocks)
    if fragments <= blocks or fragments == 1:
        return None
    return _differs(
        Reason.LAYOUT_DIFFERS,
        f"the line exchanges models in {fragments} fragments, and the worker's has {blocks} "
        f"block{'' if blocks == 1 else 's'} to divide among them: start the line with fewer "
        "--fragments",
        ("blocks", str(blocks), str(fragments)),
    )


def _check_same_bits(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    """Refuses grains where bits would depend on the workers, and a plan without where none may."""
    plan, settings = request.plan, core.settings
    if not plan.grain:
        if not settings.same_bits or core.plan is not None:
            return None  # Or the plans differ.
        return _differs(
            Reason.SAME_BITS,
            f"the line is served with {'--verify' if settings.verify.fraction else '--same-bits'}, "
            "and the worker's script has no grains: set same_bits (ANDON_SAME_BITS=1), and pass "
            "prepare a micro_batch_size",
            ("grain", "0", "needed"),
        )
    grains = f"the worker's plan has grains of {plan.grain} sample{'' if plan.grain == 1 else 's'}"
    if plan.tree != TREE_VERSION:
        return _differs(
            Reason.SAME_BITS,
            f"{grains} and version {plan.tree} of their tree, and the line adds along version "
            f"{TREE_VERSION}: use one version of Andon",
            ("tree", str(plan.tree), str(TREE_VERSION)),
        )
    count = -(-plan.global_batch // plan.grain)
    if count > MAX_GRAINS:
        least = -(-plan.global_batch // MAX_GRAINS)
        return _differs(
            Reason.SAME_BITS,
            f"{grains}, so that a batch of {plan.global_batch} has {count} of them, and a line can "
            f"compare {MAX_GRAINS}: use a micro_batch_size of at least {least}",
            ("grain", str(plan.grain), f"at least {least}"),
        )
    obstacle = obstacle_in(settings.policy, settings.pacing)
    if obstacle is None:
        return None
    return _differs(
        Reason.SAME_BITS,
        f"{grains}, and the line is served with {obstacle.setting}, which {obstacle.why}: "
        f"{obstacle.remedy}, or leave same_bits out of the script",
        ("grain", str(plan.grain), obstacle.setting),
    )


_PLAN_REMEDIES = {
    "grain": ": give all workers the same same_bits (ANDON_SAME_BITS) and micro_batch_size",
    "dataset_size": ": every worker has the whole training set, and the line divides it, so leave "
    "out what takes a part of it by RANK or WORLD_SIZE",
}
"""What helps a worker whose field of the plan differs."""


def _check_plan(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    if core.plan is None:
        return None
    for name in (field.name for field in dataclasses.fields(RunPlan)):
        if core.totals_reopened and name in _TOTALS:
            continue
        mine, theirs = getattr(request.plan, name), getattr(core.plan, name)
        if name == "data_digest":
            # A worker may leave the digest out; then nothing is compared.
            if mine and theirs and mine != theirs:
                return _data_differs(mine, theirs, stream=core.plan.dataset_size is None)
        elif mine != theirs:
            here, there = _shown(mine), _shown(theirs)
            fact = f"{name} is {here} at the worker and {there} on the line"
            return _differs(
                Reason.PLAN_DIFFERS,
                fact + _PLAN_REMEDIES.get(name, ""),
                (name, here, there),
            )
    return None


def _check_checkpoints(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    """Refuses a worker that could write checkpoints, and does not, where the line needs some."""
    # One without a folder writes none in any case: it may be on another host than the writer.
    if core.settings.on_spike is not SpikeAction.BACK or request.checkpoints is None:
        return None
    if request.checkpoints.every:
        return None
    return _differs(
        Reason.PLAN_DIFFERS,
        "the line is served with --on-spike back, and the worker writes no checkpoints to which it "
        "could go back: pass --checkpoint-every N (ANDON_CHECKPOINT_EVERY, "
        "Line(checkpoint_every=N)), or --on-spike skip",
        ("checkpoint_every", "0", "1 or more"),
    )


def _data_differs(mine: str, theirs: str, *, stream: bool) -> JoinRefusal:
    if stream:
        text = (
            "the worker's stream does not begin with the items that the line's begins with: every "
            "worker reads the same stream, and takes its own part of it. Leave out what shards it "
            "by rank (split_by_node, split_dataset_by_node), seed what shuffles it"
        )
    else:
        text = (
            "the training set has as many samples at the worker as on the line, but not the same "
            "ones: every worker has the whole set, and the line divides it, so leave out what "
            "takes a part of it by RANK; seed whatever splits, shuffles or generates it, as in "
            "random_split(data, lengths, torch.Generator().manual_seed(0))"
        )
    return _differs(
        Reason.PLAN_DIFFERS,
        f"{text}, or set ANDON_CHECK_DATA=0 if samples may differ",
        ("data_digest", mine, theirs),
    )


def _check_dataset_size(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    size, workers = request.plan.dataset_size, core.settings.expect_workers
    if size is not None and size < workers:
        return _differs(
            Reason.DATASET_TOO_SMALL,
            f"a dataset of {size} sample{'' if size == 1 else 's'} is smaller than the {workers} "
            "workers of the line: start fewer workers (--workers), or leave out what takes a part "
            "of it by RANK",
            ("dataset_size", str(size), str(workers)),
        )
    return None


def _check_arithmetic(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    if not request.plan.grain:
        return None
    others = (*core.members.live(), *core.members.in_grace())
    alone = all(each.request.incarnation == request.incarnation for each in others)
    return arithmetics.refusal(core.arithmetics, request, core.settings.arithmetic, alone=alone)


def _check_plausible(core: CoreState, request: JoinRequest) -> JoinRefusal | None:
    """Refuses numbers that no worker of this run could have, before any of them is adopted.

    One such number would stay: the line continues from the terms, steps and halts that workers
    report (rules 1, 8 and 9).
    """
    term, wall = greatest_term(request), core.wall
    if not core.keys.is_plausible(term, wall):
        text = (
            f"the worker reports the term {term}, whose counter {term >> 32} is more than "
            f"{TERM_AHEAD_S} s ahead of the coordinator's clock, {int(wall)}: set the clock that "
            "is wrong"
        )
        return _invalid(text, ("greatest_term", str(term), str(core.keys.term)))
    size, cursor = request.plan.epoch_size, request.cursor
    if size is not None and cursor.position >= size:
        text = (
            f"the worker's cursor is at position {cursor.position} of epoch {cursor.epoch}, but "
            f"an epoch of this dataset has {size} positions"
        )
        return _invalid(text, ("cursor", str(cursor.position), str(size)))
    counts = {"step": request.step, "cursor.epoch": cursor.epoch} if adopts(core, request) else {}
    if request.halt is not None and request.halt.id >= core.next_halt_id:
        counts["halt.id"] = request.halt.id
    for name, count in counts.items():
        if count >= _ADOPTED_LIMIT:
            text = f"{name} is {count}, but a line only continues from below {_ADOPTED_LIMIT}"
            return _invalid(text, (name, str(count), str(_ADOPTED_LIMIT)))
    return None


def _slot(core: CoreState, request: JoinRequest) -> int | JoinRefusal:
    same = core.members.of_incarnation(request.incarnation)
    if request.launch_slot is None:
        if same is not None:
            return same.worker
        free = _free_slot(core, request)
        if free is not None:
            return free
        most = str(core.settings.max_workers)
        message = (
            f"all {most} slots are taken: start the line with a greater --max-workers, or end one "
            "of its workers"
        )
        return JoinRefusal(reason=Reason.FULL, message=message, theirs=most)
    slot = request.launch_slot
    if slot >= core.settings.max_workers:
        most = str(core.settings.max_workers)
        return _differs(
            Reason.SLOT,
            f"slot {slot} is beyond the {most} workers that the line may have",
            ("launch_slot", str(slot), most),
        )
    # A slot that was asked for by number may be taken from a worker in its grace: a launcher that
    # restarts a dead process gives it the same slot.
    holder = core.members.get(slot)
    if holder is not None and holder is not same and holder.stream is not None:
        return _differs(
            Reason.SLOT,
            f"another process on {holder.request.node_id or 'some host'} holds slot {slot}",
            ("launch_slot", str(slot), "taken"),
        )
    return slot


def _free_slot(core: CoreState, request: JoinRequest) -> int | None:
    most, members = core.settings.max_workers, core.members
    if request.spare:
        # Not one that a launcher has given to a worker which is still to come.
        taken = {each.worker for each in (*members.live(), *members.in_grace())}
        beyond = (slot for slot in range(core.settings.expect_workers, most) if slot not in taken)
        if (slot := next(beyond, None)) is not None:
            return slot
    return members.first_free(most)


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)


def _invalid(message: str, what: tuple[str, str, str]) -> JoinRefusal:
    return _differs(Reason.INVALID_MESSAGE, message, what)


def _differs(reason: Reason, message: str, what: tuple[str, str, str]) -> JoinRefusal:
    component, mine, theirs = what
    return JoinRefusal(
        reason=reason, message=message, component=component, mine=mine, theirs=theirs
    )
