"""Averages in every form that a client must accept, and in forms that it must not."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from andon.v1 import reducer_pb2
from andon.wire.fields import length_prefixed
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.checks import Stopped
from andon_conformance.judge.line import ScriptedLine, send_answers
from andon_conformance.judge.rounds import ClientRound, short
from andon_conformance.judge.server import UNKNOWN

__all__ = ["averaging", "oddly"]

_AVERAGED_BLOCK, _LENGTH = 2, 2
_WILD = 5.0


@scenario(
    "averages",
    """
    averages.arrival  section 4  applies the same averages whatever the order of their arrival
    averages.fields   section 4  accepts fields in any order, padding, and unknown fields
    averages.key      section 3  never uses an average of another round
    averages.weight   rule 15    is not ready if averages disagree on total weight
    averages.world    rule 15    is not ready if averages disagree on the world size
    averages.unknown  section 4  ends a Reduce stream on which an unknown case arrives
    """,
)
async def averaging(bench: Bench) -> None:
    """Averages out of order, in unusual field order, contradictory, and unknown."""
    plain, permuted, odd = await bench.several_from_origin(3)
    expected = await _digest_after(plain)
    digest = await permuted.must("averages.arrival", _digest_after(permuted, permute=True))
    _judge_digest(permuted, "averages.arrival", digest, expected)
    digest = await odd.must("averages.fields", _digest_after(odd, encode=oddly))
    _judge_digest(odd, "averages.fields", digest, expected)
    if bench.verdicts.holds("averages.arrival"):
        await _strays(plain, permuted)
    await _disagree(bench, "averages.weight", plain, _other_weight)
    await _disagree(bench, "averages.world", plain, _other_world)
    await _unknown(bench, plain)


def _judge_digest(line: ScriptedLine, name: str, digest: bytes, expected: bytes) -> None:
    """The same averages in another form lead to the same digest of the weights."""
    evidence = f"digest {short(digest)}, in order and plain {short(expected)}"
    line.judge(name, digest == expected, evidence)


async def _strays(plain: ScriptedLine, disturbed: ScriptedLine) -> None:
    """Before the true averages, a whole round's of two other keys arrive, with wrong numbers."""
    name, expected = "averages.key", await _digest_after(plain)
    current = await disturbed.begin()
    answers = disturbed.made_up(current)
    for other in (current.key.round - 1, current.key.round + 1):
        for stream, answer in answers:
            stream.send(_stray(answer, other))
    # A client that counts strays is ready now.
    await disturbed.transcript.pause(beats=0)
    early = disturbed.readies(current)
    if not disturbed.judge(name, not early, f"{len(early)} StepReady came before the averages"):
        raise Stopped("the client takes any average for one of its own")
    send_answers(answers)
    digest = await disturbed.must(name, _committed_digest(disturbed, current))
    evidence = f"digest {short(digest)}, without strays {short(expected)}"
    disturbed.judge(name, digest == expected, evidence)


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
    *,
    permute: bool = False,
    encode: Callable[[reducer_pb2.AveragedBlock], bytes] | None = None,
) -> bytes:
    """The digest of the weights after one step of made-up averages, sent as asked for."""
    current = await line.begin()
    answers = line.made_up(current)
    if permute:
        answers = random.Random(5).sample(answers, len(answers))
    for stream, answer in answers:
        stream.send(answer if encode is None else encode(answer.averaged_block))
    return await _committed_digest(line, current)


async def _committed_digest(line: ScriptedLine, current: ClientRound) -> bytes:
    """The digest of the weights after a round whose averages were sent."""
    await line.ready(current)
    line.commit(current)
    # The next round reports the weights that this one led to.
    ready, current = await line.averaged()
    line.void(current)
    digest: bytes = ready.digest.sha256
    return digest


async def _disagree(
    bench: Bench, name: str, line: ScriptedLine, change: Callable[[reducer_pb2.AveragedBlock], None]
) -> None:
    """The last average contradicts all others."""
    current = await line.begin()
    answers = line.made_up(current)
    # The last one, so that a client which compares only neighbours must see it, too.
    change(answers[-1][1].averaged_block)
    send_answers(answers)
    await _judge_not_ready(bench, name, line, current)


async def _unknown(bench: Bench, line: ScriptedLine) -> None:
    """A case of a later version arrives before the last average."""
    name, current = "averages.unknown", await line.begin()
    *most, (stream, last) = line.made_up(current)
    send_answers(most)
    # The last average follows: a client that skips what it does not know would be ready.
    stream.send(UNKNOWN)
    stream.send(last)
    await _judge_not_ready(bench, name, line, current)
    evidence = "the stream is still open" if stream.is_open else "it ended the stream"
    line.judge(name, not stream.is_open, evidence)


async def _judge_not_ready(
    bench: Bench, name: str, line: ScriptedLine, current: ClientRound
) -> None:
    event = await line.must(name, line.answer_to(current))
    if event.kind == "step_ready":
        bench.verdicts.failed(name, "it sent StepReady")
        line.void(current)
        return
    how = await line.must(name, line.gives_up(current))
    await line.transcript.pause(beats=0)
    ready = line.readies(current)
    line.judge(name, not ready, f"{how}, and {len(ready)} StepReady came")


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
