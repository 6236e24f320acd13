"""Session tokens: a worker's own, and nobody else's."""

from __future__ import annotations

import pytest

from andon.protocol import tokens

SECRET = b"a secret of one service process"


def test_an_issued_token_verifies() -> None:
    token = tokens.session_token(SECRET, "7f3a", 1)

    assert len(token) == 48
    assert tokens.session_serial(SECRET, "7f3a", 1, token) is not None


@pytest.mark.parametrize(
    ("secret", "run_id", "worker"),
    [(b"another", "7f3a", 1), (SECRET, "7f3b", 1), (SECRET, "7f3a", 2)],
)
def test_a_token_of_another_secret_run_or_worker_does_not_verify(
    secret: bytes, run_id: str, worker: int
) -> None:
    token = tokens.session_token(secret, run_id, worker)

    assert tokens.session_serial(SECRET, "7f3a", 1, token) is None


@pytest.mark.parametrize("token", [b"", bytes(32), bytes(31), b"\xff" * 1000])
def test_what_is_no_token_does_not_verify(token: bytes) -> None:
    assert tokens.session_serial(SECRET, "7f3a", 1, token) is None


@pytest.mark.parametrize("worker", [-1, 2**32])
def test_a_worker_that_can_not_be_has_no_token(worker: int) -> None:
    assert tokens.session_serial(SECRET, "7f3a", worker, bytes(32)) is None


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        tokens.session_token(b"", "7f3a", 1)


def test_a_proof_holds_for_its_challenge_address_and_secret_alone() -> None:
    challenge = bytes(range(32))
    proof = tokens.reducer_proof(b"a secret", challenge, "beta:7071")

    assert tokens.is_reducer_proof(b"a secret", challenge, "beta:7071", proof)
    assert not tokens.is_reducer_proof(b"a secret", bytes(32), "beta:7071", proof)
    assert not tokens.is_reducer_proof(b"a secret", challenge, "beta:7072", proof)
    assert not tokens.is_reducer_proof(b"another", challenge, "beta:7071", proof)
    assert not tokens.is_reducer_proof(b"a secret", challenge, "beta:7071", b"")


def test_an_empty_secret_proves_nothing() -> None:
    with pytest.raises(ValueError, match="empty"):
        tokens.reducer_proof(b"", bytes(32), "beta:7071")


def test_a_tokens_serial_can_be_told_and_not_be_changed() -> None:
    token = tokens.session_token(SECRET, "7f3a", 1, (2**64 - 1, 7))
    forged = (8).to_bytes(8, "little")

    assert tokens.session_serial(SECRET, "7f3a", 1, token) == (2**64 - 1, 7)
    assert tokens.session_serial(SECRET, "7f3a", 1, token[:8] + forged + token[16:]) is None
    assert tokens.session_serial(SECRET, "7f3a", 2, token) is None
