"""Which failed handshake a line of gRPC's tells of."""

from __future__ import annotations

import pytest

from andon_server.handshakes import HandshakeFailure, failure_of

_BY_GRPC = (
    "I1122 01:11:38.486440    7222 ssl_transport_security.cc:2563] "
    "Handshake failed with error SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
)


@pytest.mark.parametrize(
    ("written", "failure"),
    [
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "certificate_expired"),
        ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "certificate_not_yet_valid"),
        (
            "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
            "certificate_untrusted",
        ),
        ("CERTIFICATE_VERIFY_FAILED: unsupported certificate purpose", "certificate_untrusted"),
        (
            "PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate verification context",
            "certificate_missing",
        ),
        ("HTTP_REQUEST: Invalid certificate verification context", "not_tls"),
        ("WRONG_VERSION_NUMBER: Invalid certificate verification context", "not_tls"),
        ("TLSV1_ALERT_UNKNOWN_CA: Invalid certificate verification context", "refused_by_peer"),
        ("SSLV3_ALERT_BAD_CERTIFICATE: Invalid certificate", "refused_by_peer"),
        ("BAD_PACKET_LENGTH: Invalid certificate verification context", "refused_by_peer"),
        ("EXCESSIVE_MESSAGE_SIZE: Invalid certificate verification context", "other"),
    ],
)
def test_a_failure_is_known_by_what_boringssl_calls_it(written: str, failure: str) -> None:
    assert failure_of((_BY_GRPC + written).encode()) is HandshakeFailure(failure)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"2026-11-22 INFO andon Handshake failed with error SSL_ERROR_SSL: HTTP_REQUEST",
        b"I1122 01:11:38.486440 7222 ssl_transport_security.cc:2563] SSL_ERROR_SSL: HTTP_REQUEST",
        b"I1122 01:11:38.486440 7222 chttp2_server.cc:100] Handshake failed with error 1",
    ],
)
def test_other_lines_tell_of_none(line: bytes) -> None:
    assert failure_of(line) is None
