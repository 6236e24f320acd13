"""The encrypted form of `docker compose up`: it makes certificates, and trains with them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import pytest

from containers.engine import Engine
from containers.stack import TLS, Stack

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

STEPS = 40
LINE = ("127.0.0.1", 7070)


@pytest.fixture(scope="module")
def encrypted(daemon: Engine) -> Iterator[Stack]:
    """A project of its own, which is removed in the end with its volumes."""
    made = Stack(engine=daemon, name="encrypted", files=TLS)
    yield made
    made.down("--volumes", "--timeout", "5")


def test_the_tls_form_trains_to_its_end_with_certificates_of_its_own(encrypted: Stack) -> None:
    parts = ("andon", "trainer", "prometheus")
    encrypted.up(*parts, ANDON_SCRIPT="code/train.py", ANDON_STEPS=str(STEPS))
    encrypted.wait(encrypted.trainers_ended, "the trainers to end")

    assert [each.state["ExitCode"] for each in encrypted.containers("trainer")] == [0, 0]
    status = encrypted.status()
    assert (status["state"], status["step"]) == ("COMPLETE", STEPS)
    inside = encrypted.engine.inside
    shown = inside.call(lambda: ssl.get_server_certificate(LINE))
    assert shown.strip() in (encrypted.volume("certs-andon") / "tls.crt").read_text()
    encrypted.wait(
        lambda: encrypted.targets() == [("", "up", "")],
        lambda: f"the service at Prometheus, not {encrypted.targets()}",
    )
    assert inside.call(_first_answer_without_a_certificate) == b""


def _first_answer_without_a_certificate() -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(LINE, timeout=10)
    with context.wrap_socket(plain) as stranger:
        # In TLS 1.3 a client's handshake ends before the server knows that it has no certificate.
        # A server that took it in would begin with its settings.
        try:
            return stranger.recv(1)
        except (ssl.SSLError, ConnectionError):
            return b""
