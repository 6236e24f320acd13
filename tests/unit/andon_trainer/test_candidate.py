"""A worker that joins again: what of the line may have changed meanwhile."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from andon.protocol.encoding import Encoding
from andon.protocol.run_settings import Policy, RunPlan, Topology
from andon_coordinator.config import LineOptions
from andon_coordinator.core.spikes import SpikeAction
from andon_trainer.errors import JoinRefused
from andon_trainer.line_options import given_in, unseen
from andon_trainer.place.candidate import (
    refuse_other_options,
    refuse_other_plan,
    refuse_other_policy,
)

BEFORE = Policy()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"topology": Topology.RING}, "topology was star and now is ring"),
        ({"local_steps": 8}, "local_steps was 0 and now is 8"),
        ({"encoding": Encoding.INT8_BLOCK}, "encoding was float32 and now is int8"),
        ({"answer_encoding": Encoding.INT4_BLOCK}, "answer_encoding was None and now is int4"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_line_that_works_in_another_way_is_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(JoinRefused, match=f"the line's {told}: start its workers anew"):
        refuse_other_policy(BEFORE, replace(BEFORE, **changed))


def test_what_a_worker_looks_up_in_each_step_may_change() -> None:
    refuse_other_policy(BEFORE, replace(BEFORE, digest_every=7, max_grad_norm=1.0, max_steps=9))


def test_a_coordinator_that_does_not_know_grains_is_refused() -> None:
    mine = RunPlan(global_batch=8, grain=2, tree=1)

    with pytest.raises(JoinRefused, match="does not keep the same bits"):
        refuse_other_plan(mine, RunPlan(global_batch=8))
    refuse_other_plan(mine, replace(mine, seed=3))


@pytest.mark.parametrize(
    ("asked", "there", "told"),
    [
        (
            {"schedule": "local", "local_steps": 32},
            {"schedule": "local"},
            "ask for local_steps 32, and the line at alpha:7070 has 16: start its service with "
            "--local-steps, or leave local_steps out",
        ),
        ({"encoding": "int8"}, {}, "ask for encoding int8, and the line at alpha:7070 has float32"),
        ({"encoding": "int8"}, {"encoding": "int8", "max_steps": 9}, ""),
        ({"on_spike": SpikeAction.SKIP}, {}, ""),
    ],
    ids=["a schedule", "an encoding", "the same", "what no policy shows"],
)
def test_a_line_that_differs_from_the_scripts_options_is_refused(
    asked: dict[str, Any], there: dict[str, Any], told: str
) -> None:
    options = LineOptions(**asked)

    with pytest.raises(JoinRefused, match=told) if told else nullcontext():
        refuse_other_options(
            given_in(options), options.policy, LineOptions(**there).policy, "alpha:7070"
        )

    assert unseen(options) == [name for name in asked if name in ("schedule", "on_spike")]
