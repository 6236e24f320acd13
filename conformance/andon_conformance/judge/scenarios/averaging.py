"""Averages in every form that a client must accept, and in forms that it must not."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from andon.v1 import reducer_pb2
from andon.wire.fields import length_prefixed
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check, Stopped
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientRound, steady
from andon_conformance.judge.scenarios.unknown import UNKNOWN
from andon_conformance.judge.streams import ClientCall

__all__ = ["AVERAGING", "oddly"]

_CHECKS = (
    Check("averages.arrival", "applies the same averages whatever the order of their arrival",
          "section 4"),
    Check("averages.fields", "accepts fields in any order, padding, and unknown fields",
          "section 4"),
    Check("averages.key", "never uses an average of another round", "section 3"),
    Check("averages.weight", "is not ready if averages disagree on total weight", "rule 15"),
    Check("averages.world", "is not ready if averages disagree on the world size", "rule 15"),
    Check("averages.unknown", "ends a Reduce stream on which an unknown case arrives",
          "section 4"),
)  # fmt: skip

_AVERAGED_BLOCK, _LENGTH = 2, 2
_WILD = 5.0

Answers = list[tuple[ClientCall, reducer_pb2.ReduceResponse]]


async def _play(bench: Bench) -> None:
    plain, permuted, odd = await bench.several_from_origin(3)
    expected = await _digest_after(plain, lambda answers: answers)
    await _compare(bench, "averages.arrival", permuted, expected, _permuted)
    await _compare(bench, "averages.fields", odd, expected, list)
    if bench.verdicts.holds("averages.arrival"):
        await _strays(bench, plain, permuted)

    await _disagree(bench, "averages.weight", plain, _other_weight)
    await _disagree(bench, "averages.world", plain, _other_world)
    await _unknown(bench, plain)


async def _compare(
    bench: Bench,
    name: str,
    line: ScriptedLine,
    expected: bytes,
    change: Callable[[Answers], Answers],
) -> None:
    """The same averages in another form lead to the same digest of the weights."""
    encode = oddly if name == "averages.fields" else None
    with bench.verdicts.deciding(name):
        digest = await _digest_after(line, change, encode)
    evidence = f"digest {digest.hex()[:12]}, in order and plain {expected.hex()[:12]}"
    bench.verdicts.judge(name, digest == expected, evidence)


async def _strays(bench: Bench, plain: ScriptedLine, disturbed: ScriptedLine) -> None:
    """Before the true averages, a whole round's of two other keys arrive, with wrong numbers."""
    verdicts, name = bench.verdicts, "averages.key"
    expected = await _digest_after(plain, lambda answers: answers)
    current = await _begun(disturbed)
    answers = _steady(disturbed, current)
    for other in (current.key.round - 1, current.key.round + 1):
        for stream, answer in answers:
            stream.send(_stray(answer, other))
    await disturbed.transcript.pause(beats=0)
    early = disturbed.transcript.find(disturbed.of_round("step_ready", current))
    if not verdicts.judge(name, not early, f"{len(early)} StepReady came before the averages"):
        raise Stopped("the client takes any average for one of its own")
    with verdicts.deciding(name):
        digest = await _digest_of(disturbed, current, answers)
    evidence = f"digest {digest.hex()[:12]}, without strays {expected.hex()[:12]}"
    verdicts.judge(name, digest == expected, evidence)


