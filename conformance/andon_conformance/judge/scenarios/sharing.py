"""Sharing: shares of any size and in pieces, gradients' norms, and several reducers."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from andon.protocol.capabilities import NORMS
from andon.protocol.layout import Chunk
from andon.protocol.reducers import ReducerShare, chunks_by_address
from andon.protocol.schedules import BALANCE_CAPABILITY
from andon.protocol.shards import Split
from andon.protocol.sums import sum_in_order
from andon.v1 import coordinator_pb2 as pb
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.checks import Stopped
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine, send_answers
from andon_conformance.judge.rounds import FLOAT32, ClientRound, steady
from andon_conformance.judge.transcript import Event

__all__ = ["reducing", "sharing"]

_UNEVEN = Split((1, 6, 1))
"""The client is rank 1 of three, and gets most of a batch."""
_IN_PIECES = Split((1, 1, 1), interleaved=True)
_POLICY = replace(FLOAT32, own_gradient_norm=True)
_TOLERANCE = 1e-3
_FRACTION = 100.0
"""A limit so far below the norm of one step is below that of the next step, too."""
_SLACK_S = 0.01


@scenario(
    "shares",
    """
    shares.uneven    section 21  takes a share that is larger than the other ranks'
    shares.pieces    section 21  takes a share of several ranges
    shares.timings   section 3   reports how long it computed, and how many samples, if it offers
                                 `balance.v1`
    shares.own-norm  section 3   reports the norm of its own gradient, before any limit, if it
                                 offers `norms.v1`
    shares.limit     section 3   limits the norm of its own gradient, if it offers `norms.v1`
    """,
)
async def sharing(bench: Bench) -> None:
    """A large share, one in pieces after a void round, and a limit for the gradient."""
    line = await bench.started(LineSetting(slot=1, workers=3, policy=_POLICY))
    has_norms = NORMS in line.join.capabilities
    ready, current = await _step(bench, line, "shares.uneven", _UNEVEN)
    norm = _norm_of(line, current)
    if has_norms:
        reported = _own_norm(ready)
        right = reported is not None and math.isclose(reported, norm, rel_tol=_TOLERANCE)
        evidence = f"own norm {reported}, and what it sent has {norm:.6g}"
        line.judge("shares.own-norm", right, evidence)
    await _in_pieces(bench, line)
    if not has_norms:
        bench.verdicts.skip_undecided(f"it does not offer {NORMS}")
    elif not norm > 0:
        bench.verdicts.skip("shares.limit", f"its gradient has the norm {norm}")
    else:
        await _limited(bench, line, norm / _FRACTION)


async def _in_pieces(bench: Bench, line: ScriptedLine) -> None:
    """A step with interleaved shares, whose first attempt becomes void after the contribution."""
    # Computed, sent and void: the next try may use the gradient again.
    line.void(await line.begin(check="shares.pieces", split=_IN_PIECES))
    _, current = await _step(bench, line, "shares.pieces", _IN_PIECES, again=True)
    if len(current.positions) < 2:
        bench.verdicts.skip("shares.pieces", "its plan has less than 4 samples in a step")


async def _limited(bench: Bench, line: ScriptedLine, limit: float) -> None:
    """The client joins again, and the line has a limit now."""
    line.setting = replace(line.setting, policy=replace(_POLICY, max_grad_norm=limit))
    await line.joins_again()
    line.accept(pb.JOIN_STATUS_IN_SYNC)
    ready, current = await _step(bench, line, "shares.limit", Split())
    norm = _norm_of(line, current)
    evidence = f"its gradient has the norm {norm:.6g}, and the limit is {limit:.6g}"
    line.judge("shares.limit", 0 < norm <= limit * (1 + _TOLERANCE), evidence)
    reported = _own_norm(ready)
    before = reported is not None and reported > 2 * limit
    line.judge("shares.own-norm", before, f"own norm {reported}, with the limit {limit:.6g}")


async def _step(
    bench: Bench, line: ScriptedLine, name: str, split: Split, *, again: bool = False
) -> tuple[pb.StepReady, ClientRound]:
    """A step that is committed, with its share judged as check `name`, and its timings."""
    # The clock starts after the client has asked: its time must fit into what follows.
    await line.asks()
    began = time.monotonic()
    current = await line.begin(check=name, split=split)
    line.average(current)
    ready = await line.must(name, line.ready(current))
    elapsed_s = time.monotonic() - began
    line.commit(current)
    if name != "shares.limit" and (len(current.positions) > 1 or not split.interleaved):
        evidence = f"it reports {ready.samples} samples; the share has {current.samples}, "
        evidence += f"in {len(current.positions)} ranges"
        line.judge(name, ready.samples == current.samples, evidence)
    if BALANCE_CAPABILITY in line.join.capabilities:
        _judge_timings(line, ready, elapsed_s, again=again)
    else:
        bench.verdicts.skip("shares.timings", f"it does not offer {BALANCE_CAPABILITY}")
    return ready, current


def _judge_timings(
    line: ScriptedLine, ready: pb.StepReady, elapsed_s: float, *, again: bool
) -> None:
    """Whether they can be true. A gradient that was kept counts as nothing computed."""
    busy_s, computed = ready.timings.busy_s, ready.timings.computed
    possible = 0 <= busy_s <= elapsed_s + _SLACK_S and (busy_s > 0) == (computed > 0)
    right = computed <= ready.samples if again else computed == ready.samples
    evidence = f"{computed} samples in {busy_s:.6g} s; StepReady has {ready.samples}, "
    evidence += f"and the attempt took {elapsed_s:.6g} s"
    line.judge("shares.timings", possible and right, evidence)


def _own_norm(ready: pb.StepReady) -> float | None:
    return ready.own_gradient_norm if ready.HasField("own_gradient_norm") else None


def _norm_of(line: ScriptedLine, current: ClientRound) -> float:
    """The norm of what the client sent."""
    chunks = [current.numbers_of(chunk) for chunk in line.chunks()]
    squares = [np.square(each.astype(np.float64)).sum() for each in chunks if each is not None]
    return math.sqrt(sum_in_order(squares))


@scenario(
    "reducers",
    """
    reducers.streams   section 4  opens a stream to each reducer of the partition
    reducers.chunks    section 4  sends each chunk to its own reducer, and to no other
    reducers.patience  section 4  is not ready before it has the averages of all reducers
    reducers.abstain   section 4  abstains at each reducer
    reducers.map       section 3  contributes nothing if the partition leaves out a part of the
                                  model
    """,
)
async def reducing(bench: Bench) -> None:
    """Two reducers share the model, then an invalid map."""
    line = await bench.started(LineSetting(reducers=2))
    await line.asks()
    if len(line.chunks()) < line.setting.reducers:
        bench.verdicts.skip_undecided("the client's model is a single chunk")
        return
    parts = _parts(line)
    current = await line.begin(check="reducers.chunks")
    opened = {stream.address for stream in line.reduce_streams()}
    evidence = f"streams to {len(opened)} of {len(parts)} reducers"
    line.judge("reducers.streams", opened == set(parts), evidence)
    sent = {
        Chunk(each.message.block, each.message.offset, each.message.count): each.stream.address
        for each in current.given
    }
    wrong = [
        chunk for address, part in parts.items() for chunk in part if sent.get(chunk) != address
    ]
    evidence = f"{len(wrong)} of {len(sent)} chunks went elsewhere"
    if not line.judge("reducers.chunks", not wrong, evidence):
        raise Stopped("the client knows no other reducers")

    answers = line.answers(current)
    # The coordinator's own reducer, whose address is empty, is the first to answer.
    send_answers([each for each in answers if not each[0].address])
    early = await line.transcript.pause()
    ready = [event for event in early if event.kind == "step_ready"]
    evidence = f"{len(ready)} StepReady came with one reducer's averages held back"
    line.judge("reducers.patience", not ready, evidence)
    send_answers([each for each in answers if each[0].address])
    await line.must("reducers.patience", line.ready(current))
    line.commit(current)

    await _abstain(line, parts)
    await _refuse(line)


def _parts(line: ScriptedLine) -> dict[str, list[Chunk]]:
    """The chunks of each reducer."""
    chunks = chunks_by_address(line.layout, line.setting.policy.chunk_elements, line.shares)
    return {address: [each for block in part for each in block] for address, part in chunks.items()}


async def _abstain(line: ScriptedLine, parts: dict[str, list[Chunk]]) -> None:
    name = "reducers.abstain"
    await line.asks()
    current = line.assign(positions=())
    averages = line.averages(current)
    for address, part in parts.items():

        def is_there(event: Event, address: str = address) -> bool:
            return event.kind == "abstain" and event.stream.address == address

        place = address or "the coordinator's own reducer"
        what = f"Abstain at {place}"
        event = await line.must(name, line.transcript.wait(what, is_there, current.began))
        current.abstained.append((event.stream, event.message))
        event.stream.send_all([averages.message(chunk, steady(chunk)) for chunk in part])
    ready = await line.must(name, line.ready(current))
    evidence = f"it abstained at {len(current.abstained)} reducers, with weight {ready.weight:g}"
    line.judge(name, ready.weight == 0, evidence)
    line.commit(current)


async def _refuse(line: ScriptedLine) -> None:
    """The next round's partition ends one element too early."""
    *most, last = line.shares
    await line.asks()
    short = [*most, ReducerShare(last.address, last.start, last.stop - 1)]
    current = line.assign(reducers=short)
    event = await line.must("reducers.map", line.refusal(current))
    line.judge("reducers.map", event.kind != "block_gradient", f"{event.kind} came")
