"""Steps: what a client contributes, when it is ready, and what it reports."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np

from andon.protocol.encoding import decode, encode
from andon.protocol.layout import Chunk
from andon.protocol.messages import BlockGradient, Operation
from andon.protocol.records import Key
from andon.protocol.run_settings import Policy
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import BFLOAT16, FLOAT32, INT8, ClientRound
from andon_conformance.judge.server import MALFORMED
from andon_conformance.judge.transcript import EXITED

__all__ = ["ENCODING", "STEPPING", "STRIPS"]

_CHECKS = (
    Check("step.opening", "opens each Reduce stream with run, id and session token", "section 4"),
    Check("step.channel", "sends bulk data on a separate connection", "section 4"),
    Check("step.frames", "sends valid messages, with the payload last", "section 4"),
    Check("step.key", "contributes under the assignment's key", "section 4"),
    Check("step.rank", "sends the rank and the world size of the assignment", "section 4"),
    Check("step.chunks", "cuts blocks as the policy demands, and sends all of them", "section 4"),
    Check("step.once", "sends each chunk once", "rule 14"),
    Check("step.order", "sends chunks in the layout's order on each stream", "rule 16"),
    Check("step.encoding", "encodes as the policy demands, for the weighted mean", "section 4"),
    Check("step.payload", "sends payloads of the right length, with finite numbers", "section 4"),
    Check("step.weight", "uses one weight, finite and above 0", "rule 15"),
    Check("step.patience", "is not ready before the last average arrived", "rule 15"),
    Check("step.ready", "reports weight, samples, total weight and world size", "section 3"),
    Check("step.loss", "reports the losses of its samples: not always 0, and 0 without any",
          "section 3"),
    Check("step.norm", "reports the norm of the averages if the policy asks for it", "section 3"),
    Check("step.abstain", "abstains once, with weight 0, from an empty share", "section 4"),
    Check("step.digests",
          "reports its weights' digest, with their head, every `digest_every` steps",
          "section 3"),
    Check("step.wanted-digest", "reports it also for an assignment that wants it", "section 3"),
)  # fmt: skip

_DIGEST_EVERY = 2
_POLICY = replace(FLOAT32, digest_every=_DIGEST_EVERY, gradient_norm=True)
_NORM_TOLERANCE = 1e-5


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    setting = LineSetting(slot=1, workers=3, policy=_POLICY)
    line = await bench.start(setting)
    await line.bootstrap()
    digests: list[tuple[Key, pb.WeightsDigest]] = []
    reports: list[pb.StepReady] = []

    await line.asks()
    current = line.assign()
    with verdicts.deciding("step.chunks"):
        await line.gives(current)
    *most, last = line.answers(current)
    for stream, answer in most:
        stream.send(answer)
    early = await line.transcript.pause()
    ready_early = [event for event in early if event.kind == "step_ready"]
    evidence = "StepReady came with one average held back" if ready_early else "nothing came"
    verdicts.judge("step.patience", not ready_early, evidence)
    _judge_contributions(bench, line, current)
    last[0].send(last[1])
    with verdicts.deciding("step.ready"):
        ready = await line.ready(current)
    _judge_ready(bench, current, ready)
    if verdicts.holds("step.patience"):
        _judge_norm(bench, line, current, ready)
    reports.append(ready)
    digests.append((current.parent, ready.digest))
    line.commit(current)

    # As rank 0 of two, though its slot is 1: the rank is the assignment's, not the slot.
    await line.asks()
    # Its step is odd, so that no digest is due.
    current = line.assign((1, 2), wants_digest=True)
    await line.gives(current)
    _judge_rank(bench, current)
    line.average(current)
    ready = await line.ready(current)
    evidence = f"digest {ready.digest.sha256.hex()[:12] or 'none'} at step {line.step}"
    verdicts.judge("step.wanted-digest", len(ready.digest.sha256) == 32, evidence)
    reports.append(ready)
    digests.append((current.parent, ready.digest))
    line.commit(current)

    parent, ready = await _abstain(bench, line)
    reports.append(ready)
    digests.append((parent, ready.digest))
    ready, current = await line.averaged()
    reports.append(ready)
    digests.append((current.parent, ready.digest))
    line.commit(current)
    _judge_digests(bench, digests)
    _judge_losses(bench, reports)


def _judge_contributions(bench: Bench, line: ScriptedLine, current: ClientRound) -> None:
    """Everything that the client sent on the Reduce streams of the first round."""
    verdicts, transcript = bench.verdicts, line.transcript
    openings = transcript.find(lambda event: event.kind == "open_round")
    right = all(
        (each.message.run_id, each.message.worker, each.message.session_token)
        == (line.run_id, line.setting.slot, line.session_token)
        for each in openings
    )
    streams = line.reduce_streams()
    opened_first = len(openings) == len(streams) > 0
    evidence = f"{len(openings)} OpenRound on {len(streams)} streams"
    verdicts.judge("step.opening", right and opened_first, evidence)
    shared = [stream for stream in streams if stream.peer == line.train.peer]
    evidence = f"control comes from {line.train.peer}, bulk from {streams[0].peer}"
    verdicts.judge("step.channel", not shared, evidence)
    bad = transcript.find(lambda event: event.kind == MALFORMED)
    verdicts.judge("step.frames", not bad, bad[0].message if bad else "all could be read")

    sent = [
        (event.stream, event.message)
        for event in transcript.find(lambda event: event.kind == "block_gradient", current.began)
    ]
    messages: list[BlockGradient] = [message for _, message in sent]
    keys = {str(message.key) for message in messages}
    verdicts.judge("step.key", keys == {str(current.key)}, f"key {', '.join(sorted(keys))}")
    _judge_rank(bench, current)

    came = Counter(Chunk(each.block, each.offset, each.count) for each in messages)
    wanted = set(line.chunks())
    evidence = f"{len(came)} different chunks came, {len(wanted)} are of the layout"
    verdicts.judge("step.chunks", set(came) == wanted, evidence)
    twice = [chunk for chunk, times in came.items() if times > 1]
    evidence = (
        f"{twice[0]} came {came[twice[0]]} times" if twice else f"{len(messages)} chunks came"
    )
    verdicts.judge("step.once", not twice, evidence)
    for stream in {stream for stream, _ in sent}:
        places = [(each.block, each.offset) for of, each in sent if of is stream]
        verdicts.judge("step.order", places == sorted(places), f"{len(places)} chunks on {stream}")
    _judge_numbers(bench, line, messages, "step")


def _judge_rank(bench: Bench, current: ClientRound) -> None:
    said = {(each.message.rank, each.message.world_size) for each in current.given}
    right = said == {(current.rank, current.world_size)}
    evidence = f"rank, world size: {sorted(said)}, assigned {current.rank, current.world_size}"
    bench.verdicts.judge("step.rank", right, evidence)


def _judge_numbers(
    bench: Bench, line: ScriptedLine, messages: list[BlockGradient], scenario: str
) -> None:
    """Compares the payloads with the fields that describe them."""
    verdicts, policy = bench.verdicts, line.setting.policy
    said = {(each.encoding, each.operation, each.group, each.sequence) for each in messages}
    right = said == {(policy.encoding, Operation.WEIGHTED_MEAN, 0, 0)}
    names = ", ".join(sorted(encoding.name for encoding, *_ in said))
    verdicts.judge(f"{scenario}.encoding", right, f"encoding {names}")
    size = policy.encoding.payload_bytes
    wrong = [each for each in messages if len(each.payload) != size(each.count)]
    evidence = f"{len(wrong)} of {len(messages)} payloads have another length than their elements"
    verdicts.judge(f"{scenario}.payload", not wrong, evidence)
    if scenario == "step":
        weights = {each.weight for each in messages}
        right = len(weights) == 1 and all(0 < weight < math.inf for weight in weights)
        verdicts.judge("step.weight", right, f"weight {', '.join(map(str, sorted(weights)))}")


def _judge_ready(bench: Bench, current: ClientRound, ready: pb.StepReady) -> None:
    said = (ready.weight, ready.samples, ready.total_weight, ready.world_size)
    wanted = (current.weight, current.samples, current.total_weight, current.world_size)
    evidence = f"weight, samples, total, world size {said}, and it is {wanted}"
    right = said == wanted and math.isfinite(ready.loss_sum)
    bench.verdicts.judge("step.ready", right, evidence)


def _judge_norm(
    bench: Bench, line: ScriptedLine, current: ClientRound, ready: pb.StepReady
) -> None:
    averages = [answer.averaged_block.payload for _, answer in line.answers(current)]
    numbers = np.frombuffer(b"".join(averages), dtype="<f4").astype(np.float64)
    norm = float(np.sqrt(np.square(numbers).sum()))
    reported = ready.gradient_norm if ready.HasField("gradient_norm") else None
    right = reported is not None and math.isclose(reported, norm, rel_tol=_NORM_TOLERANCE)
    bench.verdicts.judge("step.norm", right, f"norm {reported}, and it is {norm:.9g}")


async def _abstain(bench: Bench, line: ScriptedLine) -> tuple[Key, pb.StepReady]:
    """A round in which the client has no samples; returns its parent and the client's report."""
    verdicts, name = bench.verdicts, "step.abstain"
    await line.asks()
    current = line.assign(empty=True)
    with verdicts.deciding(name):
        await line.gives(current)
    verdicts.judge(name, not current.given, f"{len(current.given)} chunks came")
    line.average(current)
    with verdicts.deciding(name):
        ready = await line.ready(current)
    times = line.transcript.find(lambda event: event.kind == "abstain", current.began)
    said = {(each.message.key, each.message.rank, each.message.world_size) for each in times}
    right = said == {(current.key, current.rank, current.world_size)} and len(times) == 1
    evidence = f"{len(times)} Abstain came, StepReady has weight {ready.weight:g}"
    verdicts.judge(name, right and (ready.weight, ready.samples) == (0.0, 0), evidence)
    line.commit(current)
    return current.parent, ready


