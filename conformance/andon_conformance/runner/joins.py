"""Joins: what a control stream may carry, and why it is refused (sections 3, 20, 25)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion, layouts
from andon_conformance.runner.checks import ServerCheck, check, require, same
from andon_conformance.runner.gradients import LAYOUT
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player
from andon_conformance.runner.talk import Status

__all__ = ["CHECKS"]

_UNKNOWN = b"\xca\x3e\x00"
"""Field 1001, of no bytes: a oneof case of a later version of the protocol."""

_OTHER_LAYOUT = Layout(
    (
        Block(BlockKind.LM_HEAD, "head", (Component("weight", (3, 7)), Component("bias", (3,)))),
        LAYOUT.blocks[1],
    )
)


async def _ended(
    line: LineUnderTest, slot: int | None, *messages: pb.TrainRequest | bytes
) -> Status:
    """How the server ends a stranger's stream that sends this."""
    async with _stranger(line, slot) as stranger:
        talk = stranger.open_train()
        for message in messages:
            await talk.send(message)
        return await talk.end()


@asynccontextmanager
async def _stranger(line: LineUnderTest, slot: int | None) -> AsyncIterator[Player]:
    stranger = Player(line.target, slot)
    try:
        yield stranger
    finally:
        await stranger.close()


async def _refused(line: LineUnderTest, slot: int | None, **fields: Any) -> Status:
    async with _stranger(line, slot) as stranger:
        return await _ended(line, slot, stranger.join_message(**fields))


def _expect(status: Status, code: grpc.StatusCode, reason: str) -> None:
    same("the refusal", f"{code.name} {reason}", f"{status.code.name} {status.reason}")


def _expect_difference(status: Status, component: str, mine: str, theirs: str) -> None:
    facts = [status.metadata.get(name, "") for name in ("component", "mine", "theirs")]
    expected = [component, mine, theirs]
    for name, wanted, fact in zip(("component", "mine", "theirs"), expected, facts, strict=True):
        require(
            fact == wanted if wanted else fact,
            f"{name} {wanted or 'in the metadata'} in the ErrorInfo",
            fact or "none",
        )


@check(
    "message.join_first",
    "3",
    "A stream whose first message is not Join ends with INVALID_ARGUMENT",
)
async def join_comes_first(line: LineUnderTest) -> None:
    beat = pb.TrainRequest(heartbeat=pb.Heartbeat(sequence=1))
    status = await _ended(line, None, beat)
    same("the status", "INVALID_ARGUMENT", status.code.name)
    require(status.reason, "an ErrorInfo of domain andon", "none")


@check("message.join_once", "20", "A second Join on a stream ends it with INVALID_ARGUMENT")
async def join_comes_once(line: LineUnderTest) -> None:
    player = line.players[-1]
    await player.train.send(player.join_message())
    same("the status", "INVALID_ARGUMENT", (await player.train.end()).code.name)


@check(
    "message.unknown_case",
    "20",
    "A oneof case that the server does not know ends the stream with INVALID_ARGUMENT",
)
async def unknown_cases_are_refused(line: LineUnderTest) -> None:
    player = line.players[-1]
    await player.train.send(_UNKNOWN)
    same("the status", "INVALID_ARGUMENT", (await player.train.end()).code.name)


@check("message.heartbeat", "3", "A heartbeat's answer carries its sequence number back")
async def heartbeats_are_answered(line: LineUnderTest) -> None:
    for player in line.players:
        await player.fence()


@check(
    "join.replaces",
    "2.8",
    "A Join replaces the worker's older stream, which ends with ABORTED",
)
async def a_join_replaces_the_older_stream(line: LineUnderTest) -> None:
    player = line.players[-1]
    accepted = await player.join()
    same("the worker's id", player.slot, accepted.worker)
    assert player.older is not None
    same("the older stream's status", "ABORTED", (await player.older.end()).code.name)


@check("refuse.wrong_run", "25", "A Join of another run is refused: WRONG_RUN, with both ids")
async def other_runs_are_refused(line: LineUnderTest) -> None:
    status = await _refused(line, None, run_id="another-run")
    _expect(status, grpc.StatusCode.NOT_FOUND, "WRONG_RUN")
    _expect_difference(status, "", "another-run", line.target.run_id)


