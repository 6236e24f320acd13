"""Certificates for tests, made as `andon certs` makes them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from andon_cli.commands.authority import Authority

__all__ = ["certify"]


def certify(ca: Path, folder: Path, host: str = "alpha", *, expired: bool = False) -> Path:
    """A folder with a certificate for `host` of the CA kept in `ca`, which is made if need be."""
    now = datetime.now(UTC)
    authority, _ = Authority.in_folder(ca, now)
    began = now - timedelta(days=10) if expired else now
    authority.certify(host, folder, now=began, days=5)
    return folder
