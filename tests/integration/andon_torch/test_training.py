"""Training with the backend "andon": Gloo's losses, and what a NaN does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from integration.andon_torch.rig import Outcome, run_all

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def training(backend: str, kind: str, **more: Any) -> dict[str, Any]:
    env = more.pop("env", {})
    arguments = {"kind": kind, **more}
    return {
        "scenario": "losses",
        "ranks": 2,
        "backend": backend,
        "arguments": arguments,
        "env": env,
    }


RUNS = {
    "gloo ddp": training("gloo", "ddp"),
    "andon ddp": training("andon", "ddp"),
    "gloo fsdp": training("gloo", "fsdp"),
    "andon fsdp": training("andon", "fsdp"),
    "spoilt ddp": training("andon", "ddp", spoil_at=2),
    "spoilt fsdp": training("andon", "fsdp", spoil_at=2),
    "spoilt, watched": training("gloo", "ddp", spoil_at=2, hook=True),
    "watched": training("gloo", "ddp", hook=True),
    "spoilt, open": training("andon", "ddp", spoil_at=2, env={"ANDON_GATE": "off"}),
    # Memory can't be shared there: lanes carry everything.
    "lanes": training("andon", "ddp", env={"ANDON_SHARED_DIR": "/nowhere"}),
    "scaled": {"scenario": "scaled", "ranks": 2, "backend": "andon"},
    "chained": {
        "scenario": "chained",
        "ranks": 2,
        "backend": "andon",
        "env": {"ANDON_GATE": "all"},
    },
    "functional": {"scenario": "functional", "ranks": 2, "backend": "andon"},
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """What became of each run."""
    return dict(zip(RUNS, run_all(*RUNS.values()), strict=True))


def test_without_shared_memory_lanes_give_the_same_bits(
    outcomes: dict[str, list[Outcome]],
) -> None:
    assert [each["result"] for each in outcomes["lanes"]] == [
        each["result"] for each in outcomes["gloo ddp"]
    ]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_losses_and_weights_are_gloos_to_the_bit(
    outcomes: dict[str, list[Outcome]], kind: str
) -> None:
    ours = [each["result"] for each in outcomes[f"andon {kind}"]]

    assert ours == [each["result"] for each in outcomes[f"gloo {kind}"]]
    assert len(ours[0]["losses"]) == 5


@pytest.mark.parametrize(
    ("run", "parameter"),
    [
        ("spoilt ddp", r"0\.bias\[7\] in call \d+ of group 0: all_reduce\(sum\)"),
        ("spoilt fsdp", r"0\.weight\[7, 0\] in call \d+ of group 0: reduce_scatter\(avg\)"),
        ("spoilt, watched", r"0\.bias\[7\]"),
    ],
)
def test_a_nan_stops_all_ranks_before_a_weight_moves_and_is_named(
    outcomes: dict[str, list[Outcome]], run: str, parameter: str
) -> None:
    for outcome in outcomes[run]:
        result = outcome["result"]
        assert result["step"] == 2
        assert not result["moved"]
        assert re.search(rf"rank 1 on \S+ gave nan in {parameter}", result["error"])


def test_a_watched_model_of_gloo_trains_as_before(outcomes: dict[str, list[Outcome]]) -> None:
    assert [each["result"] for each in outcomes["watched"]] == [
        each["result"] for each in outcomes["gloo ddp"]
    ]


def test_an_open_gate_lets_a_nan_through_as_gloo_does(outcomes: dict[str, list[Outcome]]) -> None:
    assert all("nan" in each["result"]["weights"] for each in outcomes["spoilt, open"])


def test_overflows_under_a_gradient_scaler_are_counted_and_stop_nothing(
    outcomes: dict[str, list[Outcome]],
) -> None:
    expected = {"halved": True, "moved": False, "overflows": 3, "steps": 3}

    assert [each["result"] for each in outcomes["scaled"]] == [expected, expected]


def test_cpp_calls_the_same_collectives(outcomes: dict[str, list[Outcome]]) -> None:
    for rank, outcome in enumerate(outcomes["functional"]):
        assert outcome["result"] == {
            "all_reduce": [3, 3],
            "all_gather": [0, 1],
            "reduce_scatter": [2 * rank],
            "all_to_all": [rank, 10 + rank],
            "broadcast": [1],
            "compiled": [3, 3],
        }


def test_a_callback_may_wait_for_a_call_that_fails(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["chained"]:
        assert "rank 1 on" in outcome["result"]["error"]
