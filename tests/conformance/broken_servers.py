"""Servers that each break one rule, and the checks that must find it.

Usage: broken_servers.py NAME serve ... is `andon serve ...` with some of its functions replaced.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from andon.protocol.announcements import Serial
from andon.protocol.encoding import Encoding
from andon.protocol.grains import Node
from andon.protocol.halts import HaltEvidence
from andon.protocol.messages import BlockGradient, StaleRound
from andon.protocol.reasons import Reason
from andon.protocol.records import PositionRange, Record, RecordKind
from andon.protocol.shards import Ranges, Split, reassign
from andon.tcp import listening
from andon_cli.app import main
from andon_coordinator.core import (
    agreement,
    dealing,
    defects,
    departures,
    line,
    operators,
    round,
    standing,
    steps,
)
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import SaveRecord
from andon_coordinator.core.events import (
    Event,
    HaltCleared,
    RecordSaved,
    WorkerJoined,
    WorkerReady,
)
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.transfers import StateTransfers
from andon_coordinator.transport.journal import Journal, JournalEffect
from andon_reducer.core import jobs, mean, nodes, tree, trimmed
from andon_reducer.core.effects import SendNotice
from andon_reducer.core.exchange import IncompleteChunk
from andon_reducer.core.mean import Mean, MeanDefect
from andon_reducer.core.run import Run
from andon_reducer.transport.admission import SessionTokens
from conformance.breaking import put, wrap

__all__ = ["BROKEN", "BrokenServer"]


@dataclass(frozen=True, slots=True)
class BrokenServer:
    """A broken server: the checks that it fails, and related checks that it must pass."""

    name: str
    caught_by: tuple[str, ...]
    sign: str
    """A part of the first failed check's message."""
    passes: tuple[str, ...]
    workers: int
    build: Callable[[], None]
    """Breaks this process."""

    @property
    def in_grains(self) -> bool:
        """Whether the defect shows only on a line in grains."""
        return any(name.startswith("grain.") for name in self.caught_by)

    @property
    def restarts(self) -> bool:
        """Whether the defect shows only after the server is killed."""
        return any(name.startswith("journal.") for name in self.caught_by)


BROKEN: dict[str, BrokenServer] = {}
"""Every broken server, by name."""


def broken(
    *caught_by: str, sign: str, passes: tuple[str, ...] = (), workers: int = 2
) -> Callable[[Callable[[], None]], None]:
    """Decorator: the function breaks a server, whose name is the function's."""

    def add(build: Callable[[], None]) -> None:
        name = build.__name__
        BROKEN[name] = BrokenServer(name, caught_by, sign, passes, workers, build)

    return add


# ---------------------------------------------------------------------- the reducer

_Parts = Sequence[BlockGradient]
_Right = Callable[..., Any]


@broken(
    "average.order",
    sign="0x",
    passes=("average.weights", "average.everyone", "average.facts", "average.abstain"),
    workers=3,
)
def sums_backwards() -> None:
    """Adds contributions from the last rank to the first."""
    wrap(jobs, "weighted_mean", lambda right, parts, *more: right(parts[::-1], *more))


@broken("average.weights", sign="0x", passes=("average.alone", "average.facts"))
def means_unweighted() -> None:
    """Averages without weights."""

    def unweighted(right: _Right, parts: _Parts, *more: Any) -> Mean | MeanDefect:
        found: Mean | MeanDefect = right([replace(part, weight=1.0) for part in parts], *more)
        total = sum(part.weight for part in parts)
        return replace(found, total_weight=total) if isinstance(found, Mean) else found

    wrap(jobs, "weighted_mean", unweighted)


