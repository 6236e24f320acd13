"""Error feedback on a line: a residual survives a halt, and is lost with its worker."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from andon.protocol.encoding import Encoding, decode, encode
from andon.protocol.run_settings import Policy
from andon_trainer.core.calls import Floats
from integration.harness import start_line

pytestmark = pytest.mark.integration

ENCODING = Encoding.TOPK
BATCH, STEPS, FEATURES, RATE = 8, 8, 100, 0.5
SPOILS, DIES = [1, 3], [1, 6]
"""The worker, and the step of its fault."""


def samples() -> Floats:
    """Small integers times powers of two: the mean of 4 or 8 of them is exact in float32."""
    dice = np.random.default_rng(5)
    numbers = dice.integers(-8, 9, (BATCH * STEPS, FEATURES))
    sizes = 2.0 ** dice.integers(-6, 1, FEATURES)
    return (numbers * sizes).astype(np.float32)


def replay(*, feedback: bool) -> Floats:
    """The weights after all steps, by the definition."""
    data = samples()
    residuals = {worker: np.zeros(FEATURES, np.float32) for worker in (0, 1)}
    weights = np.zeros(FEATURES, np.float32)
    for step in range(1, STEPS + 1):
        start, half = (step - 1) * BATCH, BATCH // 2
        shares = {0: (start, start + half), 1: (start + half, start + BATCH)}
        if step >= DIES[1]:
            shares = {0: (start, start + BATCH)}
        came = []
        for worker, (first, stop) in shares.items():
            numbers = data[first:stop].mean(axis=0, dtype=np.float32) + residuals[worker]
            sent = encode(numbers, ENCODING, kept=Policy().topk_kept)
            came.append(decode(sent, ENCODING, FEATURES))
            if feedback:
                residuals[worker] = numbers - came[-1]
        mean = came[0]
        if len(came) > 1:
            mean = came[0] * np.float32(0.5) + came[1] * np.float32(0.5)
            mean = decode(encode(mean, ENCODING), ENCODING, FEATURES)
        weights = weights - np.float32(RATE) * mean
    return weights


def test_weights_are_those_of_a_replay_though_a_round_was_void_and_a_worker_died(
    tmp_path: Path,
) -> None:
    spec = {
        "samples": samples().tolist(),
        "batch": BATCH,
        "rate": RATE,
        "spoils": SPOILS,
        "dies": DIES,
    }
    flags, more = ("--encoding", ENCODING.label), {"ANDON_ON_HALT": "wait"}

    with start_line(tmp_path, spec, 2, *flags, script="narrow.py", **more) as (service, workers):
        halt = service.await_halt()
        service.clear_halt(halt.id)
        codes = [worker.wait() for worker in workers]

    assert codes == [0, -signal.SIGKILL], workers[0].output
    assert [halt.worker, halt.step] == SPOILS
    weights = np.array(workers[0].seen["weights"], np.float32)
    np.testing.assert_array_equal(weights, replay(feedback=True))
    assert (weights != replay(feedback=False)).any(), "the encoding loses something here"