def _judge_losses(bench: Bench, reports: list[pb.StepReady]) -> None:
    """Losses can't be recomputed here, but a loss of 0 at every step is not plausible."""
    losses = [ready.loss_sum for ready in reports if ready.weight]
    without = [ready.loss_sum for ready in reports if not ready.weight]
    text = f"{', '.join(f'{loss:g}' for loss in losses)}; without samples {without}"
    bench.verdicts.judge("step.loss", any(losses) and not any(without), text)


def _judge_digests(bench: Bench, digests: list[tuple[Key, pb.WeightsDigest]]) -> None:
    present = [bool(digest.sha256) for _, digest in digests]
    paced = all(
        any(present[at : at + _DIGEST_EVERY]) for at in range(len(present) - _DIGEST_EVERY + 1)
    )
    right = all(
        len(digest.sha256) == 32 and conversion.optional_key_from_proto(digest.head) == head
        for head, digest in digests
        if digest.sha256
    )
    text = "".join("x" if there else "-" for there in present)
    bench.verdicts.judge("step.digests", paced and right, f"in {len(present)} steps: {text}")


async def _play_encoding(bench: Bench, scenario: str, policy: Policy) -> None:
    """A step in the policy's encoding, if the client has it."""
    verdicts, label = bench.verdicts, policy.encoding.label
    line = await bench.start(LineSetting(policy=policy))
    await line.bootstrap()
    since = line.transcript.now
    first = await line.transcript.wait(
        "RequestWork, or the client's end",
        lambda event: event.kind == EXITED or line.on_train("request_work")(event),
        since,
    )
    if first.kind == EXITED and first.message:
        for name in ("encoding", "payload", "averages", *(["codes"] if policy == INT8 else [])):
            text = f"it ended with exit code {first.message}: it has no {label}"
            verdicts.skip(f"{scenario}.{name}", text)
        return
    current = line.assign()
    with verdicts.deciding(f"{scenario}.encoding"):
        await line.gives(current)
    messages = [given.message for given in current.given]
    _judge_numbers(bench, line, messages, scenario)
    right = verdicts.holds(f"{scenario}.encoding")
    if not right or messages[0].encoding is not policy.encoding:
        return
    if policy == INT8 and verdicts.holds(f"{scenario}.payload"):
        _judge_codes(bench, messages, f"{scenario}.codes")
    line.average(current)
    with verdicts.deciding(f"{scenario}.averages"):
        await line.ready(current)
    line.commit(current)
    with verdicts.deciding(f"{scenario}.averages"):
        await line.asks()
    verdicts.passed(f"{scenario}.averages", f"it took averages in {label}")


