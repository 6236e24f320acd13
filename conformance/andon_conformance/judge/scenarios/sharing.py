"""Shares: of any size, in pieces, computed again; and the norm of the client's own gradient."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from andon.protocol.capabilities import NORMS
from andon.protocol.schedules import BALANCE_CAPABILITY
from andon.protocol.shards import Split
from andon.v1 import coordinator_pb2 as pb
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import FLOAT32, ClientRound

__all__ = ["SHARING"]

_CHECKS = (
    Check("shares.uneven", "takes a share that is larger than the other ranks'", "section 21"),
    Check("shares.pieces", "takes a share of several ranges", "section 21"),
    Check("shares.timings",
          "reports how long it computed, and how many samples, if it offers `balance.v1`",
          "section 3"),
    Check("shares.own-norm",
          "reports the norm of its own gradient, before any limit, if it offers `norms.v1`",
          "section 3"),
    Check("shares.limit", "limits the norm of its own gradient, if it offers `norms.v1`",
          "section 3"),
)  # fmt: skip

_UNEVEN = Split((1, 6, 1))
"""The client is rank 1 of three, and gets most of a batch."""
_IN_PIECES = Split((1, 1, 1), interleaved=True)
_POLICY = replace(FLOAT32, own_gradient_norm=True)
_TOLERANCE = 1e-3
_FRACTION = 100.0
"""A limit so far below the norm of one step is below that of the next step, too."""
_SLACK_S = 0.01


async def _play(bench: Bench) -> None:
    line = await bench.start(LineSetting(slot=1, workers=3, policy=_POLICY))
    await line.bootstrap()
    norm = await _uneven(bench, line)
    await _in_pieces(bench, line)
    if NORMS not in line.join.capabilities:
        bench.verdicts.skip("shares.own-norm", f"it does not offer {NORMS}")
        bench.verdicts.skip("shares.limit", f"it does not offer {NORMS}")
        return
    if not norm > 0:
        bench.verdicts.skip("shares.limit", f"its gradient has the norm {norm}")
        return
    await _limited(bench, line, norm / _FRACTION)


async def _uneven(bench: Bench, line: ScriptedLine) -> float:
    """A step with a large share; returns the norm of the client's gradient."""
    ready, current = await _step(bench, line, "shares.uneven", _UNEVEN)
    norm = _norm_of(line, current)
    if NORMS not in line.join.capabilities:
        return norm
    reported = _own_norm(ready)
    right = reported is not None and math.isclose(reported, norm, rel_tol=_TOLERANCE)
    evidence = f"own norm {reported}, and what it sent has {norm:.6g}"
    bench.verdicts.judge("shares.own-norm", right, evidence)
    return norm


async def _in_pieces(bench: Bench, line: ScriptedLine) -> None:
    """A step with interleaved shares, whose first attempt becomes void after the contribution."""
    await line.asks()
    void = line.assign(split=_IN_PIECES)
    with bench.verdicts.deciding("shares.pieces"):
        await line.gives(void)
    line.void(void)
    _, current = await _step(bench, line, "shares.pieces", _IN_PIECES, again=True)
    if len(current.positions) < 2:
        bench.verdicts.skip("shares.pieces", "its plan has less than 4 samples in a step")


async def _limited(bench: Bench, line: ScriptedLine, limit: float) -> None:
    """The client joins again, and the line has a limit now."""
    verdicts = bench.verdicts
    line.setting = replace(line.setting, policy=replace(_POLICY, max_grad_norm=limit))
    line.end_train()
    await line.joins()
    line.accept(pb.JOIN_STATUS_IN_SYNC)
    ready, current = await _step(bench, line, "shares.limit", Split())
    norm = _norm_of(line, current)
    evidence = f"its gradient has the norm {norm:.6g}, and the limit is {limit:.6g}"
    verdicts.judge("shares.limit", 0 < norm <= limit * (1 + _TOLERANCE), evidence)
    reported = _own_norm(ready)
    before = reported is not None and reported > 2 * limit
    verdicts.judge("shares.own-norm", before, f"own norm {reported}, with the limit {limit:.6g}")


async def _step(
    bench: Bench, line: ScriptedLine, name: str, split: Split, *, again: bool = False
) -> tuple[pb.StepReady, ClientRound]:
    """A step that is committed, with its share judged as check `name`, and its timings."""
    await line.asks()
    began = time.monotonic()
    current = line.assign(split=split)
    with bench.verdicts.deciding(name):
        await line.gives(current)
    line.average(current)
    with bench.verdicts.deciding(name):
        ready = await line.ready(current)
    elapsed_s = time.monotonic() - began
    line.commit(current)
    if name != "shares.limit" and (len(current.positions) > 1 or not split.interleaved):
        evidence = (
            f"it reports {ready.samples} samples; the share has {current.samples}, "
            f"in {len(current.positions)} ranges"
        )
        bench.verdicts.judge(name, ready.samples == current.samples, evidence)
    _judge_timings(bench, line, ready, elapsed_s, again=again)
    return ready, current


def _judge_timings(
    bench: Bench,
    line: ScriptedLine,
    ready: pb.StepReady,
    elapsed_s: float,
    *,
    again: bool,
) -> None:
    """Whether they can be true. A gradient that was kept counts as nothing computed."""
    name, timings = "shares.timings", ready.timings
    if BALANCE_CAPABILITY not in line.join.capabilities:
        bench.verdicts.skip(name, f"it does not offer {BALANCE_CAPABILITY}")
        return
    busy_s, computed = timings.busy_s, timings.computed
    possible = 0 <= busy_s <= elapsed_s + _SLACK_S and (busy_s > 0) == (computed > 0)
    right = computed <= ready.samples if again else computed == ready.samples
    evidence = (
        f"{computed} samples in {busy_s:.6g} s; StepReady has {ready.samples}, "
        f"and the attempt took {elapsed_s:.6g} s"
    )
    bench.verdicts.judge(name, possible and right, evidence)


def _own_norm(ready: pb.StepReady) -> float | None:
    return ready.own_gradient_norm if ready.HasField("own_gradient_norm") else None


def _norm_of(line: ScriptedLine, current: ClientRound) -> float:
    """The norm of what the client sent."""
    chunks = [current.numbers_of(chunk) for chunk in line.chunks()]
    squares = [np.square(each.astype(np.float64)).sum() for each in chunks if each is not None]
    return math.sqrt(sum(squares))


SHARING = Scenario(
    name="shares",
    summary="a large share, one in pieces after a void round, and a limit for the gradient",
    checks=_CHECKS,
    play=_play,
)
