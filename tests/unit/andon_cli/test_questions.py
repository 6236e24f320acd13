"""Questions: what the verbs that ask or answer a line take from flags and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.host.errors import UsageError
from andon_cli.app import read_config
from andon_cli.questions import (
    DoctorConfig,
    HaltConfig,
    HealthConfig,
    HistoryConfig,
    ResumeConfig,
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


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["resume", "--skip", "--drop", "1"], "give --skip or --drop, not both"),
        (["resume", "--drop", "one"], "--drop must be a whole number"),
        (["resume", "--halt", "0"], "--halt must be from 1"),
        (["halt", "--address", "alpha"], "--address must be HOST:PORT"),
        (["history", "--format", "xml"], "--format must be table or json"),
        (["health", "--timeout", "0"], "--timeout must be at least 0.1 s"),
        (["health", "--service", "x" * 128], "--service must be at most 127 bytes"),
    ],
)
def test_values_that_make_no_sense_are_refused_with_the_remedy(
    argv: list[str], remedy: str
) -> None:
    with pytest.raises(UsageError) as refused:
        read_config(argv, {})

    assert remedy in str(refused.value)