def _stray(answer: reducer_pb2.ReduceResponse, number: int) -> reducer_pb2.ReduceResponse:
    """A very wrong average of the same chunk, in round `number`."""
    stray = reducer_pb2.ReduceResponse()
    stray.CopyFrom(answer)
    block = stray.averaged_block
    block.key.round = number
    block.payload = np.full(len(block.payload) // 4, _WILD, "<f4").tobytes()
    return stray


async def _digest_after(
    line: ScriptedLine,
    change: Callable[[Answers], Answers],
    encode: Callable[[reducer_pb2.AveragedBlock], bytes] | None = None,
) -> bytes:
    """The digest of the weights after one step of made-up averages."""
    current = await _begun(line)
    return await _digest_of(line, current, change(_steady(line, current)), encode)


async def _digest_of(
    line: ScriptedLine,
    current: ClientRound,
    answers: Answers,
    encode: Callable[[reducer_pb2.AveragedBlock], bytes] | None = None,
) -> bytes:
    """The digest of the weights after a round with these averages is committed."""
    for stream, answer in answers:
        stream.send(answer if encode is None else encode(answer.averaged_block))
    await line.ready(current)
    line.commit(current)
    ready, current = await line.averaged()
    line.void(current)
    digest: bytes = ready.digest.sha256
    return digest


async def _disagree(
    bench: Bench, name: str, line: ScriptedLine, change: Callable[[reducer_pb2.AveragedBlock], None]
) -> None:
    """The last average contradicts all others."""
    current = await _begun(line)
    answers = _steady(line, current)
    change(answers[-1][1].averaged_block)
    for stream, answer in answers:
        stream.send(answer)
    await _judge_not_ready(bench, name, line, current)


async def _unknown(bench: Bench, line: ScriptedLine) -> None:
    """A case of a later version arrives before the last average."""
    name = "averages.unknown"
    current = await _begun(line)
    *most, (stream, last) = _steady(line, current)
    for its, answer in most:
        its.send(answer)
    stream.send(UNKNOWN)
    stream.send(last)
    await _judge_not_ready(bench, name, line, current)
    evidence = "the stream is still open" if stream.is_open else "it ended the stream"
    bench.verdicts.judge(name, not stream.is_open, evidence)


async def _judge_not_ready(
    bench: Bench, name: str, line: ScriptedLine, current: ClientRound
) -> None:
    with bench.verdicts.deciding(name):
        event = await line.transcript.wait(
            f"Fault, StepReady or the end of the stream in step {current.step}",
            lambda event: (
                line.of_round("fault", current)(event)
                or line.of_round("step_ready", current)(event)
                or (event.kind == "ended" and event.stream is line.train)
            ),
            current.began,
        )
        if event.kind == "step_ready":
            bench.verdicts.failed(name, "it sent StepReady")
            line.void(current)
            return
        how = await line.gives_up(current)
    await line.transcript.pause(beats=0)
    ready = line.transcript.find(line.of_round("step_ready", current))
    bench.verdicts.judge(name, not ready, f"{how}, and {len(ready)} StepReady came")


async def _begun(line: ScriptedLine) -> ClientRound:
    await line.asks()
    current = line.assign()
    await line.gives(current)
    return current


def _steady(line: ScriptedLine, current: ClientRound) -> Answers:
    averages = line.averages(current)
    return line.answers(current, lambda chunk: averages.made(chunk, steady(chunk)))


def _permuted(answers: Answers) -> Answers:
    return random.Random(5).sample(answers, len(answers))


def oddly(block: reducer_pb2.AveragedBlock) -> bytes:
    """An AveragedBlock with fields in reverse order (payload last), padding and unknown fields."""
    block.padding = b"\xff" * 5
    parts = []
    for field, value in block.ListFields():
        part = reducer_pb2.AveragedBlock()
        if field.message_type is not None:
            getattr(part, field.name).CopyFrom(value)
        else:
            setattr(part, field.name, value)
        parts.append(part.SerializeToString())
    *fields, payload = parts
    body = UNKNOWN + b"".join(reversed(fields)) + payload
    return bytes([_AVERAGED_BLOCK << 3 | _LENGTH]) + length_prefixed(body)


def _other_weight(block: reducer_pb2.AveragedBlock) -> None:
    block.total_weight += 1.0


def _other_world(block: reducer_pb2.AveragedBlock) -> None:
    block.world_size += 1


AVERAGING = Scenario(
    name="averages",
    summary="averages out of order, in unusual field order, contradictory, and unknown",
    checks=_CHECKS,
    play=_play,
)
