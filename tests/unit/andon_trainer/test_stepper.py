"""Stepping: which epoch the script's loop is in, whatever becomes of the worker meanwhile."""

from __future__ import annotations

import pytest

from andon.protocol.records import Cursor, Key
from andon_trainer.core.events import TransferAsked
from unit.andon_trainer.step_bench import StepBench


def state_of(epoch: int) -> TransferAsked:
    cursor = Cursor(epoch, 0)
    return TransferAsked(transfer_id=1, head=Key(1, 90), sends=False, step=8, cursor=cursor)


@pytest.mark.parametrize("later", [False, True])
def test_a_loop_goes_on_in_the_epoch_of_a_state_that_was_installed(*, later: bool) -> None:
    bench = StepBench()
    if later:
        bench.assign((0, 4), end="commit")
    first = bench.assign((0, 4), end="commit", epoch=3)
    bench.assign((4, 8), end="commit", epoch=3)
    bench.member.transfers[first.key] = state_of(3)

    bench.run()

    assert len(bench.computed) == 2 + later
    assert bench.stepper.epoch == 3
    assert bench.member.step == 10


def test_a_loop_ends_if_a_mark_ended_its_epoch_also_after_a_state_was_installed() -> None:
    bench = StepBench()
    first = bench.assign((0, 4), end="commit", epoch=4)
    bench.member.transfers[first.key] = state_of(3)

    bench.run()

    assert not bench.computed
    assert bench.stepper.epoch == 3