@check(
    "refuse.layout",
    "25",
    "A Join with another model is refused: LAYOUT_DIFFERS, with the component and both values",
)
async def other_layouts_are_refused(line: LineUnderTest) -> None:
    layout = layouts.layout_to_proto(_OTHER_LAYOUT)
    status = await _refused(line, None, layout=layout)
    _expect(status, grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_DIFFERS")
    _expect_difference(status, "weight", "", "")


@check("refuse.plan", "25", "A Join with another plan is refused: PLAN_DIFFERS, with what differs")
async def other_plans_are_refused(line: LineUnderTest) -> None:
    plan = pb.RunPlan()
    plan.CopyFrom(conversion.plan_to_proto(line.target.plan))
    plan.global_batch += 1
    status = await _refused(line, None, plan=plan)
    _expect(status, grpc.StatusCode.FAILED_PRECONDITION, "PLAN_DIFFERS")
    mine, theirs = plan.global_batch, line.target.plan.global_batch
    _expect_difference(status, "global_batch", str(mine), str(theirs))


@check("refuse.version", "25", "A Join of another protocol version is refused: VERSION")
async def other_versions_are_refused(line: LineUnderTest) -> None:
    status = await _refused(line, None, protocol_version=2**20)
    _expect(status, grpc.StatusCode.FAILED_PRECONDITION, "VERSION")


@check("refuse.slot", "25", "Another process that wants a slot that is held: ALREADY_EXISTS, SLOT")
async def held_slots_are_refused(line: LineUnderTest) -> None:
    status = await _refused(line, line.players[-1].slot)
    _expect(status, grpc.StatusCode.ALREADY_EXISTS, "SLOT")


@check("refuse.full", "12", "One worker more than max_workers is refused: FULL")
async def full_lines_refuse(line: LineUnderTest) -> None:
    status = await _refused(line, None)
    _expect(status, grpc.StatusCode.FAILED_PRECONDITION, "FULL")


@check("refuse.untouched", "25", "Refusals and broken streams of strangers touch no round")
async def strangers_touch_nothing(line: LineUnderTest) -> None:
    round_ = await line.deal()
    for slot, fields in (
        (None, {"run_id": "another-run"}),
        (None, {"layout": layouts.layout_to_proto(_OTHER_LAYOUT)}),
        (line.players[-1].slot, {}),
        (None, {}),
    ):
        await _refused(line, slot, **fields)
    await _ended(line, None, _UNKNOWN)
    await _ended(line, None, pb.TrainRequest())
    for player in line.players:
        await player.fence()
        require(not player.train.cases("round_voided"), "no RoundVoided", f"one at {player.name}")
    commits = await line.finish(round_)
    for committed in commits.values():
        same("the record's key", round_.key.round, committed.record.key.round)


@check("status.wrong_run", "25", "GetStatus of a run that is not served here: NOT_FOUND")
async def status_of_another_run(line: LineUnderTest) -> None:
    status = await line.refusal("GetStatus", pb.GetStatusRequest(run_id="another-run"))
    same("the status", "NOT_FOUND", status.code.name)


@check("status.line", "25", "GetStatus reports the run, the step of the head, and the live workers")
async def status_tells_the_line(line: LineUnderTest) -> None:
    status = await line.status(line.target.run_id)
    same("the run", line.target.run_id, status.run_id)
    same("live workers", len(line.players), status.live)
    same("the step", line.players[0].step, status.step)
    cursor = line.players[0].cursor
    same(
        "the cursor", (cursor.epoch, cursor.position), (status.cursor.epoch, status.cursor.position)
    )


CHECKS: tuple[ServerCheck, ...] = (
    join_comes_first,
    join_comes_once,
    unknown_cases_are_refused,
    heartbeats_are_answered,
    a_join_replaces_the_older_stream,
    other_runs_are_refused,
    other_layouts_are_refused,
    other_plans_are_refused,
    other_versions_are_refused,
    held_slots_are_refused,
    full_lines_refuse,
    strangers_touch_nothing,
    status_of_another_run,
    status_tells_the_line,
)
