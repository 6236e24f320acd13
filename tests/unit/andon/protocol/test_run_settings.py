"""Terms: impossible plans, policies and leases can't be built."""

from __future__ import annotations

import math
from typing import Any

import pytest

from andon.protocol.run_settings import Liveness, Policy, RunPlan


@pytest.mark.parametrize(
    "wrong",
    [
        {"global_batch": 0},
        {"global_batch": -4},
        {"global_batch": 2**32},
        {"dataset_size": 0},
        {"dataset_size": 2**53},
        {"seed": -1},
        {"seed": 2**64},
        {"total_steps": -1},
        {"total_epochs": -1},
        {"data_digest": "ab" * 31},
        {"drop_last": True},
        {"drop_last": True, "dataset_size": 63},
    ],
)
def test_an_impossible_plan_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RunPlan(**({"global_batch": 64} | wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_elements": 0},
        {"chunk_elements": 2**32},
        {"digest_every": -1},
        {"max_steps": 0},
    ],
)
def test_an_impossible_policy_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Policy(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_s": 0.05},
        {"lease_s": math.nan},
        {"lease_s": math.inf},
        {"reconnect_s": -1.0},
        {"reconnect_s": math.nan},
        {"slower_s": -1.0},
        {"slower_s": 3.1},
        {"slower_s": math.nan},
    ],
)
def test_an_impossible_liveness_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Liveness(**wrong)


def test_a_lease_outlives_two_late_heartbeats() -> None:
    liveness = Liveness(lease_s=3.0)

    assert liveness.heartbeat_s == 1.0


def test_many_workers_send_heartbeats_less_often_but_within_a_lease() -> None:
    intervals = [Liveness.of_line(3.0, workers).heartbeat_s for workers in (1, 256, 512, 1024)]

    assert intervals == pytest.approx([1.0, 1.0, 2.0, 2.7])


def test_a_policy_by_default_never_passes_grpcs_own_limit() -> None:
    policy = Policy()

    assert policy.encoding.payload_bytes(policy.chunk_elements) < 4 * 2**20


@pytest.mark.parametrize("sparse", [False, True])
def test_a_plan_written_as_json_has_only_what_an_earlier_version_must_know_to_obey_it(
    sparse: bool,
) -> None:
    plan = RunPlan(global_batch=8, dataset_size=40, sparse=sparse)

    written = plan.to_json()

    assert written == {"global_batch": 8, "dataset_size": 40} | ({"sparse": True} if sparse else {})
    assert RunPlan.from_json(written) == plan


def test_a_plan_of_a_later_version_is_refused_by_the_field_that_is_new() -> None:
    with pytest.raises(ValueError, match=r"plan has curriculum, .* use the version that wrote it"):
        RunPlan.from_json({"global_batch": 8, "curriculum": 3})