@broken("average.untrimmed", sign="0x", passes=("average.facts", "average.order"), workers=3)
def trims_few() -> None:
    """Leaves contributions out of three."""
    wrap(mean, "cut_at_each_end", lambda _right, count: (count - 1) // 2)
    wrap(trimmed, "cut_at_each_end", lambda _right, count: (count - 1) // 2)


@broken("average.trimmed", sign="0x", passes=("average.untrimmed", "average.order"), workers=5)
def trims_nothing() -> None:
    """Makes the weighted mean where a trimmed one is asked for."""
    wrap(jobs, "trimmed_mean", lambda _right, *given: mean.weighted_mean(*given))


@broken("average.int8", sign="as byte 0 of block 0", passes=("average.int4", "average.int8_answer"))
def keeps_all_digits() -> None:
    """Answers in INT8_BLOCK with a scale of more than 16 digits."""

    def precise(
        right: _Right, parts: _Parts, encoding: Encoding, answer: Encoding, *more: Any
    ) -> Mean | MeanDefect:
        found: Mean | MeanDefect = right(parts, encoding, answer, *more)
        if isinstance(found, MeanDefect) or answer is not Encoding.INT8_BLOCK:
            return found
        payload = bytearray(found.payload)
        payload[0] |= 1
        return Mean(memoryview(payload), found.total_weight)

    wrap(jobs, "weighted_mean", precise)


@broken("tree.sum", sign="0x", passes=("tree.nothing", "tree.overlap"), workers=3)
def adds_grain_after_grain() -> None:
    """Adds the nodes that come in their order."""

    def chain(node: Node) -> tuple[Node, Node]:
        return Node(node.first, node.stop - 1), Node(node.stop - 1, node.stop)

    put(tree, "children", chain)


@broken(
    *("tree.overlap", "tree.strange"),
    sign="nothing of the kind",
    passes=("tree.weight", "tree.batch"),
)
def takes_any_nodes() -> None:
    """Takes nodes that overlap, and those that the tree does not have."""

    def add(_: _Right, self: nodes.ExchangeNodes, node: Node, rank: int, weight: float) -> None:
        self._known[node.first] = node, rank, weight
        self.ranks.add(rank)

    wrap(nodes.ExchangeNodes, "_add", add)


@broken("average.everyone", sign="the average of block 0")
def answers_one_rank() -> None:
    """Sends an average only to the first rank."""
    wrap(IncompleteChunk, "recipients", lambda right, chunk: right(chunk)[:1])


@broken(
    "fault.nan", "fault.infinity", sign="an average of the same chunk", passes=("fault.weight",)
)
def lets_nan_through() -> None:
    """Does not check that values are finite."""
    put(mean, "_surely_finite", lambda tile: True)


@broken("reduce.stale", sign="expected stale_round", passes=("reduce.aborted",))
def silent_about_stale() -> None:
    """Drops a message with an older key silently."""

    def tells(effect: Any) -> bool:
        return isinstance(effect, SendNotice) and isinstance(effect.notice, StaleRound)

    def enter(right: _Right, run: Run, stream: Any, key: Any, effects: list[Any]) -> Any:
        entered = right(run, stream, key, effects)
        effects[:] = [each for each in effects if not tells(each)]
        return entered

    wrap(Run, "_enter", enter)


@broken("reduce.bystander", sign="only round_aborted", passes=("reduce.aborted",))
def takes_idle_streams_for_members() -> None:
    """Voids the round when a stream ends that brought nothing of it."""

    def end(right: _Right, run: Run, stream: Any, now: float) -> Any:
        if run._round is not None:
            run._round.streams.add(stream.number)
        return right(run, stream, now)

    wrap(Run, "end", end)


@broken("session.token", sign="came round_opened", passes=("session.opened", "session.open_first"))
def trusts_any_token() -> None:
    """Does not check session tokens: it believes the serial that one begins with."""

    def believe(_tokens: SessionTokens, _run_id: str, _worker: int, token: bytes) -> Serial:
        # The serial has to be right, because transfers are bound to two joins.
        serial: Serial = struct.unpack_from("<QQ", token)
        return serial

    put(SessionTokens, "admit", believe)


@broken(
    "lane.proof",
    sign="the end of a connection with a proof with another token",
    passes=("lane.offer", "lane.once", "lane.average"),
)
def believes_any_proof() -> None:
    """Takes any proof on a lane's port for a right one, if it names an offer."""
    put(listening, "is_claim", lambda *_: True)


# ---------------------------------------------------------------------- rounds and records


@broken("commit.all_ready", sign="no record of the void round")
def commits_early() -> None:
    """The first StepReady commits the step."""

    def so_far(round_: StepRound) -> list[Any]:
        return [(each, round_.ready[each]) for each in round_.roster if each in round_.ready]

    put(StepRound, "complete", property(lambda round_: bool(round_.ready)))
    put(StepRound, "in_rank_order", property(so_far))
    put(steps, "in_round", lambda *round_: None)


@broken("halt.no_commit", sign="no record of the void round", passes=("halt.cord", "halt.status"))
def commits_the_halted() -> None:
    """A halt does not void the round: later StepReady messages still commit it."""

    def stop(right: _Right, core: CoreState, defect: LineDefect) -> None:
        round_ = core.round
        right(core, defect)
        core.round = round_

    wrap(CoreState, "stop_line", stop)


@broken("void.new_key", sign="expected a key above")
def uses_keys_again() -> None:
    """Reuses the void round's key for the next attempt at the step."""

    def again(right: _Right, core: CoreState) -> StepRound | None:
        round_: StepRound | None = right(core)
        if round_ is not None:
            core.keys._round -= 1
        return round_

    wrap(CoreState, "_drop_round", again)


@broken("commit.everyone", sign="at worker 1")
def forgets_a_member() -> None:
    """Does not send a step's record to the last worker."""

    def to_others(
        right: _Right, core: CoreState, member: LineMember, record: Record, result: Any
    ) -> None:
        before = len(core.effects)
        right(core, member, record, result)
        if record.kind is RecordKind.STEP and member.worker == max(record.roster):
            del core.effects[before:]

    wrap(CoreState, "announce", to_others)


@broken("assign.parent", sign="the parent at worker 0", passes=("assign.roster", "commit.record"))
def names_a_wrong_parent() -> None:
    """An assignment names its own key as its parent."""

    def orphans(right: _Right, round_: StepRound) -> list[Any]:
        return [
            replace(each, assignment=replace(each.assignment, parent=round_.key))
            for each in right(round_)
        ]

    wrap(StepRound, "assignments", orphans)


_Kept = Sequence[Iterable[PositionRange]]


@broken("assign.shares", sign="the positions of worker", passes=("assign.parent", "assign.roster"))
def assigns_twice() -> None:
    """Assigns the whole batch to every rank."""

    def whole(batch: PositionRange, kept: _Kept, _split: Split) -> tuple[Ranges, ...]:
        return tuple((batch,) for _ in kept)

    put(dealing, "reassign", whole)


@broken(
    "assign.shares",
    "void.shares",
    sign="the positions of worker",
    passes=("assign.parent", "void.stream_end"),
    workers=3,
)
def deals_in_runs() -> None:
    """Says that shares are interleaved, and gives each rank one run of positions."""

    def in_runs(batch: PositionRange, kept: _Kept, split: Split) -> tuple[Ranges, ...]:
        return reassign(batch, kept, Split(split.targets))

    sys.argv += ["--shares", "interleaved"]
    put(dealing, "reassign", in_runs)


@broken(
    "assign.shares",
    sign="the positions of worker",
    passes=(
        "average.weights",
        "average.order",
        "average.facts",
        "average.abstain",
        "assign.parent",
    ),
    workers=3,
)
def forgets_the_targets() -> None:
    """Names targets, and divides the batch equally."""

    def equally(batch: PositionRange, kept: _Kept, split: Split) -> tuple[Ranges, ...]:
        return reassign(batch, kept, Split(interleaved=split.interleaved))

    sys.argv += ["--shares", "balanced"]
    put(dealing, "reassign", equally)


@broken("refuse.layout", sign="came INVALID_ARGUMENT", passes=("refuse.plan", "refuse.slot"))
def refuses_by_another_code() -> None:
    """Refuses a Join with another model with the wrong status code."""
    put(Reason.LAYOUT_DIFFERS, "code", "INVALID_ARGUMENT")


@broken("journal.record", sign="JOIN_STATUS_RECORD_FOLLOWS; came JOIN_STATUS_IN_SYNC")
def journals_late() -> None:
    """Announces a record before it is written; it is written with the next change, or never."""
    late: list[SaveRecord] = []

    def later(right: _Right, journal: Journal, effect: JournalEffect) -> Event | None:
        while late:
            right(journal, late.pop())
        if not isinstance(effect, SaveRecord):
            event: Event | None = right(journal, effect)
            return event
        late.append(effect)
        return RecordSaved(effect.record.key)

    wrap(Journal, "_apply", later)


@broken("commit.loss", sign="the loss", passes=("commit.record",))
def averages_losses_plainly() -> None:
    """A step's loss is the unweighted mean of its workers' losses."""

    def plain(round_: StepRound) -> float:
        ready = [each for _, each in round_.in_rank_order if each.weight > 0]
        losses = [each.loss_sum / each.weight for each in ready]
        return sum(losses) / len(losses) if losses else 0.0

    put(StepRound, "loss", property(plain))


@broken(
    "assign.standing",
    sign="no assignment while a member does not stand",
    passes=("assign.asked", "commit.record"),
)
def takes_one_standing_request_for_all() -> None:
    """One member that asks for the next step with its report is enough to open it."""
    put(standing, "suffices", lambda core: bool(core.standing))


@broken("commit.overflow", sign="the overflow at", passes=("commit.record",))
def forgets_overflows() -> None:
    """No record says that gradients overflowed."""
    put(StepRound, "overflow", property(lambda _round: False, lambda _round, _value: None))


# ---------------------------------------------------------------------- members and halts


@broken("halt.wrong_id", sign="came OK", passes=("halt.cord", "halt.retry"))
def takes_any_answer() -> None:
    """An operator's answer counts for the current halt, whichever halt it names."""

    def easily(right: _Right, core: CoreState, halt: HaltEvidence, event: HaltCleared) -> str:
        objection: str = right(core, halt, replace(event, halt_id=halt.id))
        return objection

    wrap(operators, "_objection", easily)


@broken("join.replaces", sign="the end of worker 1", passes=("join.fresh", "rejoin.in_sync"))
def keeps_older_streams() -> None:
    """Leaves the old stream open when a worker joins again."""

    def leave_open(
        right: _Right, core: Any, member: LineMember, message: str, why: str, *, grace_s: float
    ) -> None:
        if "joined again" not in message:
            right(core, member, message, why, grace_s=grace_s)
        elif member.stream is not None:
            departures.detach(core, member, why, grace_s=grace_s)

    wrap(departures, "cut_off", leave_open)


@broken(
    "rejoin.equal_step", sign="came JOIN_STATUS_IN_SYNC", passes=("rejoin.behind", "rejoin.in_sync")
)
def counts_steps() -> None:
    """A worker at the line's step counts as in sync, whatever its head."""

    def at_step(right: _Right, core: CoreState, event: WorkerJoined) -> None:
        request, head = event.request, core.chain.head
        if request.head is not None and head is not None and request.step == core.chain.step:
            event = replace(event, request=replace(request, head=head))
        right(core, event)

    wrap(line._OF_OTHERS, WorkerJoined, at_step)


@broken("halt.divergence", sign="StepCommitted at worker", passes=("halt.loss",))
def believes_the_weights() -> None:
    """Does not compare the weights' digests of one head."""
    put(agreement, "divergence", lambda *_: None)


@broken("halt.blame", sign="the worker", passes=("halt.loss",))
def believes_any_rank() -> None:
    """Takes the rank in a Fault for the worker at fault, whatever the Fault is about."""
    put(defects, "_OWN", frozenset())


@broken(
    "commit.total_weight", "commit.world_size", sign="nothing was added", passes=("commit.loss",)
)
def believes_the_totals() -> None:
    """Does not compare the total weights that the workers report."""
    put(agreement, "_weights_differ", lambda round_: None)


@broken(
    "bootstrap.waits",
    "join.fresh",
    sign="INITIAL",
    passes=("bootstrap.record", "bootstrap.transfer"),
)
def bootstraps_early() -> None:
    """The first worker bootstraps the line before the others have joined."""
    put(CoreState, "expected", property(lambda core: 1))


@broken("bootstrap.no_round", "transfer.no_round", sign="no ShardAssignment")
def trains_during_transfers() -> None:
    """Runs rounds during a state transfer."""
    put(StateTransfers, "__len__", lambda transfers: 0)


@broken(
    "void.stream_end", "void.rejoin", sign="no record of the void round", passes=("void.new_key",)
)
def shrinks_the_roster() -> None:
    """A round continues without the worker that it lost."""
    # Only here: every other server would import pytest in vain.
    import pytest

    from search.mutants import shrinking_roster

    shrinking_roster(pytest.MonkeyPatch())


@broken("reduce.term", sign="a round of a term above", passes=("reduce.stale",))
def ignores_greater_terms() -> None:
    """Treats a reported key with a greater term as its own."""
    put(Keys, "covers", lambda keys, key: True)


@broken("grain.shares", sign="whole grains of 2 positions", passes=("grain.tree",), workers=3)
def assigns_parts_of_grains() -> None:
    """Assigns positions, whatever their grains."""

    def by_position(right: _Right, core: CoreState, roster: Any, window: Any) -> Any:
        dealt = right(core, roster, window)
        return replace(dealt, shares=reassign(dealt.batch, [()] * len(roster)))

    wrap(dealing, "deal", by_position)


@broken(
    "grain.loss",
    sign="the loss",
    passes=("grain.shares", "grain.weight", "grain.kept"),
    workers=3,
)
def adds_losses_in_rank_order() -> None:
    """Adds the losses of nodes as they come."""

    def in_order(
        _: _Right, losses: Iterable[Any], __: Any, number: Callable[[Any], float]
    ) -> float:
        return sum(map(number, losses))

    wrap(round, "along_tree", in_order)


@broken("grain.nodes", sign="Halt, and no record", passes=("grain.shares",))
def believes_any_nodes() -> None:
    """Takes the losses of whatever nodes a worker reports."""
    put(steps, "in_nodes", lambda *_: None)
    wrap(round, "along_tree", lambda _, losses, __, number: sum(map(number, losses)))


@broken("void.old_ready", sign="no record of the void round", passes=("void.new_key",))
def counts_old_readies() -> None:
    """A StepReady counts for the current round, whatever its key."""

    def any_key(right: _Right, core: CoreState, member: LineMember, event: WorkerReady) -> None:
        if core.round is not None:
            event = replace(event, ready=replace(event.ready, key=core.round.key))
        right(core, member, event)

    wrap(line._OF_WORKERS, WorkerReady, any_key)


if __name__ == "__main__":
    BROKEN[sys.argv.pop(1)].build()
    sys.exit(main())
