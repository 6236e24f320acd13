"""Unreachable: whether certificates are why another process can't be reached."""

from __future__ import annotations

from pathlib import Path

import grpc

from andon.host.tls import TlsError
from andon.host.tls_diagnosis import diagnose_tls

__all__ = ["tls_trouble"]


def tls_trouble(error: grpc.RpcError | TlsError, address: str, tls: Path | None) -> str:
    """What is wrong between this worker's certificates and what listens at `address`.

    Asks there, for up to seconds, if gRPC says no more than that it is not available.

    Args:
        error: why a call failed.
        address: where to, as host:port.
        tls: the folder of certificates; None: this worker speaks in the clear.

    Returns:
        Whose fault, the fact and the remedy; empty if TLS is not why.
    """
    if isinstance(error, TlsError):
        return str(error)
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return ""
    return diagnose_tls(address, tls)
