"""A coordinator's configuration refuses what contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon.protocol.capabilities import INT8, MEAN_BUFFERS, NORMS, TOPK, TRIMMED
from andon.protocol.encoding import Encoding
from andon.protocol.run_settings import Topology
from andon.protocol.schedules import (
    BALANCE_CAPABILITY,
    CADENCE_CAPABILITY,
    FRAGMENTS_CAPABILITY,
    LOCAL_CAPABILITY,
    OVERLAP_CAPABILITY,
)
from andon_coordinator.config import CoordinatorConfig, LineOptions
from andon_coordinator.core.eviction import EvictionRules
from andon_coordinator.core.spikes import SpikeAction


def config(**fields: Any) -> CoordinatorConfig:
    line = {name: fields.pop(name) for name in [*fields] if hasattr(LineOptions, name)}
    return CoordinatorConfig(
        **{
            "run_id": "7f3a",
            "journal": Path("journal.sqlite"),
            "line": LineOptions(**line),
            **fields,
        }
    )


def test_a_line_trains_on_with_one_worker_unless_said_otherwise() -> None:
    settings = config(expect_workers=3).line_settings()

    assert (settings.min_workers, settings.expect_workers, settings.max_workers) == (1, 3, 3)


def test_bounds_that_are_given_are_kept() -> None:
    settings = config(expect_workers=3, min_workers=2, max_workers=8).line_settings()

    assert (settings.min_workers, settings.expect_workers, settings.max_workers) == (2, 3, 8)


@pytest.mark.parametrize(
    "fields",
    [
        {"expect_workers": 0},
        {"expect_workers": 2, "min_workers": 3},
        {"expect_workers": 2, "max_workers": 1},
        {"max_workers": 10**6},
        {"rejoin_grace_s": -1.0},
        {"recovery_window_s": float("nan")},
        {"max_attempts": 0},
        {"journal_sync": "sometimes"},
        {"run_id": ""},
        {"run_id": "../7f3a"},
        {"overlap": True},
        {"overlap_steps": 2, "schedule": "local"},
        {"outer": "nesterov"},
        {"fragments": 2},
        {"mix": 0.5, "schedule": "local"},
        {"fragments": 3, "schedule": "local", "local_steps": 16},
        {"fragments": 2, "schedule": "local", "topology": Topology.RING},
        {"quorum": 0.5, "schedule": "local", "on_spike": SpikeAction.BACK},
        {"topk_kept": 8},
        {"noise_scale": True, "schedule": "async"},
        {"noise_scale": True, "same_bits": True},
        {"topology": Topology.RING, "encoding": "topk"},
    ],
)
def test_contradicting_settings_are_refused_at_construction(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields)).split("_")[0]):
        config(**fields)


def test_the_noise_scale_is_measured_of_norms_that_workers_report() -> None:
    policy = config(noise_scale=True).policy

    assert (policy.gradient_norm, policy.own_gradient_norm) == (True, True)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"topology": Topology.RING}, "--topology star"),
        ({"encoding": "bfloat16"}, "--encoding float32"),
        ({"encoding": "int8", "answer_encoding": "float32"}, "--encoding float32"),
        ({"schedule": "cadence"}, "--schedule every-step"),
        ({"schedule": "local"}, "--schedule every-step"),
        ({"shares": "interleaved"}, "--shares equal or balanced"),
        ({"shares": "balanced-interleaved"}, "--shares equal or balanced"),
        ({"max_grad_norm": 1.0}, "clip_grad_norm_"),
        ({"worker_grad_norm": 9.0}, "--grad-norm-spike"),
        ({"mean": "trimmed", "max_workers": 5}, "leave one of them out"),
    ],
)
def test_what_makes_bits_depend_on_workers_is_refused_beside_same_bits(
    fields: dict[str, Any], remedy: str
) -> None:
    config(**fields)

    with pytest.raises(ValueError, match=f"--same-bits can't go with --.*: .*{remedy}"):
        config(**fields, same_bits=True)
    with pytest.raises(ValueError, match=f"--verify can't go with --.*: .*{remedy}"):
        config(**fields, verify=0.1)


def test_verification_needs_grains_and_is_a_part_of_all_steps() -> None:
    settings = config(verify=0.25, on_wrong_arithmetic="drop").line_settings()

    assert (settings.same_bits, settings.verify.fraction, settings.verify.drops) == (
        True,
        0.25,
        True,
    )
    with pytest.raises(ValueError, match=r"verify must be from 0.0 to 1.0"):
        config(verify=1.5)


def test_same_bits_go_with_what_does_not_touch_the_sum_of_gradients() -> None:
    fields: dict[str, Any] = {
        "answer_encoding": "bfloat16",
        "shares": "balanced",
        "schedule": "every-step",
        "average_buffers": True,
        "grad_norm_spike": 9.0,
    }

    assert config(**fields, same_bits=True).line_settings().same_bits
    assert config(same_bits=True).line_settings().same_bits


def test_schedules_need_what_their_workers_must_be_capable_of() -> None:
    needed = {
        ("auto", "equal"): set(),
        ("every-step", "balanced"): {BALANCE_CAPABILITY},
        ("cadence", "balanced"): {CADENCE_CAPABILITY},
        ("local", "interleaved"): {LOCAL_CAPABILITY},
    }

    for (schedule, shares), names in needed.items():
        settings = config(schedule=schedule, shares=shares).line_settings()
        assert settings.capabilities == names

    all_three = config(schedule="local", overlap=True, fragments=4).line_settings()
    needed_by_all = {LOCAL_CAPABILITY, OVERLAP_CAPABILITY, FRAGMENTS_CAPABILITY}
    assert all_three.capabilities == needed_by_all


def test_what_an_earlier_version_would_not_heed_needs_a_capability() -> None:
    needed: dict[str, set[str]] = {
        name: set(config(**{name: value}).line_settings().capabilities)
        for name, value in (
            ("max_grad_norm", 1.0),
            ("worker_grad_norm", 10.0),
            ("average_buffers", True),
            ("grad_norm_spike", 10.0),
        )
    }
    needed["mean"] = set(config(mean="trimmed", max_workers=5).line_settings().capabilities)

    assert needed == {
        "max_grad_norm": {NORMS},
        "worker_grad_norm": {NORMS},
        "average_buffers": {MEAN_BUFFERS},
        "grad_norm_spike": set(),
        "mean": {TRIMMED},
    }


def test_an_encoding_of_this_version_needs_its_capability() -> None:
    needed = {
        encoding: set(config(encoding=encoding).line_settings().capabilities)
        for encoding in ("float32", "bfloat16", "int8", "topk")
    }

    assert needed == {"float32": set(), "bfloat16": set(), "int8": {INT8}, "topk": {TOPK}}


def test_averages_travel_as_gradients_do_unless_the_operator_says_otherwise() -> None:
    assert config(encoding="int8").policy.answer_encoding is None
    assert config(encoding="int2").policy.answer_encoding is Encoding.INT4_BLOCK
    narrow = config(encoding="bfloat16", answer_encoding="int8")

    assert narrow.policy.answer_encoding is Encoding.INT8_BLOCK
    assert set(narrow.line_settings().capabilities) == {INT8}


def test_only_the_schedule_local_hands_out_local_steps() -> None:
    assert config(local_steps=8).policy.local_steps == 0
    assert config(local_steps=8, schedule="local").policy.local_steps == 8


def test_judging_workers_asks_them_for_the_norms_of_their_own_gradients() -> None:
    assert not config().policy.own_gradient_norm
    assert config(worker_grad_norm=10.0).policy.own_gradient_norm


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ({"schedule": "cadence", "lr_scaling": "sqrt"}, True),
        ({"schedule": "cadence"}, False),
        ({"schedule": "cadence", "lr_scaling": "sqrt", "growth_cost": 1.0}, False),
        ({"lr_scaling": "sqrt"}, False),
        ({"lr_scaling": "sqrt", "max_anchor": 4}, True),
    ],
)
def test_norms_are_asked_for_where_windows_may_grow_by_them(
    options: dict[str, Any], asks: bool
) -> None:
    policy = config(**options).policy

    assert (policy.gradient_norm, policy.own_gradient_norm) == (asks, asks)


@pytest.mark.parametrize(
    ("schedule", "asked", "expected"),
    [("auto", None, 1), ("auto", 8, 8), ("cadence", None, 16), ("cadence", 4, 4)],
)
def test_a_cadence_that_nobody_asked_for_makes_no_longer_windows_than_speeds_demand(
    schedule: str, asked: int | None, expected: int
) -> None:
    settings = config(schedule=schedule, max_anchor=asked, lr_scaling="sqrt")

    assert settings.pacing.cadence.max_anchor == expected


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_anchor": 8}, "--max-anchor 8 has no effect without --lr-scaling"),
        ({"evict_slower_than": 3.0, "schedule": "local"}, "use --quorum"),
        ({"evict_slower_than": 3.0, "topology": Topology.RING}, "use --topology star"),
    ],
)
def test_a_setting_that_nothing_would_obey_is_refused_with_the_remedy(
    options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        config(**options)


@pytest.mark.parametrize(
    ("options", "other", "remedy"),
    [
        ({"topology": Topology.RING}, "--topology ring", "--topology star"),
        ({"schedule": "async"}, "--schedule async", "--schedule every-step"),
        ({"encoding": "int8", "answer_encoding": "float32"}, "--encoding int8", "bfloat16"),
        ({"answer_encoding": "int4"}, "--answer-encoding int4", "bfloat16"),
        ({"noise_scale": True}, "--noise-scale", "leave one"),
        ({"max_anchor": 8, "lr_scaling": "sqrt"}, "--max-anchor", "leave one"),
    ],
)
def test_a_trimmed_mean_is_refused_beside_what_it_makes_no_sense_with(
    options: dict[str, Any], other: str, remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"--mean trimmed can't go with {other}.*: .*{remedy}"):
        config(expect_workers=5, mean="trimmed", **options)


def test_a_trimmed_mean_needs_room_for_five_workers() -> None:
    for fields in ({"expect_workers": 4}, {"max_workers": 4}):
        with pytest.raises(ValueError, match="workers 4 brings fewer: raise it"):
            config(mean="trimmed", **fields)

    assert config(expect_workers=2, max_workers=5, mean="trimmed").policy.trims


def test_a_slow_worker_is_dealt_less_only_where_all_workers_know_of_shares_by_speed() -> None:
    settings = config(evict_slower_than=3.0, max_workers=4).line_settings()

    assert BALANCE_CAPABILITY in settings.capabilities
    assert settings.pacing.eviction == EvictionRules(slower_than=3.0)


def test_a_line_of_two_can_do_without_nobody() -> None:
    with pytest.raises(ValueError, match="no more than two"):
        config(evict_slower_than=3.0, max_workers=2).line_settings()
