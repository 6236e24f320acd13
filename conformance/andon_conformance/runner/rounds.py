"""Rounds: how work is assigned, and how it becomes a record (sections 19, 21 and 22)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from andon.protocol.capabilities import STANDING
from andon.protocol.records import Cursor, PositionRange
from andon.protocol.shards import Split, cursor_after, next_batch, reassign
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2
from andon.wire import conversion
from andon_conformance.runner.checks import NotApplicable, ServerCheck, check, require, same
from andon_conformance.runner.gradients import PLAN, AssignedRound, exchange
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of
from andon_conformance.runner.talk import shown

__all__ = ["CHECKS", "expect_shares"]


def _batch(cursor: Cursor, work: pb.ShardAssignment) -> PositionRange:
    return next_batch(cursor, work.window or PLAN.global_batch, PLAN.dataset_size)


def _ranges(parts: Any) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in parts]


def expect_shares(round_: AssignedRound, kept: Sequence[Sequence[PositionRange]]) -> None:
    """Demands the shares of section 21, in which each rank keeps its earlier positions.

    Targets and `interleaved` are the server's choice, and the same for all.
    """
    work = round_.works[round_.players[0]]
    for player, other in round_.works.items():
        same(f"the targets at {player.name}:", list(work.targets), list(other.targets))
        same(f"interleaved at {player.name}:", work.interleaved, other.interleaved)
    split = Split(tuple(work.targets), work.interleaved)
    batch = PositionRange(work.batch.start, work.batch.stop)
    for player, share in zip(round_.players, reassign(batch, kept, split), strict=True):
        same(
            f"the positions of {player.name}, of {batch.start} to {batch.stop}:",
            _ranges(share),
            _ranges(round_.works[player].positions),
        )


@check(
    "assign.parent",
    "19.4",
    "An assignment names a new key, and the line's head as its parent",
)
async def the_parent_is_the_head(line: LineUnderTest) -> None:
    head = line.players[0].head
    round_ = await line.deal()
    for player in round_.players:
        same(f"the parent at {player.name}:", head, key_of(round_.works[player].parent))
    require(head is not None and round_.key > head, f"a key above the head {head}", round_.key)
    await line.finish(round_)


@check(
    "assign.roster",
    "19.4",
    "Every member gets the same roster, in rank order, and its own rank in it",
)
async def rosters_are_the_same(line: LineUnderTest) -> None:
    round_ = await line.deal()
    roster = list(round_.works[round_.players[0]].roster)
    same("the members", sorted(player.worker for player in line.players), sorted(roster))
    for player, work in round_.works.items():
        same(f"the roster at {player.name}:", roster, list(work.roster))
        same("the world size", len(roster), work.world_size)
        require(work.rank < len(roster), "a rank below the world size", work.rank)
        same("the worker of that rank", player.worker, roster[work.rank])
    await line.finish(round_)


@check(
    "assign.shares",
    "21",
    "Over an epoch's end, batches follow the cursor; shares are section 21's of the targets",
)
async def shares_are_as_written(line: LineUnderTest) -> None:
    # An epoch has two and a half batches, so three steps always cross its end.
    for _ in range(3):
        cursor = line.players[0].cursor
        round_ = await line.deal()
        batch = _batch(cursor, round_.works[round_.players[0]])
        for player, work in round_.works.items():
            same(f"the epoch at {player.name}:", cursor.epoch, work.epoch)
            same("the batch", (batch.start, batch.stop), (work.batch.start, work.batch.stop))
        expect_shares(round_, [() for _ in round_.players])
        await line.finish(round_)


@check(
    "assign.asked",
    "3",
    "No member is assigned work before every member has asked for it",
    workers=2,
)
async def work_is_asked_for(line: LineUnderTest) -> None:
    first, *others = line.players
    await first.ask()
    await line.quiet("shard_assignment", line.players, because="a member has not asked yet")
    for player in others:
        await player.ask()
    await line.finish(await line.dealt(line.players))


@check(
    "assign.other_head",
    "20",
    "A request for work from a head that is not the line's is ignored",
)
async def requests_of_other_heads_are_ignored(line: LineUnderTest) -> None:
    player = line.players[-1]
    before = conversion.key_to_proto(player.head)
    await line.finish(await line.deal())
    for each in line.players[:-1]:
        await each.ask()
    await player.say(request_work=pb.RequestWork(head=before))
    await line.quiet("shard_assignment", line.players, because="one asked from another head")
    await player.ask()
    await line.finish(await line.dealt(line.players))


@check(
    "assign.standing",
    "3",
    "A standing request is answered in StepCommitted or not at all; only if every member stands",
    workers=2,
)
async def standing_requests_are_answered_at_once(line: LineUnderTest) -> None:
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
    await exchange(round_)
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


@check(
    "commit.everyone",
    "3",
    "Every member gets the record, and all get the same one",
)
async def everybody_is_told(line: LineUnderTest) -> None:
    round_ = await line.deal()
    commits = await line.finish(round_)
    first = commits[round_.players[0]]
    for player, committed in commits.items():
        same(f"StepCommitted at {player.name}:", shown(first), shown(committed))


@check(
    "commit.record",
    "1",
    "The record of a step has the round's key, parent and roster, the next step and cursor",
)
async def records_say_what_was_done(line: LineUnderTest) -> None:
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
        same("the cursor", (expected.epoch, expected.position),
             (record.cursor.epoch, record.cursor.position))  # fmt: skip
        same("the roster", [player.worker for player in round_.players], list(record.roster))


@check(
    "commit.chain",
    "1",
    "Each record's parent is the record before it: the chain is unbroken",
)
async def records_are_a_chain(line: LineUnderTest) -> None:
    head = line.players[0].head
    for _ in range(3):
        committed = (await line.finish(await line.deal()))[line.players[0]]
        same("the parent", head, key_of(committed.record.parent))
        head = key_of(committed.record.key)


@check(
    "commit.all_ready",
    "3",
    "A step is not committed while a member is not ready",
    workers=2,
)
async def all_must_be_ready(line: LineUnderTest) -> None:
    round_ = await line.deal()
    await exchange(round_)
    *others, last = round_.players
    for player in others:
        await line.ready(round_, player)
    for player in others:
        await player.fence()
    # It is never ready. A commit without it would show in the next round's parent.
    await line.fault(round_, last, pb.FAULT_KIND_DATA_STREAM_LOST)
    await line.finish(await line.not_committed(round_, round_.players))


@check(
    "commit.loss",
    "22",
    "A step's loss is the weighted mean of its members', in float64 and rank order",
)
async def losses_are_weighted(line: LineUnderTest) -> None:
    losses = (0.1, 2.7182818284590453, -31.4, 1e-9)
    round_ = await line.deal()
    await exchange(round_)
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


@check(
    "commit.overflow",
    "22",
    "An overflow of one member is in every StepCommitted of its step, and in no other",
    workers=2,
)
async def an_overflow_is_told_to_all(line: LineUnderTest) -> None:
    for overflowed in (True, False):
        round_ = await line.deal()
        await exchange(round_)
        *others, last = round_.players
        for player in others:
            await line.ready(round_, player)
        await line.ready(round_, last, overflow=overflowed)
        for player, committed in (await line.committed(round_)).items():
            same(f"the overflow at {player.name}:", overflowed, committed.overflow)


@check(
    "commit.total_weight",
    "19.15",
    "A step whose members' averages disagree on the total weight is not committed",
)
async def totals_are_compared(line: LineUnderTest) -> None:
    await _not_ready(line, total_weight=1000.5)


@check(
    "commit.world_size",
    "19.15",
    "A step whose members' averages disagree on the roster's size is not committed",
)
async def sizes_are_compared(line: LineUnderTest) -> None:
    await _not_ready(line, world_size=77)


async def _not_ready(line: LineUnderTest, **fields: Any) -> None:
    """The last member's report is wrong: the line must not commit, whatever else it does."""
    round_ = await line.deal()
    await exchange(round_)
    for player in round_.players[:-1]:
        await line.ready(round_, player)
    await line.ready(round_, round_.players[-1], **fields)
    head = key_of(round_.works[round_.players[0]].parent)
    await line.gather()
    for player in line.players:
        same(f"the head of {player.name}, to which nothing was added:", head, player.head)


CHECKS: tuple[ServerCheck, ...] = (
    the_parent_is_the_head,
    rosters_are_the_same,
    shares_are_as_written,
    work_is_asked_for,
    requests_of_other_heads_are_ignored,
    standing_requests_are_answered_at_once,
    everybody_is_told,
    records_say_what_was_done,
    records_are_a_chain,
    all_must_be_ready,
    losses_are_weighted,
    an_overflow_is_told_to_all,
    totals_are_compared,
    sizes_are_compared,
)
