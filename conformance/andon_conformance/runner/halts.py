"""Halts: every worker stops, nothing is committed, and a person answers (section 22)."""

from __future__ import annotations

import math
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from andon.protocol.shards import cursor_after, next_batch
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2, record_pb2
from andon.wire import conversion
from andon_conformance.runner.checks import Checks, Violation, require, require_above, same
from andon_conformance.runner.faults import BIAS, poisoned
from andon_conformance.runner.gradients import PLAN, AssignedRound
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of
from andon_conformance.runner.rounds import bounds, place_of

__all__ = ["CHECKS", "expect_halts"]

CHECKS = Checks()


async def expect_halts(line: LineUnderTest, reason: str) -> dict[Player, Any]:
    """The evidence that every player receives: one halt, for the given reason."""
    received = {}
    for player in line.players:
        # Whichever comes first: a record before the halt is the mistake that is looked for.
        message = await player.train.first(_stops_or_commits, what="Halt")
        if message.HasField("step_committed"):
            raise Violation("Halt, and no record", f"StepCommitted at {player.name}")
        received[player] = message.halt.evidence
    for player, evidence in received.items():
        came = halt_pb2.HaltReason.Name(evidence.reason)
        same(f"the reason at {player.name}:", f"HALT_REASON_{reason}", came)
        require(evidence.id, "a halt with an id", "0")
        same("its id", received[line.players[0]].id, evidence.id)
    return received


def _stops_or_commits(message: pb.TrainResponse) -> bool:
    return message.WhichOneof("message") in ("halt", "step_committed")


async def _pulled(line: LineUnderTest) -> tuple[AssignedRound, Any]:
    """A round in which every worker holds all averages; then an operator halts the line."""
    round_ = await line.averaged()
    return round_, await line.pull_cord()


async def _resume(line: LineUnderTest, halt: Any) -> None:
    await line.clear_halt(halt.id)
    for player, resume in (await line.all_take("resume")).items():
        same(f"the halt that {player.name} received an answer to:", halt.id, resume.halt_id)


def _expect_state(status: pb.LineStatus) -> None:
    same("the state", "LINE_STATE_HALTED", pb.LineState.Name(status.state))


@CHECKS.add("halt.cord", "22")
async def the_cord_halts_all(line: LineUnderTest) -> None:
    """PullCord halts every worker: OPERATOR, with the key that it voids."""
    round_, evidence = await _pulled(line)
    for player, received in (await expect_halts(line, "OPERATOR")).items():
        same("the id that PullCord returned", received.id, evidence.id)
        same(f"the voided key at {player.name}:", round_.key, key_of(received.key))


@CHECKS.add("halt.no_commit", "19.7")
async def a_halted_round_is_void(line: LineUnderTest) -> None:
    """A halted round is not committed, even if every worker is ready."""
    round_, halt = await _pulled(line)
    # Ready after the halt has arrived: no race excuses a commit now.
    await line.all_take("halt")
    await line.all_ready(round_)
    await line.fence(line.players)
    await _resume(line, halt)
    await line.finish(await line.not_committed(round_, line.players))


@CHECKS.add("halt.no_work", "20")
async def a_halted_line_assigns_nothing(line: LineUnderTest) -> None:
    """Nobody is assigned work while the line is halted."""
    halt = await line.pull_cord()
    await line.all_take("halt")
    await line.ask(line.players)
    await line.quiet("shard_assignment", line.players, because="the line is halted")
    await _resume(line, halt)
    await line.finish(await line.dealt(line.players))


@CHECKS.add("halt.status", "25")
async def the_status_says_halted(line: LineUnderTest) -> None:
    """GetStatus of a halted line says HALTED, with the halt."""
    halt = await line.pull_cord()
    status = await line.status()
    _expect_state(status)
    same("the halt", halt.id, status.halt.id)


@CHECKS.add("halt.health", "22")
async def health_stays_serving(line: LineUnderTest) -> None:
    """A halted line's health stays SERVING: a restart would destroy evidence."""
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


@CHECKS.add("halt.cord_twice", "25")
async def the_cord_is_pulled_once(line: LineUnderTest) -> None:
    """PullCord at a halted line: FAILED_PRECONDITION."""
    await line.pull_cord()
    status = await line.refusal("PullCord", pb.PullCordRequest(reason="again"))
    same("the status", "FAILED_PRECONDITION", status.code.name)


@CHECKS.add("halt.wrong_id", "19.13")
async def an_answer_names_its_halt(line: LineUnderTest) -> None:
    """ClearHalt that names another halt: FAILED_PRECONDITION, and the line stays halted."""
    halt = await line.pull_cord()
    request = pb.ClearHaltRequest(halt_id=halt.id + 1000, answer=pb.HALT_ANSWER_RETRY)
    status = await line.refusal("ClearHalt", request)
    same("the status", "FAILED_PRECONDITION", status.code.name)
    _expect_state(await line.status())


