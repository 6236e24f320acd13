"""Joins and sessions: how a stream begins, what it may carry, and why it is refused.

Sections 3, 4, 12, 20 and 25 of the protocol.
"""

from __future__ import annotations

from typing import Any

from andon.protocol.capabilities import REDUCER_CAPABILITIES
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import layout_pb2, reducer_pb2
from andon.wire import conversion, layouts
from andon_conformance.runner.checks import Checks, require, same
from andon_conformance.runner.gradients import LAYOUT
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import ended_stranger, refused_join
from andon_conformance.runner.rounds import place_of
from andon_conformance.runner.talk import Status

__all__ = ["CHECKS"]

CHECKS = Checks()

_UNKNOWN = b"\xca\x3e\x00"
"""Field 1001, of no bytes: a oneof case of a later version of the protocol."""

_OTHER_LAYOUT = Layout(
    (
        Block(BlockKind.LM_HEAD, "head", (Component("weight", (3, 7)), Component("bias", (3,)))),
        LAYOUT.blocks[1],
    )
)


async def _refused(line: LineUnderTest, named: str, **fields: Any) -> Status:
    """Demands that a stranger's Join with these fields ends with a code and a reason."""
    status = await refused_join(line.target, **fields)
    same("the refusal", named, status.named)
    return status


def _expect_difference(status: Status, component: str, mine: str = "", theirs: str = "") -> None:
    """Demands what differs in the ErrorInfo; an empty text stands for any but an empty one."""
    expected = {"component": component, "mine": mine, "theirs": theirs}
    for name, wanted in expected.items():
        fact = status.metadata.get(name, "")
        require(
            fact == wanted if wanted else fact,
            f"{name} {wanted or 'in the metadata'} in the ErrorInfo",
            fact or "none",
        )


@CHECKS.add("message.join_first", "3")
async def join_comes_first(line: LineUnderTest) -> None:
    """A stream whose first message is not Join ends with INVALID_ARGUMENT."""
    beat = pb.TrainRequest(heartbeat=pb.Heartbeat(sequence=1))
    status = await ended_stranger(line.target, beat)
    same("the status", "INVALID_ARGUMENT", status.code.name)
    require(status.reason, "an ErrorInfo of domain andon", "none")


@CHECKS.add("message.join_once", "20")
async def join_comes_once(line: LineUnderTest) -> None:
    """A second Join on a stream ends it with INVALID_ARGUMENT."""
    player = line.players[-1]
    await player.train.send(player.join_message())
    await player.train.ends_with("INVALID_ARGUMENT")


@CHECKS.add("message.unknown_case", "20")
async def unknown_cases_are_refused(line: LineUnderTest) -> None:
    """A oneof case that the server does not know ends the stream with INVALID_ARGUMENT."""
    player = line.players[-1]
    await player.train.send(_UNKNOWN)
    await player.train.ends_with("INVALID_ARGUMENT")


@CHECKS.add("message.heartbeat", "3")
async def heartbeats_are_answered(line: LineUnderTest) -> None:
    """A heartbeat's answer carries its sequence number back."""
    await line.fence(line.players)


@CHECKS.add("join.replaces", "2.8")
async def a_join_replaces_the_older_stream(line: LineUnderTest) -> None:
    """A Join replaces the worker's older stream, which ends with ABORTED."""
    player = line.players[-1]
    accepted = await player.join()
    same("the worker's id", player.slot, accepted.worker)
    assert player.older is not None
    await player.older.ends_with("ABORTED", "the older stream's status")


@CHECKS.add("refuse.wrong_run", "25")
async def other_runs_are_refused(line: LineUnderTest) -> None:
    """A Join of another run is refused: WRONG_RUN, with both ids."""
    status = await _refused(line, "NOT_FOUND WRONG_RUN", run_id="another-run")
    _expect_difference(status, "", "another-run", line.target.run_id)


@CHECKS.add("refuse.layout", "25")
async def other_layouts_are_refused(line: LineUnderTest) -> None:
    """A Join with another model is refused: LAYOUT_DIFFERS, with the component and both values."""
    layout = layouts.layout_to_proto(_OTHER_LAYOUT)
    status = await _refused(line, "FAILED_PRECONDITION LAYOUT_DIFFERS", layout=layout)
    _expect_difference(status, "weight")


@CHECKS.add("refuse.plan", "25")
async def other_plans_are_refused(line: LineUnderTest) -> None:
    """A Join with another plan is refused: PLAN_DIFFERS, with what differs."""
    plan = conversion.plan_to_proto(line.target.plan)
    plan.global_batch += 1
    status = await _refused(line, "FAILED_PRECONDITION PLAN_DIFFERS", plan=plan)
    mine, theirs = plan.global_batch, line.target.plan.global_batch
    _expect_difference(status, "global_batch", str(mine), str(theirs))


@CHECKS.add("refuse.version", "25")
async def other_versions_are_refused(line: LineUnderTest) -> None:
    """A Join of another protocol version is refused: VERSION."""
    await _refused(line, "FAILED_PRECONDITION VERSION", protocol_version=2**20)


@CHECKS.add("refuse.slot", "25")
async def held_slots_are_refused(line: LineUnderTest) -> None:
    """Another process that wants a slot that is held: ALREADY_EXISTS, SLOT."""
    await _refused(line, "ALREADY_EXISTS SLOT", slot=line.players[-1].slot)


