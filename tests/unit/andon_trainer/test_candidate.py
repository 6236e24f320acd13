"""A worker that joins again: what of the line may have changed meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from andon.protocol.encoding import Encoding
from andon.protocol.run_settings import Policy, RunPlan, Topology
from andon_trainer.errors import JoinRefused
from andon_trainer.place.candidate import refuse_other_plan, refuse_other_policy

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
