"""Questions: what the verbs that ask or answer a line take from flags and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon_cli.app import read_config
from andon_cli.questions import (
    DoctorConfig,
    HaltConfig,
    HealthConfig,
    HistoryConfig,
    ResumeConfig,
    StatusConfig,
)

ALPHA = {"ANDON_ADDRESS": "alpha:7070"}


@pytest.mark.parametrize(
    ("argv", "config"),
    [
        (["halt"], HaltConfig(address="alpha:7070")),
        (["halt", "--reason", "odd"], HaltConfig(address="alpha:7070", reason="odd")),
        (["resume"], ResumeConfig(address="alpha:7070")),
        (["resume", "--skip"], ResumeConfig(address="alpha:7070", skip=True)),
        (["resume", "--drop", "0"], ResumeConfig(address="alpha:7070", drop=0)),
        (["resume", "--halt", "3"], ResumeConfig(address="alpha:7070", halt=3)),
        (["doctor"], DoctorConfig(address="alpha:7070")),
        (["doctor", "--address", "beta:1"], DoctorConfig(address="beta:1")),
        (["health"], HealthConfig(address="alpha:7070")),
        (["health", "--service", "x.Y"], HealthConfig(address="alpha:7070", service="x.Y")),
        (["health", "--timeout", "0.5"], HealthConfig(address="alpha:7070", timeout_s=0.5)),
        (["history", "--format", "json"], HistoryConfig(format="json")),
        (
            ["status", "--format", "json"],
            StatusConfig(address="alpha:7070", format="json"),
        ),
    ],
)
def test_a_flag_beats_the_environment_which_beats_the_default(
    argv: list[str], config: object
) -> None:
    assert read_config(argv, ALPHA) == config


def test_an_answer_never_comes_from_the_environment() -> None:
    environment = {"ANDON_SKIP": "1", "ANDON_DROP": "1", "ANDON_HALT": "7", "ANDON_REASON": "x"}

    assert read_config(["resume"], environment) == ResumeConfig()
    assert read_config(["halt"], environment) == HaltConfig()


def test_the_doctor_looks_where_a_service_and_its_workers_would() -> None:
    environment = {
        "ANDON_PORT": "1", "ANDON_METRICS_PORT": "2", "ANDON_SHARED_DIR": "/mnt/shared",
    }  # fmt: skip

    assert read_config(["doctor"], environment) == DoctorConfig(
        port=1, metrics_port=2, shared_dir=Path("/mnt/shared")
    )
