"""Access: how this process shows who it is, and what it never says aloud."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.host.access import Access
from andon.host.errors import UsageError
from andon_cli.app import read_config
from andon_cli.launching.processes import worker_environment
from andon_cli.questions import DrainConfig
from andon_cli.settings import as_flags, read_schema
from andon_server.settings import ServeConfig

TOKEN = "a-token-of-24-characters"


@pytest.fixture
def tokens(tmp_path: Path) -> Access:
    for name in ("run", "operators"):
        (tmp_path / name).write_text(f"{name}-{TOKEN}")
        (tmp_path / name).chmod(0o600)
    return Access(token_file=tmp_path / "run", operator_token_file=tmp_path / "operators")


def shown(access: Access, address: str = "127.0.0.1:7070", *, operates: bool = False) -> str:
    return dict(access.metadata(address, operates=operates)).get("authorization", "")


def test_operators_show_their_token_where_it_counts(tokens: Access) -> None:
    assert shown(tokens) == f"Bearer run-{TOKEN}"
    assert shown(tokens, operates=True) == f"Bearer operators-{TOKEN}"


def test_a_single_token_is_shown_for_everything(tokens: Access) -> None:
    run = Access(token_file=tokens.token_file)
    operators = Access(operator_token_file=tokens.operator_token_file)

    assert shown(run, operates=True) == f"Bearer run-{TOKEN}"
    assert shown(operators) == f"Bearer operators-{TOKEN}"
    assert shown(Access()) == ""


def test_a_token_is_not_sent_to_another_host_in_the_clear(tokens: Access, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unencrypted: pass --tls DIR"):
        shown(tokens, "alpha:7070")

    assert shown(Access(token_file=tokens.token_file, insecure=True), "alpha:7070")
    assert shown(Access(token_file=tokens.token_file, tls_dir=tmp_path), "alpha:7070")


def test_neither_flags_nor_text_hold_a_token(tokens: Access, tmp_path: Path) -> None:
    given = Access(token=TOKEN, tls_dir=tmp_path)
    config = ServeConfig(run_id="7f3a", run_dir=str(tmp_path), access=given)

    assert TOKEN not in repr(config)
    assert TOKEN not in " ".join(as_flags(config))
    assert given.run_token == TOKEN.encode()


def test_workers_get_files_by_their_whole_path_and_no_operators_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config(
        ["run", "--tls", "certs", "--token-file", "run", "train.py"],
        {"ANDON_OPERATOR_TOKEN_FILE": "operators"},
    )
    environment = worker_environment(
        config,
        0,
        base={"ANDON_OPERATOR_TOKEN_FILE": "operators"},
        line={"ANDON_ADDRESS": "", "ANDON_RUN_ID": "7f3a", "ANDON_RUN_DIR": ""},
        master_port=1,
    )

    assert environment["ANDON_TLS_DIR"] == str(tmp_path / "certs")
    assert environment["ANDON_TOKEN_FILE"] == str(tmp_path / "run")
    assert "ANDON_OPERATOR_TOKEN_FILE" not in environment


def test_the_environment_names_them_too() -> None:
    environment = {
        "ANDON_TLS_DIR": "certs",
        "ANDON_TOKEN": TOKEN,
        "ANDON_OPERATOR_TOKEN_FILE": "operators",
    }

    access = read_schema(DrainConfig, [], environment).settings.access

    assert access == Access(
        tls_dir=Path("certs"), token=TOKEN, operator_token_file=Path("operators")
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--bind", "0.0.0.0"],
        ["run", "--join", "alpha:7070", "train.py"],
        ["run", "--bind", "0.0.0.0", "train.py"],
        [
            *("serve", "--role", "reducer", "--coordinator", "127.0.0.1:7070"),
            *("--secret-file", "s", "--bind", "0.0.0.0"),
        ],
    ],
    ids=["serve", "join", "run", "reducer"],
)
def test_beyond_loopback_nothing_starts_in_the_clear(argv: list[str]) -> None:
    with pytest.raises(UsageError, match=r"--tls DIR \(`andon certs HOST"):
        read_config(argv, {})

    read_config([*argv[:1], "--tls", "certs", *argv[1:]], {})
    read_config(argv, {"ANDON_INSECURE": "1"})
