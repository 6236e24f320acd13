"""Halts: every worker stops, nothing is committed, and a person answers (section 22)."""

from __future__ import annotations

import math
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from andon.protocol.records import Cursor, PositionRange
from andon.protocol.shards import cursor_after, next_batch
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2, record_pb2
from andon.wire import conversion
from andon_conformance.runner.checks import ServerCheck, Violation, check, require, same
from andon_conformance.runner.faults import BIAS, poisoned
from andon_conformance.runner.gradients import (
    PLAN,
    AssignedRound,
    Part,
    exchange,
    rough_parts,
    send_part,
)
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of

__all__ = ["CHECKS"]


async def _halts(line: LineUnderTest, reason: halt_pb2.HaltReason) -> dict[Player, Any]:
    """The halt that every player receives, which must have the given reason."""
    received = {}
    for player in line.players:
        message = await player.train.first(_stops_or_commits, what="Halt")
        if message.HasField("step_committed"):
            raise Violation("Halt, and no record", f"StepCommitted at {player.name}")
        received[player] = message.halt.evidence
    for player, evidence in received.items():
        name = halt_pb2.HaltReason.Name
        same(f"the reason at {player.name}:", name(reason), name(evidence.reason))
        require(evidence.id, "a halt with an id", "0")
        same("its id", received[line.players[0]].id, evidence.id)
    return received


def _stops_or_commits(message: pb.TrainResponse) -> bool:
    return message.WhichOneof("message") in ("halt", "step_committed")


async def _pulled(line: LineUnderTest) -> tuple[AssignedRound, Any]:
    """A round in which every worker holds all averages; then an operator halts the line."""
    round_ = await line.deal()
    await exchange(round_)
    evidence = await line.pull_cord()
    return round_, evidence


async def _resumed(line: LineUnderTest, halt: Any) -> None:
    await line.clear_halt(halt.id)
    for player in line.players:
        resume = await player.train.take("resume")
        same(f"the halt that {player.name} received an answer to:", halt.id, resume.halt_id)


@check(
    "halt.cord",
    "22",
    "PullCord halts every worker: OPERATOR, with the key that it voids",
)
async def the_cord_halts_all(line: LineUnderTest) -> None:
    round_, evidence = await _pulled(line)
    for player, received in (await _halts(line, halt_pb2.HALT_REASON_OPERATOR)).items():
        same("the id that PullCord returned", received.id, evidence.id)
        same(f"the voided key at {player.name}:", round_.key, key_of(received.key))


@check(
    "halt.no_commit",
    "19.7",
    "A halted round is not committed, even if every worker is ready",
)
async def a_halted_round_is_void(line: LineUnderTest) -> None:
    round_, halt = await _pulled(line)
    for player in line.players:
        await player.train.take("halt")
        await line.ready(round_, player)
    for player in line.players:
        await player.fence()
    await _resumed(line, halt)
    await line.finish(await line.not_committed(round_, line.players))


@check("halt.no_work", "20", "Nobody is assigned work while the line is halted")
async def a_halted_line_assigns_nothing(line: LineUnderTest) -> None:
    halt = await line.pull_cord()
    for player in line.players:
        await player.train.take("halt")
        await player.ask()
    await line.quiet("shard_assignment", line.players, because="the line is halted")
    await _resumed(line, halt)
    await line.finish(await line.dealt(line.players))


@check("halt.status", "25", "GetStatus of a halted line says HALTED, with the halt")
async def the_status_says_halted(line: LineUnderTest) -> None:
    halt = await line.pull_cord()
    status = await line.status()
    same("the state", "LINE_STATE_HALTED", pb.LineState.Name(status.state))
    same("the halt", halt.id, status.halt.id)


@check(
    "halt.health", "22", "A halted line's health stays SERVING: a restart would destroy evidence"
)
async def health_stays_serving(line: LineUnderTest) -> None:
    await line.pull_cord()
    stub: Any = health_pb2_grpc.HealthStub(line.players[0].control)
    for service in ("", "andon.v1.Coordinator"):
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await stub.Check(request, timeout=line.target.patience_s)
        except grpc.aio.AioRpcError as error:
            raise Violation(f"health of {service!r}", error.code().name) from None
        serving = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        same(f"the health of {service!r}:", "SERVING", serving)


@check("halt.cord_twice", "25", "PullCord at a halted line: FAILED_PRECONDITION")
async def the_cord_is_pulled_once(line: LineUnderTest) -> None:
    await line.pull_cord()
    status = await line.refusal("PullCord", pb.PullCordRequest(reason="again"))
    same("the status", "FAILED_PRECONDITION", status.code.name)


@check(
    "halt.wrong_id",
    "19.13",
    "ClearHalt that names another halt: FAILED_PRECONDITION, and the line stays halted",
)
async def an_answer_names_its_halt(line: LineUnderTest) -> None:
    halt = await line.pull_cord()
    request = pb.ClearHaltRequest(halt_id=halt.id + 1000, answer=pb.HALT_ANSWER_RETRY)
    status = await line.refusal("ClearHalt", request)
    same("the status", "FAILED_PRECONDITION", status.code.name)
    state = (await line.status()).state
    same("the state", "LINE_STATE_HALTED", pb.LineState.Name(state))


@check(
    "halt.retry",
    "22",
    "RETRY resumes every worker: the same positions under a new key",
)
async def retry_takes_the_step_again(line: LineUnderTest) -> None:
    round_, halt = await _pulled(line)
    await _resumed(line, halt)
    following = await line.again(line.players)
    require(following.key > round_.key, f"a key above {round_.key}", following.key)
    for player, work in following.works.items():
        batch = round_.works[player].batch
        same("the batch", (batch.start, batch.stop), (work.batch.start, work.batch.stop))
    await line.finish(following)


