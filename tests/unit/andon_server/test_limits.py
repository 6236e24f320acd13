"""Limits: a default, a flag and a variable for each; what nothing could work within is refused."""

from __future__ import annotations

import dataclasses
import resource

import pytest

from andon.host.errors import UsageError
from andon_cli.app import read_config
from andon_cli.config import RunConfig
from andon_cli.settings import as_flags
from andon_reducer.config import ReducerLimits
from andon_server.limits import Limits, with_descriptors
from andon_server.serving import reducer_config
from andon_server.settings import ServeConfig

FLAGS = {
    "max_message_bytes": ("--max-message-bytes", "2000000"),
    "chunk_elements": ("--chunk-elements", "1024"),
    "max_connections": ("--max-connections", "77"),
    "max_streams_per_connection": ("--max-streams-per-connection", "17"),
    "max_calls": ("--max-calls", "50"),
    "max_calls_per_host": ("--max-calls-per-host", "40"),
    "max_silent_calls": ("--max-silent-calls", "30"),
    "max_watchers": ("--max-watchers", "3"),
    "max_streams_per_worker": ("--max-streams-per-worker", "4"),
    "max_held_bytes": ("--max-held-bytes", "1000000000"),
    "max_state_pieces": ("--max-state-pieces", "2"),
    "first_message_timeout_s": ("--first-message-timeout", "2.5"),
}


def value_of(limits: Limits, name: str) -> float:
    found = getattr(limits, name, None)
    return float(getattr(limits.reducer, name) if found is None else found)


def limits(*argv: str, **environment: str) -> Limits:
    config = read_config(["serve", *argv], environment)
    assert isinstance(config, ServeConfig)
    return config.limits


def test_every_limit_is_tried() -> None:
    fields = {*dataclasses.fields(Limits), *dataclasses.fields(ReducerLimits)}

    assert {*FLAGS, "reducer"} == {field.name for field in fields}


@pytest.mark.parametrize("name", FLAGS)
def test_a_limit_is_read_from_its_flag_and_from_its_variable(name: str) -> None:
    flag, value = FLAGS[name]
    chunk = ("--chunk-elements", "1024") if name == "max_message_bytes" else ()
    small = {"ANDON_CHUNK_ELEMENTS": "1024"} if chunk else {}
    variable = "ANDON_" + flag.removeprefix("--").replace("-", "_").upper()

    assert value_of(limits(*chunk, flag, value), name) == float(value)
    assert value_of(limits(**small, **{variable: value}), name) == float(value)


def test_what_is_not_given_is_the_default() -> None:
    assert limits() == Limits()


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


def test_a_runs_service_is_given_the_same_limits() -> None:
    config = read_config(["run", "--max-watchers", "5", "--max-calls", "99", "x.py"], {})
    assert isinstance(config, RunConfig)
    assert config.service is not None

    again = read_config(["serve", *as_flags(config.service)], {})

    assert isinstance(again, ServeConfig)
    assert again.limits == config.service.limits == Limits(max_watchers=5, max_calls=99)


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
