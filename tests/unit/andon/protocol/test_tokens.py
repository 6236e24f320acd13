"""Tokens: each is valid for whom it was made, and for nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from andon.protocol import tokens
from andon.protocol.records import Key
from unit.andon.golden import by_name, golden

SECRET = b"a secret of one service process"
KEY = Key(7 << 32 | 5, 3)


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
def test_bytes_that_are_no_token_do_not_verify(token: bytes) -> None:
    assert tokens.session_serial(SECRET, "7f3a", 1, token) is None


@pytest.mark.parametrize("worker", [-1, 2**32])
def test_an_impossible_worker_has_no_token(worker: int) -> None:
    assert tokens.session_serial(SECRET, "7f3a", worker, bytes(32)) is None


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        tokens.session_token(b"", "7f3a", 1)


def test_a_proof_is_valid_for_one_challenge_address_and_secret() -> None:
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


def test_the_serial_of_a_token_can_be_read_and_not_changed() -> None:
    token = tokens.session_token(SECRET, "7f3a", 1, (2**64 - 1, 7))
    forged = (8).to_bytes(8, "little")

    assert tokens.session_serial(SECRET, "7f3a", 1, token) == (2**64 - 1, 7)
    assert tokens.session_serial(SECRET, "7f3a", 1, token[:8] + forged + token[16:]) is None
    assert tokens.session_serial(SECRET, "7f3a", 2, token) is None


def test_a_link_token_is_valid_for_one_round_and_two_workers() -> None:
    secret = b"secret"
    given = {
        tokens.link_token(secret, "7f3a", key, sender, receiver)
        for key in (KEY, Key(KEY.term, KEY.round + 1))
        for sender, receiver in ((0, 1), (1, 0), (0, 2))
    }

    assert len(given) == 6
    assert tokens.link_token(secret, "7f3a", KEY, 0, 1) in given
    with pytest.raises(ValueError, match="empty"):
        tokens.link_token(b"", "7f3a", KEY, 0, 1)


@pytest.mark.parametrize("case", golden("peers", "tokens"), ids=by_name)
def test_a_peer_token_and_its_nonce_are_as_the_vector_says(case: dict[str, Any]) -> None:
    key = Key(int(case["term"]), int(case["round"]))
    secret, pair = bytes.fromhex(case["secret"]), (case["sender"], case["receiver"])

    token = tokens.peer_token(secret, case["run_id"], key, *pair)

    assert token.hex() == case["token"]
    assert tokens.peer_nonce(token).hex() == case["nonce"]
    with pytest.raises(ValueError, match="empty"):
        tokens.peer_token(b"", case["run_id"], key, *pair)
