"""Steps: what a client contributes, when it is ready, and what it reports."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from andon.protocol.encoding import decode, encode
from andon.protocol.layout import Chunk
from andon.protocol.messages import BlockGradient, Operation
from andon.protocol.records import Key
from andon.protocol.run_settings import Policy
from andon.v1 import coordinator_pb2 as pb
from andon.wire.conversion import optional_key_from_proto as key_in
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine, send_answers
from andon_conformance.judge.rounds import BFLOAT16, FLOAT32, INT8, ClientRound, short
from andon_conformance.judge.server import MALFORMED
from andon_conformance.judge.transcript import EXITED

__all__ = ["encoding", "stepping", "strips"]

_DIGEST_EVERY = 2
_POLICY = replace(FLOAT32, digest_every=_DIGEST_EVERY, gradient_norm=True)
_NORM_TOLERANCE = 1e-5


@scenario(
    "step",
    """
    step.opening        section 4  opens each Reduce stream with run, id and session token
    step.channel        section 4  sends bulk data on a separate connection
    step.frames         section 4  sends valid messages, with the payload last
    step.key            section 4  contributes under the assignment's key
    step.rank           section 4  sends the rank and the world size of the assignment
    step.chunks         section 4  cuts blocks as the policy demands, and sends all of them
    step.once           rule 14    sends each chunk once
    step.order          rule 16    sends chunks in the layout's order on each stream
    step.encoding       section 4  encodes as the policy demands, for the weighted mean
    step.payload        section 4  sends payloads of the right length, with finite numbers
    step.weight         rule 15    uses one weight, finite and above 0
    step.patience       rule 15    is not ready before the last average arrived
    step.ready          section 3  reports weight, samples, total weight and world size
    step.loss           section 3  reports the losses of its samples: not always 0, and 0 without
                                   any
    step.norm           section 3  reports the norm of the averages if the policy asks for it
    step.abstain        section 4  abstains once, with weight 0, from an empty share
    step.digests        section 3  reports its weights' digest, with their head, every
                                   `digest_every` steps
    step.wanted-digest  section 3  reports it also for an assignment that wants it
    """,
)
async def stepping(bench: Bench) -> None:
    """Four steps of a model in small chunks, with an empty share among them."""
    line = await bench.started(LineSetting(slot=1, workers=3, policy=_POLICY))
    reports = [await _judged_step(bench, line)]

    # As rank 0 of two, though its slot is 1: the rank is the assignment's, not the slot. The step
    # is odd, so that no digest is due.
    current = await line.begin((1, 2), wants_digest=True)
    _judge_rank(line, current)
    line.average(current)
    ready = await line.ready(current)
    evidence = f"digest {short(ready.digest.sha256)} at step {line.step}"
    line.judge("step.wanted-digest", len(ready.digest.sha256) == 32, evidence)
    line.commit(current)
    reports.append((current.parent, ready))

    reports.append(await _abstain(line))
    ready, current = await line.averaged()
    line.commit(current)
    reports.append((current.parent, ready))
    _judge_digests(line, [(head, ready.digest) for head, ready in reports])
    _judge_losses(line, [ready for _, ready in reports])


async def _judged_step(bench: Bench, line: ScriptedLine) -> tuple[Key, pb.StepReady]:
    """The first step, of which everything is judged; its parent, and the client's report."""
    current = await line.begin(check="step.chunks")
    *most, last = line.answers(current)
    send_answers(most)
    early = await line.transcript.pause()
    ready_early = [event for event in early if event.kind == "step_ready"]
    evidence = "StepReady came with one average held back" if ready_early else "nothing came"
    line.judge("step.patience", not ready_early, evidence)
    _judge_contributions(line, current)
    send_answers([last])
    ready = await line.must("step.ready", line.ready(current))
    said = (ready.weight, ready.samples, ready.total_weight, ready.world_size)
    wanted = (current.weight, current.samples, current.total_weight, current.world_size)
    evidence = f"weight, samples, total, world size {said}, and it is {wanted}"
    line.judge("step.ready", said == wanted and math.isfinite(ready.loss_sum), evidence)
    # A client that was ready too early has no norm of all averages.
    if bench.verdicts.holds("step.patience"):
        _judge_norm(line, current, ready)
    line.commit(current)
    return current.parent, ready


