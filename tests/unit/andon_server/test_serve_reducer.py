"""A reducer's configuration, and what else of the console knows of reducers."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.host.errors import UsageError
from andon_cli.app import read_config
from andon_cli.client import LineStatus, ReducerStatus
from andon_cli.commands.status import status_lines
from andon_server.serve_reducer import address_for_workers
from andon_server.serving import read_secret
from andon_server.settings import ServeConfig

ROLE = ("serve", "--role", "reducer")
HERE = (*ROLE, "--coordinator", "127.0.0.1:7070", "--secret-file", "secret")


def config_of(*argv: str) -> ServeConfig:
    config = read_config(argv, {})
    assert isinstance(config, ServeConfig)
    return config


def test_a_reducer_listens_beside_a_line_on_the_same_host() -> None:
    config = config_of(*HERE)

    assert (config.line_port, config.endpoint_port) == (7071, 9401)
    assert address_for_workers(config, 7071) == "127.0.0.1:7071"


def test_a_reducer_can_be_configured_by_its_environment() -> None:
    environment = {
        "ANDON_ROLE": "reducer",
        "ANDON_COORDINATOR": "127.0.0.1:7070",
        "ANDON_SECRET_FILE": "/run/secrets/andon",
    }

    config = read_config(["serve"], environment)

    assert isinstance(config, ServeConfig)
    assert config.secret_file == Path("/run/secrets/andon")


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        ("beta", "beta:7071"),
        ("beta:99", "beta:99"),
        ("[fe80::1]", "[fe80::1]:7071"),
        ("fe80::1", "[fe80::1]:7071"),
        ("[fe80::1]:99", "[fe80::1]:99"),
    ],
)
def test_workers_are_told_the_address_that_is_advertised(advertise: str, address: str) -> None:
    assert address_for_workers(config_of(*HERE, "--advertise", advertise), 7071) == address


def test_a_reducer_that_listens_everywhere_tells_its_address_towards_the_coordinator() -> None:
    config = config_of(*HERE, "--bind", "0.0.0.0", "--insecure")

    assert address_for_workers(config, 7071) == "127.0.0.1:7071"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (ROLE, "--coordinator"),
        ((*ROLE, "--coordinator", "127.0.0.1:7070"), "--secret-file"),
        ((*HERE, "--workers", "2"), "--workers"),
        ((*HERE, "--topology", "ring"), "--topology belongs to the line"),
        ((*HERE, "--token-file", "token"), "--token-file belongs to the line"),
        ((*HERE, "--bind", "0.0.0.0"), "--insecure"),
        ((*ROLE, "--coordinator", "alpha:7070", "--secret-file", "s", "--insecure"), "--bind"),
        (("serve", "--coordinator", "alpha:7070"), "--role reducer"),
        (("serve", "--reducers", "2"), "--secret-file"),
        (("serve", "--role", "coordinator"), "--secret-file"),
        (("serve", "--role", "reduce"), "--role"),
        (("run", "--reducers", "2", "train.py"), "--secret-file"),
    ],
)
def test_what_can_not_work_is_refused_with_the_flag_to_change(
    argv: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        read_config(argv, {})


def test_a_secret_is_what_its_file_holds_without_white_space(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")

    assert read_secret(tmp_path / "secret") == b"0123456789abcdef"


def test_without_a_file_every_secret_is_new() -> None:
    assert read_secret(None) != read_secret(None)


def test_a_secret_that_could_be_guessed_is_refused_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2\n")

    with pytest.raises(UsageError, match="16 are the least") as caught:
        read_secret(tmp_path / "secret")

    assert "hunter2" not in str(caught.value)


def test_a_secret_that_is_not_there_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="openssl rand"):
        read_secret(tmp_path / "secret")


def test_status_shows_how_the_model_is_shared() -> None:
    status = LineStatus(
        run_id="7f3a",
        state="RUNNING",
        expect_reducers=3,
        reducers=(ReducerStatus("", 60), ReducerStatus("beta:7071", 40)),
    )

    assert status_lines(status)[-1] == (
        "reducers  with the coordinator 60 %, beta:7071 40 % (2 of 3 there)"
    )