@CHECKS.add("refuse.full", "12")
async def full_lines_refuse(line: LineUnderTest) -> None:
    """One worker more than max_workers is refused: FULL."""
    await _refused(line, "FAILED_PRECONDITION FULL")


@CHECKS.add("refuse.untouched", "25")
async def strangers_touch_nothing(line: LineUnderTest) -> None:
    """Refusals and broken streams of strangers touch no round."""
    round_ = await line.deal()
    await refused_join(line.target, run_id="another-run")
    await refused_join(line.target, layout=layouts.layout_to_proto(_OTHER_LAYOUT))
    await refused_join(line.target, slot=line.players[-1].slot)
    await refused_join(line.target)
    await ended_stranger(line.target, _UNKNOWN)
    await ended_stranger(line.target, pb.TrainRequest())
    for player in line.players:
        await player.fence()
        require(not player.train.cases("round_voided"), "no RoundVoided", f"one at {player.name}")
    commits = await line.finish(round_)
    for committed in commits.values():
        same("the record's key", round_.key.round, committed.record.key.round)


@CHECKS.add("status.wrong_run", "25")
async def status_of_another_run(line: LineUnderTest) -> None:
    """GetStatus of a run that is not served here: NOT_FOUND."""
    status = await line.refusal("GetStatus", pb.GetStatusRequest(run_id="another-run"))
    same("the status", "NOT_FOUND", status.code.name)


@CHECKS.add("status.line", "25")
async def status_tells_the_line(line: LineUnderTest) -> None:
    """GetStatus reports the run, the step of the head, and the live workers."""
    status = await line.status(line.target.run_id)
    same("the run", line.target.run_id, status.run_id)
    same("live workers", len(line.players), status.live)
    same("the step", line.players[0].step, status.step)
    same("the cursor", place_of(line.players[0].cursor), place_of(status.cursor))


@CHECKS.add("session.opened", "4")
async def the_opening_is_answered(line: LineUnderTest) -> None:
    """RoundOpened names capabilities that both sides have, and the largest payload."""
    for player in line.players:
        talk = await player.open_bulk()
        opened = await talk.take("round_opened")
        await talk.cancel()
        extra = set(opened.capabilities) - set(REDUCER_CAPABILITIES)
        require(not extra, "none of the capabilities that are not Andon's", ", ".join(extra))
        most = opened.max_payload_bytes
        limit = f"a largest payload of 1 to {MAX_PAYLOAD_BYTES} bytes"
        require(0 < most <= MAX_PAYLOAD_BYTES, limit, most)


@CHECKS.add("session.token", "25")
async def tokens_are_a_workers_own(line: LineUnderTest) -> None:
    """OpenRound with another worker's session token ends with UNAUTHENTICATED."""
    player = line.players[0]
    if len(line.players) > 1:
        token = line.players[1].accepted.session_token
    else:
        *first, last = player.accepted.session_token
        token = bytes([*first, last ^ 1])
    talk = await player.open_bulk(token=token)
    same("the status", "UNAUTHENTICATED", (await talk.refusal()).code.name)


@CHECKS.add("session.open_first", "4")
async def the_opening_comes_first(line: LineUnderTest) -> None:
    """A data stream whose first message is not OpenRound ends with INVALID_ARGUMENT."""
    talk = line.players[0].start_bulk()
    key = conversion.key_to_proto(line.players[0].head)
    abstain = reducer_pb2.Abstain(key=key, rank=0, world_size=1)
    await talk.send(reducer_pb2.ReduceRequest(abstain=abstain))
    await talk.ends_with("INVALID_ARGUMENT")


@CHECKS.add("session.unknown_case", "4")
async def unknown_requests_are_refused(line: LineUnderTest) -> None:
    """A oneof case that the reducer does not know ends the stream with INVALID_ARGUMENT."""
    stream = await line.players[0].stream()
    await stream.send(_UNKNOWN)
    await stream.ends_with("INVALID_ARGUMENT")


@CHECKS.add("session.count", "4")
async def counts_must_agree(line: LineUnderTest) -> None:
    """A payload whose length is not element_count numbers ends the stream with INVALID_ARGUMENT."""
    await _refused_chunk(line, {"element_count": 5})


@CHECKS.add("session.chunk", "12")
async def chunks_have_a_limit(line: LineUnderTest) -> None:
    """A chunk of more than chunk_elements ends the stream with INVALID_ARGUMENT."""
    # In the smallest encoding, so that only the element count is too large, not the byte count.
    limit = line.players[0].accepted.policy.chunk_elements
    fields = {"block": 1, "element_count": limit + 1, "payload": bytes(2 * (limit + 1))}
    await _refused_chunk(line, {**fields, "encoding": layout_pb2.ENCODING_BFLOAT16})


@CHECKS.add("session.rising", "2.16")
async def chunks_must_rise(line: LineUnderTest) -> None:
    """Chunks out of order on a stream end it with INVALID_ARGUMENT."""
    await _refused_chunk(line, {}, places=(1, 0))


async def _refused_chunk(
    line: LineUnderTest, fields: dict[str, Any], places: tuple[int, ...] = (0,)
) -> None:
    """A rank sends the chunks at these places, with `fields` changed: the last one is refused."""
    round_ = await line.deal()
    player = round_.players[0]
    part = round_.rough_parts()[player]
    for place in places:
        await round_.send_chunk(player, part, round_.chunks[place], **fields)
    await (await player.stream()).ends_with("INVALID_ARGUMENT")