def _judge_contributions(line: ScriptedLine, current: ClientRound) -> None:
    """Everything that the client sent on the Reduce streams of the first round."""
    transcript = line.transcript
    openings = transcript.find(lambda event: event.kind == "open_round")
    right = all(
        (each.message.run_id, each.message.worker, each.message.session_token)
        == (line.run_id, line.setting.slot, line.session_token)
        for each in openings
    )
    streams = line.reduce_streams()
    opened_first = len(openings) == len(streams) > 0
    evidence = f"{len(openings)} OpenRound on {len(streams)} streams"
    line.judge("step.opening", right and opened_first, evidence)
    shared = [stream for stream in streams if stream.peer == line.train.peer]
    evidence = f"control comes from {line.train.peer}, bulk from {streams[0].peer}"
    line.judge("step.channel", not shared, evidence)
    bad = transcript.find(lambda event: event.kind == MALFORMED)
    line.judge("step.frames", not bad, bad[0].message if bad else "all could be read")

    # What came, not what was counted: chunks that came twice, or under another key, are in it.
    events = transcript.find(lambda event: event.kind == "block_gradient", current.began)
    messages: list[BlockGradient] = [event.message for event in events]
    keys = {str(message.key) for message in messages}
    line.judge("step.key", keys == {str(current.key)}, f"key {', '.join(sorted(keys))}")
    _judge_rank(line, current)

    came = Counter(Chunk(each.block, each.offset, each.count) for each in messages)
    wanted = set(line.chunks())
    evidence = f"{len(came)} different chunks came, {len(wanted)} are of the layout"
    line.judge("step.chunks", set(came) == wanted, evidence)
    chunk, times = came.most_common(1)[0]
    evidence = f"{chunk} came {times} times" if times > 1 else f"{len(messages)} chunks came"
    line.judge("step.once", times == 1, evidence)
    for stream in {event.stream for event in events}:
        on_it = [event.message for event in events if event.stream is stream]
        places = [(each.block, each.offset) for each in on_it]
        line.judge("step.order", places == sorted(places), f"{len(places)} chunks on {stream}")
    _judge_numbers(line, messages, "step")
    weights = {each.weight for each in messages}
    right = len(weights) == 1 and all(0 < weight < math.inf for weight in weights)
    line.judge("step.weight", right, f"weight {', '.join(map(str, sorted(weights)))}")


def _judge_rank(line: ScriptedLine, current: ClientRound) -> None:
    said = {(each.message.rank, each.message.world_size) for each in current.given}
    right = said == {(current.rank, current.world_size)}
    evidence = f"rank, world size: {sorted(said)}, assigned {current.rank, current.world_size}"
    line.judge("step.rank", right, evidence)


def _judge_numbers(line: ScriptedLine, messages: list[BlockGradient], scene: str) -> None:
    """Compares the payloads with the fields that describe them."""
    policy = line.setting.policy
    said = {(each.encoding, each.operation, each.group, each.sequence) for each in messages}
    right = said == {(policy.encoding, Operation.WEIGHTED_MEAN, 0, 0)}
    names = ", ".join(sorted(form.name for form, *_ in said))
    line.judge(f"{scene}.encoding", right, f"encoding {names}")
    size = policy.encoding.payload_bytes
    wrong = [each for each in messages if len(each.payload) != size(each.count)]
    evidence = f"{len(wrong)} of {len(messages)} payloads have another length than their elements"
    line.judge(f"{scene}.payload", not wrong, evidence)


def _judge_norm(line: ScriptedLine, current: ClientRound, ready: pb.StepReady) -> None:
    averages = [answer.averaged_block.payload for _, answer in line.answers(current)]
    numbers = np.frombuffer(b"".join(averages), dtype="<f4").astype(np.float64)
    norm = float(np.sqrt(np.square(numbers).sum()))
    reported = ready.gradient_norm if ready.HasField("gradient_norm") else None
    right = reported is not None and math.isclose(reported, norm, rel_tol=_NORM_TOLERANCE)
    line.judge("step.norm", right, f"norm {reported}, and it is {norm:.9g}")


