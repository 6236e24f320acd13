"""Rounds: how work is assigned, and how it becomes a record (sections 19, 21 and 22)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from andon.protocol.capabilities import STANDING
from andon.protocol.records import Cursor, PositionRange
from andon.protocol.shards import Split, cursor_after, next_batch, reassign
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2
from andon.wire import conversion
from andon_conformance.runner.checks import (
    Checks,
    NotApplicable,
    Violation,
    require,
    require_above,
    same,
)
from andon_conformance.runner.gradients import PLAN, AssignedRound
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of
from andon_conformance.runner.talk import shown

__all__ = ["CHECKS", "bounds", "expect_shares", "place_of"]

CHECKS = Checks()


def bounds(part: Any) -> tuple[int, int]:
    """Start and stop of a range, in a message or not."""
    return part.start, part.stop


def place_of(cursor: Any) -> tuple[int, int]:
    """Epoch and position of a cursor, in a message or not."""
    return cursor.epoch, cursor.position


def _batch(cursor: Cursor, work: pb.ShardAssignment) -> PositionRange:
    return next_batch(cursor, work.window or PLAN.global_batch, PLAN.dataset_size)


def expect_shares(round_: AssignedRound, kept: Sequence[Sequence[PositionRange]]) -> None:
    """Demands the shares of section 21, in which each rank keeps its earlier positions.

    Targets and `interleaved` are the server's choice, and the same for all.
    """
    work = round_.works[round_.players[0]]
    for player, other in round_.works.items():
        same(f"the targets at {player.name}:", list(work.targets), list(other.targets))
        same(f"interleaved at {player.name}:", work.interleaved, other.interleaved)
    split = Split(tuple(work.targets), work.interleaved)
    batch = PositionRange(*bounds(work.batch))
    for player, share in zip(round_.players, reassign(batch, kept, split), strict=True):
        same(
            f"the positions of {player.name}, of {batch.start} to {batch.stop}:",
            list(map(bounds, share)),
            list(map(bounds, round_.works[player].positions)),
        )


@CHECKS.add("assign.parent", "19.4")
async def the_parent_is_the_head(line: LineUnderTest) -> None:
    """An assignment names a new key, and the line's head as its parent."""
    head = line.players[0].head
    round_ = await line.deal()
    for player in round_.players:
        same(f"the parent at {player.name}:", head, key_of(round_.works[player].parent))
    require_above(head, round_.key)
    await line.finish(round_)


@CHECKS.add("assign.roster", "19.4")
async def rosters_are_the_same(line: LineUnderTest) -> None:
    """Every member gets the same roster, in rank order, and its own rank in it."""
    round_ = await line.deal()
    roster = list(round_.works[round_.players[0]].roster)
    same("the members", sorted(player.worker for player in line.players), sorted(roster))
    for player, work in round_.works.items():
        same(f"the roster at {player.name}:", roster, list(work.roster))
        same("the world size", len(roster), work.world_size)
        require(work.rank < len(roster), "a rank below the world size", work.rank)
        same("the worker of that rank", player.worker, roster[work.rank])
    await line.finish(round_)


@CHECKS.add("assign.shares", "21")
async def shares_are_as_written(line: LineUnderTest) -> None:
    """Over an epoch's end, batches follow the cursor; shares are section 21's of the targets."""
    # An epoch has two and a half batches, so three steps always cross its end.
    for _ in range(3):
        cursor = line.players[0].cursor
        round_ = await line.deal()
        batch = _batch(cursor, round_.works[round_.players[0]])
        for player, work in round_.works.items():
            same(f"the epoch at {player.name}:", cursor.epoch, work.epoch)
            same("the batch", bounds(batch), bounds(work.batch))
        expect_shares(round_, [() for _ in round_.players])
        await line.finish(round_)


@CHECKS.add("assign.asked", "3", workers=2)
async def work_is_asked_for(line: LineUnderTest) -> None:
    """No member is assigned work before every member has asked for it."""
    first, *others = line.players
    await first.ask()
    await line.quiet("shard_assignment", line.players, because="a member has not asked yet")
    await line.ask(others)
    await line.finish(await line.dealt(line.players))


@CHECKS.add("assign.other_head", "20")
async def requests_of_other_heads_are_ignored(line: LineUnderTest) -> None:
    """A request for work from a head that is not the line's is ignored."""
    *others, player = line.players
    before = conversion.key_to_proto(player.head)
    await line.step()
    await line.ask(others)
    await player.say(request_work=pb.RequestWork(head=before))
    await line.quiet("shard_assignment", line.players, because="one asked from another head")
    await player.ask()
    await line.finish(await line.dealt(line.players))


@CHECKS.add("assign.standing", "3", workers=2)
async def standing_requests_are_answered_at_once(line: LineUnderTest) -> None:
    """A standing request is answered in StepCommitted or not at all; only if every member
    stands.
    """
    if STANDING not in line.players[0].accepted.capabilities:
        raise NotApplicable(f"it does not name {STANDING}")
    # An epoch has two and a half batches, so its end comes, too.
    for all_stand in (False, True, True, True):
        stands = {line.players[-1]: all_stand}
        following = await _standing_step(line, await line.deal(), stands)
        if following is not None:
            require(all_stand, "no assignment while a member does not stand", following.key)
            await line.finish(following)


