"""The run's token: from a file or a text, never guessable, never shown."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from andon.host.run_token import TokenError, bearer_metadata, is_same_token, read_token

TOKEN = "a-token-of-24-characters"


def read(path: Path | None, text: str = "") -> bytes:
    return read_token(path, text, file_setting="--token-file", text_setting="ANDON_TOKEN")


def test_white_space_around_a_token_is_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f" {TOKEN}\n")
    file.chmod(0o600)

    assert read(file) == TOKEN.encode() == read(None, TOKEN)


def test_a_file_beats_a_text(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)

    assert read(file, "x" * 40) == TOKEN.encode()


def test_no_file_and_no_text_is_no_token() -> None:
    assert read(None) == b""
    assert bearer_metadata(b"") == ()


@pytest.mark.parametrize("content", ["", "\n", "fifteen-letters"])
def test_a_short_token_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)

    with pytest.raises(TokenError, match=r"--token-file .*must hold 16 or more") as caught:
        read(file)

    assert not content.strip() or content not in str(caught.value)


@pytest.mark.parametrize("content", ["sixteen letters and spaces", "ä" * 20, "line\nline" * 4])
def test_a_token_that_metadata_can_not_carry_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content, encoding="utf-8")

    with pytest.raises(TokenError, match=r"metadata can.t carry"):
        read(file)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match=r"can't be read \(No such file.*openssl rand"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_every_user_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        read(file)

    assert bool(caplog.records) is warned
    assert TOKEN not in caplog.text


def test_an_empty_token_never_matches() -> None:
    assert not is_same_token(b"", b"")
    assert not is_same_token(b"other", TOKEN.encode())
    assert is_same_token(TOKEN.encode(), TOKEN.encode())
