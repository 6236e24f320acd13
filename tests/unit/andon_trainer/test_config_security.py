"""A worker's certificates, token and consent to be heard by others, from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon_trainer.config import LineConfig

TOKEN = "a-token-of-24-characters"


@pytest.mark.parametrize(
    ("environment", "heard"),
    [
        ({"ANDON_ADDRESS": "127.0.0.1:7070"}, ""),
        ({"ANDON_ADDRESS": "localhost:7070"}, ""),
        ({"ANDON_ADDRESS": "[::1]:7070"}, ""),
        ({"ANDON_ADDRESS": "alpha:7070"}, "the line at alpha:7070 is on another host"),
        ({"ANDON_ADDRESS": "alpha:7070", "ANDON_INSECURE": "1"}, ""),
        ({"ANDON_ADDRESS": "alpha:7070", "ANDON_INSECURE": "0"}, "the line at alpha:7070"),
        ({"ANDON_ADDRESS": "alpha:7070", "ANDON_TLS_DIR": "certs"}, ""),
        ({"ANDON_ADDRESS": "127.0.0.1:7070", "ANDON_RING_BIND": "0.0.0.0"}, "is open to others"),
        ({"ANDON_ADDRESS": "127.0.0.1:7070", "ANDON_RING_BIND": "127.0.0.1:9000"}, ""),
        ({"ANDON_ADDRESS": "127.0.0.1:7070", "ANDON_RING_BIND": "off"}, ""),
        ({}, ""),
    ],
)
def test_what_others_could_hear_is_known_before_anything_is_sent(
    environment: dict[str, str], heard: str
) -> None:
    found = LineConfig.read(environment).heard_by_others

    assert heard in found
    assert bool(found) is bool(heard)


def test_a_token_comes_from_a_file_or_a_text_and_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)

    file = LineConfig.read({"ANDON_TOKEN_FILE": str(tmp_path / "token")})
    text = LineConfig.read({"ANDON_TOKEN": TOKEN})

    assert file.token == text.token == TOKEN.encode()
    assert TOKEN not in repr(file)


def test_a_short_token_and_an_unclear_consent_are_refused() -> None:
    with pytest.raises(ValueError, match="ANDON_TOKEN holds 5 bytes, and 16 are the least"):
        LineConfig.read({"ANDON_TOKEN": "short"})
    with pytest.raises(ValueError, match="ANDON_INSECURE must be 1 or 0, not 'perhaps'"):
        LineConfig.read({"ANDON_INSECURE": "perhaps"})