def _judge_codes(bench: Bench, messages: list[BlockGradient], name: str) -> None:
    """A payload that was encoded by the rule is encoded to the same bytes again."""
    for each in messages:
        again = encode(decode(each.payload, each.encoding, each.count), each.encoding)
        if bytes(again) != bytes(each.payload):
            text = f"{each.payload.hex()} decodes to numbers that are encoded as {again.hex()}"
            bench.verdicts.failed(name, text)
            return
    bench.verdicts.passed(name, f"{len(messages)} payloads")


STEPPING = Scenario(
    name="step",
    summary="four steps of a model in small chunks, with an empty share among them",
    checks=_CHECKS,
    play=_play,
)

ENCODING = Scenario(
    name="encoding",
    summary="a step in bfloat16",
    checks=(
        Check("encoding.encoding", "sends bfloat16 if the policy demands it", "section 6"),
        Check("encoding.payload", "then sends two bytes per element", "section 6"),
        Check("encoding.averages", "accepts averages in bfloat16", "section 6"),
    ),
    play=partial(_play_encoding, scenario="encoding", policy=BFLOAT16),
)

STRIPS = Scenario(
    name="strips",
    summary="a step in int8",
    checks=(
        Check("strips.encoding", "sends int8 if the policy demands it", "section 6"),
        Check("strips.payload", "then sends scales and a byte per element", "section 6"),
        Check("strips.codes", "has the scale and the codes of the rule", "section 6"),
        Check("strips.averages", "accepts averages in int8", "section 6"),
    ),
    play=partial(_play_encoding, scenario="strips", policy=INT8),
)
