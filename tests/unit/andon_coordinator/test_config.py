"""A coordinator's configuration refuses what contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon_coordinator.config import CoordinatorConfig, LineOptions


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
    ],
)
def test_contradicting_settings_are_refused_at_construction(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields)).split("_")[0]):
        config(**fields)