async def _abstain(line: ScriptedLine) -> tuple[Key, pb.StepReady]:
    """A round in which the client has no samples; its parent, and the client's report."""
    name = "step.abstain"
    current = await line.begin(check=name, empty=True)
    line.judge(name, not current.given, f"{len(current.given)} chunks came")
    line.average(current)
    ready = await line.must(name, line.ready(current))
    times = line.transcript.find(lambda event: event.kind == "abstain", current.began)
    said = {(each.message.key, each.message.rank, each.message.world_size) for each in times}
    right = said == {(current.key, current.rank, current.world_size)} and len(times) == 1
    evidence = f"{len(times)} Abstain came, StepReady has weight {ready.weight:g}"
    line.judge(name, right and (ready.weight, ready.samples) == (0.0, 0), evidence)
    line.commit(current)
    return current.parent, ready


def _judge_losses(line: ScriptedLine, reports: list[pb.StepReady]) -> None:
    """Losses can't be recomputed here, but a loss of 0 at every step is not plausible."""
    losses = [ready.loss_sum for ready in reports if ready.weight]
    without = [ready.loss_sum for ready in reports if not ready.weight]
    text = f"{', '.join(f'{loss:g}' for loss in losses)}; without samples {without}"
    line.judge("step.loss", any(losses) and not any(without), text)


def _judge_digests(line: ScriptedLine, digests: list[tuple[Key, pb.WeightsDigest]]) -> None:
    present = [bool(digest.sha256) for _, digest in digests]
    paced = all(
        any(present[at : at + _DIGEST_EVERY]) for at in range(len(present) - _DIGEST_EVERY + 1)
    )
    right = all(
        len(digest.sha256) == 32 and key_in(digest.head) == head
        for head, digest in digests
        if digest.sha256
    )
    text = "".join("x" if there else "-" for there in present)
    line.judge("step.digests", paced and right, f"in {len(present)} steps: {text}")


@scenario(
    "encoding",
    """
    encoding.encoding  section 6  sends bfloat16 if the policy demands it
    encoding.payload   section 6  then sends two bytes per element
    encoding.averages  section 6  accepts averages in bfloat16
    """,
)
async def encoding(bench: Bench) -> None:
    """A step in bfloat16."""
    await _encoded(bench, "encoding", BFLOAT16)


@scenario(
    "strips",
    """
    strips.encoding  section 6  sends int8 if the policy demands it
    strips.payload   section 6  then sends scales and a byte per element
    strips.codes     section 6  has the scale and the codes of the rule
    strips.averages  section 6  accepts averages in int8
    """,
)
async def strips(bench: Bench) -> None:
    """A step in int8."""
    await _encoded(bench, "strips", INT8)


async def _encoded(bench: Bench, scene: str, policy: Policy) -> None:
    """A step in the policy's encoding, if the client has it."""
    verdicts, label = bench.verdicts, policy.encoding.label
    line = await bench.started(LineSetting(policy=policy))
    first = await line.transcript.wait(
        "RequestWork, or the client's end",
        lambda event: event.kind == EXITED or line.on_train("request_work")(event),
        line.transcript.now,
    )
    if first.kind == EXITED and first.message:
        verdicts.skip_undecided(f"it ended with exit code {first.message}: it has no {label}")
        return
    current = line.assign()
    await line.must(f"{scene}.encoding", line.gives(current))
    messages = [given.message for given in current.given]
    _judge_numbers(line, messages, scene)
    if not verdicts.holds(f"{scene}.encoding"):
        return
    if policy == INT8 and verdicts.holds(f"{scene}.payload"):
        _judge_codes(line, messages, f"{scene}.codes")
    line.average(current)
    name = f"{scene}.averages"
    await line.must(name, line.ready(current))
    line.commit(current)
    await line.must(name, line.asks())
    verdicts.passed(name, f"it took averages in {label}")


def _judge_codes(line: ScriptedLine, messages: list[BlockGradient], name: str) -> None:
    """A payload that was encoded by the rule is encoded to the same bytes again."""
    for each in messages:
        again = encode(decode(each.payload, each.encoding, each.count), each.encoding)
        if bytes(again) != bytes(each.payload):
            text = f"{each.payload.hex()} decodes to numbers that are encoded as {again.hex()}"
            line.judge(name, fact=False, evidence=text)
            return
    line.judge(name, fact=True, evidence=f"{len(messages)} payloads")