@check(
    "halt.skip",
    "22",
    "SKIP moves the cursor past the step's samples with a MARK, and resumes every worker",
)
async def skip_moves_the_cursor(line: LineUnderTest) -> None:
    head, step, cursor = line.players[0].head, line.players[0].step, line.players[0].cursor
    _, halt = await _pulled(line)
    batch = next_batch(cursor, PLAN.global_batch, PLAN.dataset_size)
    past = cursor_after(cursor, batch, PLAN.dataset_size)
    await line.clear_halt(halt.id, pb.HALT_ANSWER_SKIP)
    for player in line.players:
        record = (await player.train.take("step_committed")).record
        same(f"the kind of record at {player.name}:", record_pb2.RECORD_KIND_MARK, record.kind)
        same("its parent", head, key_of(record.parent))
        same("its step", step, record.step)
        same("its cursor", (past.epoch, past.position),
             (record.cursor.epoch, record.cursor.position))  # fmt: skip
        resume = await player.train.take("resume")
        same("the answer", "HALT_ANSWER_SKIP", pb.HaltAnswer.Name(resume.answer))
    following = await line.again(line.players)
    for work in following.works.values():
        start = _start(past)
        same("the next batch", (start.start, start.stop), (work.batch.start, work.batch.stop))
        same("the next parent", line.players[0].head, key_of(work.parent))
    await line.finish(following)


def _start(cursor: Cursor) -> PositionRange:
    return next_batch(cursor, PLAN.global_batch, PLAN.dataset_size)


@check("halt.joiner", "3", "A worker that joins a halted line gets the halt in JoinAccepted")
async def a_joiner_is_told(line: LineUnderTest) -> None:
    halt = await line.pull_cord()
    accepted = await line.players[-1].join()
    require(accepted.HasField("halt"), "the halt in JoinAccepted", "none")
    same("its id", halt.id, accepted.halt.id)


@check(
    "halt.nan",
    "22",
    "A reported NaN halts every worker, with worker, block, parameter, element and value",
)
async def a_nan_halts_all(line: LineUnderTest) -> None:
    round_ = await line.deal()
    parts: dict[Player, Part | None] = dict(rough_parts(round_))
    bad = round_.players[-1]
    part = parts[bad]
    assert part is not None
    parts[bad] = poisoned(part, math.nan)
    for player in round_.players:
        await send_part(round_, player, parts[player])
    for player in round_.players:
        await line.fault(
            round_,
            player,
            pb.FAULT_KIND_NON_FINITE_GRADIENT,
            rank=round_.works[bad].rank,
            block=0,
            element=BIAS,
            value="nan",
        )
    for evidence in (await _halts(line, halt_pb2.HALT_REASON_NON_FINITE_GRADIENT)).values():
        same("the key", round_.key, key_of(evidence.key))
        require(evidence.HasField("worker"), "the worker at fault", "none")
        same("the worker", bad.worker, evidence.worker)
        same("the parameter", "bias", evidence.parameter)
        same("the element", [1], list(evidence.element))
        same("the value", "nan", evidence.value)


@check("halt.loss", "22", "A loss that is NaN halts everybody: NON_FINITE_LOSS, with the worker")
async def a_nan_loss_halts_all(line: LineUnderTest) -> None:
    round_ = await line.deal()
    await exchange(round_)
    bad = round_.players[0]
    await line.ready(round_, bad, loss_sum=math.nan)
    for player in round_.players[1:]:
        await line.ready(round_, player)
    for evidence in (await _halts(line, halt_pb2.HALT_REASON_NON_FINITE_LOSS)).values():
        same("the worker", bad.worker, evidence.worker)


@check(
    "halt.blame",
    "20",
    "A loss that a worker reports is its own: a rank in the Fault blames nobody else",
    workers=2,
)
async def a_loss_is_its_reporters(line: LineUnderTest) -> None:
    round_ = await line.deal()
    other, reporter = round_.players[0], round_.players[-1]
    rank = round_.works[other].rank
    await line.fault(round_, reporter, pb.FAULT_KIND_NON_FINITE_LOSS, rank=rank, value="nan")
    for evidence in (await _halts(line, halt_pb2.HALT_REASON_NON_FINITE_LOSS)).values():
        same("the worker", reporter.worker, evidence.worker)


@check(
    "halt.divergence",
    "19.17",
    "Digests of one head that differ halt the line before the next record: REPLICA_DIVERGENCE",
    workers=2,
)
async def digests_are_compared(line: LineUnderTest) -> None:
    round_ = await line.deal()
    await exchange(round_)
    head = conversion.key_to_proto(line.players[0].head)
    for rank, player in enumerate(round_.players):
        digest = pb.WeightsDigest(head=head, sha256=bytes([min(rank, 1)]) * 32)
        await line.ready(round_, player, digest=digest)
    await _halts(line, halt_pb2.HALT_REASON_REPLICA_DIVERGENCE)


CHECKS: tuple[ServerCheck, ...] = (
    the_cord_halts_all,
    a_halted_round_is_void,
    a_halted_line_assigns_nothing,
    the_status_says_halted,
    health_stays_serving,
    the_cord_is_pulled_once,
    an_answer_names_its_halt,
    retry_takes_the_step_again,
    skip_moves_the_cursor,
    a_joiner_is_told,
    a_nan_halts_all,
    a_nan_loss_halts_all,
    a_loss_is_its_reporters,
    digests_are_compared,
)