async def _standing_step(
    line: LineUnderTest, round_: AssignedRound, stands: dict[Player, bool]
) -> AssignedRound | None:
    """A step whose members stand, or not; the round that came with its record, if one did."""
    await round_.exchange()
    for player in round_.players:
        standing = {"next": pb.RequestWork()} if stands.get(player, True) else {}
        await line.ready(round_, player, **standing)
    commits = await line.committed(round_)
    works = {
        player: commit.assignment
        for player, commit in commits.items()
        if commit.HasField("assignment")
    }
    if not works:
        return None
    same("the members with an assignment", len(commits), len(works))
    record, epoch = commits[round_.players[0]].record, round_.works[round_.players[0]].epoch
    same("the epoch, at whose end nobody is assigned work", epoch, record.cursor.epoch)
    for player, work in works.items():
        same(f"the parent at {player.name}:", key_of(record.key), key_of(work.parent))
    key = key_of(works[round_.players[0]].key)
    line.keys.append(("a round", key))
    return AssignedRound(key, dict(sorted(works.items(), key=lambda each: each[1].rank)))


@CHECKS.add("commit.everyone", "3")
async def everybody_is_told(line: LineUnderTest) -> None:
    """Every member gets the record, and all get the same one."""
    commits = await line.step()
    first = next(iter(commits.values()))
    for player, committed in commits.items():
        same(f"StepCommitted at {player.name}:", shown(first), shown(committed))


@CHECKS.add("commit.record", "1")
async def records_say_what_was_done(line: LineUnderTest) -> None:
    """The record of a step has the round's key, parent and roster, the next step and cursor."""
    head, step, cursor = line.players[0].head, line.players[0].step, line.players[0].cursor
    round_ = await line.deal()
    batch = _batch(cursor, round_.works[round_.players[0]])
    expected = cursor_after(cursor, batch, PLAN.dataset_size)
    for committed in (await line.finish(round_)).values():
        record = committed.record
        same("the kind", record_pb2.RECORD_KIND_STEP, record.kind)
        same("the key", round_.key, key_of(record.key))
        same("the parent", head, key_of(record.parent))
        same("the step", step + 1, record.step)
        same("the cursor", place_of(expected), place_of(record.cursor))
        same("the roster", [player.worker for player in round_.players], list(record.roster))


@CHECKS.add("commit.chain", "1")
async def records_are_a_chain(line: LineUnderTest) -> None:
    """Each record's parent is the record before it: the chain is unbroken."""
    head = line.players[0].head
    for _ in range(3):
        committed = (await line.step())[line.players[0]]
        same("the parent", head, key_of(committed.record.parent))
        head = key_of(committed.record.key)


@CHECKS.add("commit.all_ready", "3", workers=2)
async def all_must_be_ready(line: LineUnderTest) -> None:
    """A step is not committed while a member is not ready."""
    round_ = await line.averaged()
    *others, last = round_.players
    await line.all_ready(round_, others)
    await line.fence(others)
    # It is never ready. A commit without it would show in the next round's parent.
    await line.fault(round_, last, pb.FAULT_KIND_DATA_STREAM_LOST)
    await line.finish(await line.not_committed(round_, round_.players))


@CHECKS.add("commit.loss", "22")
async def losses_are_weighted(line: LineUnderTest) -> None:
    """A step's loss is the weighted mean of its members', in float64 and rank order."""
    losses = (0.1, 2.7182818284590453, -31.4, 1e-9, 7.5)
    round_ = await line.averaged()
    total = parts = 0.0
    samples = contributors = 0
    for rank, player in enumerate(round_.players):
        weight = float(round_.samples(player))
        loss_sum = weight * losses[rank]
        await line.ready(round_, player, loss_sum=loss_sum, correct=rank)
        total += weight
        samples += round_.samples(player)
        if weight:
            parts += loss_sum
            contributors += 1
    size = len(round_.players)
    for committed in (await line.committed(round_)).values():
        same("the loss", parts / total, committed.loss)
        same("the samples", samples, committed.samples)
        same("the contributors", contributors, committed.contributors)
        same("correct samples", size * (size - 1) // 2, committed.correct)


@CHECKS.add("commit.overflow", "22", workers=2)
async def an_overflow_is_told_to_all(line: LineUnderTest) -> None:
    """An overflow of one member is in every StepCommitted of its step, and in no other."""
    for overflowed in (True, False):
        round_ = await line.averaged()
        *others, last = round_.players
        await line.all_ready(round_, others)
        await line.ready(round_, last, overflow=overflowed)
        for player, committed in (await line.committed(round_)).items():
            same(f"the overflow at {player.name}:", overflowed, committed.overflow)


@CHECKS.add("commit.total_weight", "19.15")
async def totals_are_compared(line: LineUnderTest) -> None:
    """A step whose members' averages disagree on the total weight is not committed."""
    await _not_ready(line, total_weight=1000.5)


@CHECKS.add("commit.world_size", "19.15")
async def sizes_are_compared(line: LineUnderTest) -> None:
    """A step whose members' averages disagree on the roster's size is not committed."""
    await _not_ready(line, world_size=77)


async def _not_ready(line: LineUnderTest, **fields: Any) -> None:
    """The last member's report is wrong: the line must not commit, whatever else it does."""
    round_ = await line.averaged()
    *others, last = round_.players
    await line.all_ready(round_, others)
    await line.ready(round_, last, **fields)
    # The server has read the report: a Join must not come before it. It may end the stream for it.
    with suppress(Violation):
        await line.fence([last])
    head = key_of(round_.works[round_.players[0]].parent)
    # Whoever received a record nevertheless would join from it.
    await line.gather()
    for player in line.players:
        same(f"the head of {player.name}, to which nothing was added:", head, player.head)