@CHECKS.add("halt.retry", "22")
async def retry_takes_the_step_again(line: LineUnderTest) -> None:
    """RETRY resumes every worker: the same positions under a new key."""
    round_, halt = await _pulled(line)
    await _resume(line, halt)
    following = await line.again(line.players)
    require_above(round_.key, following.key)
    for player, work in following.works.items():
        same("the batch", bounds(round_.works[player].batch), bounds(work.batch))
    await line.finish(following)


@CHECKS.add("halt.skip", "22")
async def skip_moves_the_cursor(line: LineUnderTest) -> None:
    """SKIP moves the cursor past the step's samples with a MARK, and resumes every worker."""
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
        same("its cursor", place_of(past), place_of(record.cursor))
        resume = await player.train.take("resume")
        same("the answer", "HALT_ANSWER_SKIP", pb.HaltAnswer.Name(resume.answer))
    following = await line.again(line.players)
    batch = next_batch(past, PLAN.global_batch, PLAN.dataset_size)
    for work in following.works.values():
        same("the next batch", bounds(batch), bounds(work.batch))
        same("the next parent", line.players[0].head, key_of(work.parent))
    await line.finish(following)


@CHECKS.add("halt.joiner", "3")
async def a_joiner_is_told(line: LineUnderTest) -> None:
    """A worker that joins a halted line gets the halt in JoinAccepted."""
    halt = await line.pull_cord()
    accepted = await line.players[-1].join()
    require(accepted.HasField("halt"), "the halt in JoinAccepted", "none")
    same("its id", halt.id, accepted.halt.id)


@CHECKS.add("halt.nan", "22")
async def a_nan_halts_all(line: LineUnderTest) -> None:
    """A reported NaN halts every worker, with worker, block, parameter, element and value."""
    round_ = await line.deal()
    parts = round_.rough_parts()
    bad = round_.players[-1]
    parts[bad] = poisoned(parts[bad], math.nan)
    for player in round_.players:
        await round_.send_part(player, parts[player])
    found = {"rank": round_.works[bad].rank, "block": 0, "element": BIAS, "value": "nan"}
    for player in round_.players:
        await line.fault(round_, player, pb.FAULT_KIND_NON_FINITE_GRADIENT, **found)
    for evidence in (await expect_halts(line, "NON_FINITE_GRADIENT")).values():
        same("the key", round_.key, key_of(evidence.key))
        require(evidence.HasField("worker"), "the worker at fault", "none")
        same("the worker", bad.worker, evidence.worker)
        same("the parameter", "bias", evidence.parameter)
        same("the element", [1], list(evidence.element))
        same("the value", "nan", evidence.value)


@CHECKS.add("halt.loss", "22")
async def a_nan_loss_halts_all(line: LineUnderTest) -> None:
    """A loss that is NaN halts everybody: NON_FINITE_LOSS, with the worker."""
    round_ = await line.averaged()
    # The loss is looked at when it arrives, or when the round is whole: both are right.
    bad, *others = round_.players
    await line.ready(round_, bad, loss_sum=math.nan)
    await line.all_ready(round_, others)
    for evidence in (await expect_halts(line, "NON_FINITE_LOSS")).values():
        same("the worker", bad.worker, evidence.worker)


@CHECKS.add("halt.blame", "20", workers=2)
async def a_loss_is_its_reporters(line: LineUnderTest) -> None:
    """A loss that a worker reports is its own: a rank in the Fault blames nobody else."""
    round_ = await line.deal()
    other, reporter = round_.players[0], round_.players[-1]
    rank = round_.works[other].rank
    await line.fault(round_, reporter, pb.FAULT_KIND_NON_FINITE_LOSS, rank=rank, value="nan")
    for evidence in (await expect_halts(line, "NON_FINITE_LOSS")).values():
        same("the worker", reporter.worker, evidence.worker)


@CHECKS.add("halt.divergence", "19.17", workers=2)
async def digests_are_compared(line: LineUnderTest) -> None:
    """Digests of one head that differ halt the line before the next record: REPLICA_DIVERGENCE."""
    round_ = await line.averaged()
    head = conversion.key_to_proto(line.players[0].head)
    for rank, player in enumerate(round_.players):
        digest = pb.WeightsDigest(head=head, sha256=bytes([min(rank, 1)]) * 32)
        await line.ready(round_, player, digest=digest)
    await expect_halts(line, "REPLICA_DIVERGENCE")
