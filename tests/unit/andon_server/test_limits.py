"""Limits: a default, a flag and a variable for each; what nothing could work within is refused."""

from __future__ import annotations

import resource

import pytest

from andon.host.errors import UsageError
from andon_cli.app import read_config
from andon_reducer.config import ReducerLimits
from andon_server.limits import Limits, with_descriptors
from andon_server.serving import reducer_config
from andon_server.settings import ServeConfig


def limits(*argv: str, **environment: str) -> Limits:
    config = read_config(["serve", *argv], environment)
    assert isinstance(config, ServeConfig)
    return config.limits


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-message-bytes", "4194305"),
        ("--max-message-bytes", "1000"),
        ("--chunk-elements", "2000000"),
        ("--max-calls", "0"),
        ("--max-watchers", "-1"),
        ("--max-held-bytes", "1000"),
        ("--first-message-timeout", "0"),
    ],
)
def test_what_nothing_could_work_within_is_refused_by_its_flag(flag: str, value: str) -> None:
    with pytest.raises(UsageError, match=flag):
        limits(flag, value)


def test_a_reducer_has_limits_too() -> None:
    argv = ["serve", "--role", "reducer", "--coordinator", "127.0.0.1:1", "--secret-file", "s"]
    config = read_config([*argv, "--max-streams-per-worker", "3"], {})

    assert isinstance(config, ServeConfig)
    assert reducer_config(config.limits, None).limits == ReducerLimits(max_streams_per_worker=3)


def test_a_limit_that_nothing_could_work_within_can_not_be_built() -> None:
    with pytest.raises(ValueError, match="--max-calls must be at least 1, not 0"):
        Limits(max_calls=0)
    with pytest.raises(ValueError, match="--max-held-bytes"):
        ReducerLimits(max_held_bytes=1000)


def test_a_coordinator_alone_refuses_the_limits_of_a_reducer() -> None:
    argv = ["serve", "--role", "coordinator", "--secret-file", "s", "--max-state-pieces", "2"]

    with pytest.raises(UsageError, match="--max-state-pieces belongs to a reducer"):
        read_config(argv, {})


def test_with_few_open_files_fewer_connections_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))

    assert with_descriptors(Limits()) == Limits(max_connections=1000 - 256)
    assert with_descriptors(Limits(max_connections=100)) == Limits(max_connections=100)


def test_too_few_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))

    with pytest.raises(UsageError, match="ulimit -n"):
        with_descriptors(Limits())
