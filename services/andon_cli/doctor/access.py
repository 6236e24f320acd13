"""Access: whether certificates and tokens can be used, and by whom else."""

from __future__ import annotations

import time
from pathlib import Path

from andon.host.access import Access
from andon.host.errors import UsageError
from andon.host.tls import KEY, TlsError, read_identity, readable_by_others
from andon.host.tls_diagnosis import check_own_certificate
from andon_cli.doctor.findings import Finding, fail, ok, warn

__all__ = ["check_access"]

_DAY_S = 86_400
_SOON_DAYS = 14


def check_access(access: Access) -> list[Finding]:
    """What is wrong with the certificates and tokens that were given; nothing if none were."""
    findings = [] if access.tls_dir is None else _certificates(access.tls_dir)
    for name, path in (
        ("token", access.token_file),
        ("operator token", access.operator_token_file),
    ):
        if path is not None:
            findings.append(_token(name, path, access))
    return findings


def _certificates(folder: Path) -> list[Finding]:
    try:
        identity = read_identity(folder)
    except TlsError as error:
        return [fail("tls", f"{folder} can't be used", str(error))]
    findings = []
    if identity.key is not None and readable_by_others(folder / KEY):
        findings.append(
            warn("tls", f"every user may read {folder / KEY}", f"chmod 600 {folder / KEY}")
        )
    if identity.pair is None or identity.ca is None:
        lacks = "tls.crt" if identity.pair is None else "ca.crt"
        why = f"{folder} has no {lacks}: it does for {'clients' if identity.ca else 'servers'} only"
        return [*findings, warn("tls", why, "make all three files with `andon certs`")]
    own = check_own_certificate(folder)
    if own.problem:
        return [*findings, fail("tls", own.problem, "see docs/security.md")]
    days = int(((own.valid_until_s or 0.0) - time.time()) // _DAY_S)
    said = f"{folder} holds a certificate and its CA, valid for {days} more days"
    if days < _SOON_DAYS:
        return [*findings, warn("tls", said, "make new ones with `andon certs --renew`")]
    return [*findings, ok("tls", said)]


def _token(name: str, path: Path, access: Access) -> Finding:
    try:
        _ = access.run_token if name == "token" else access.operator_token
    except UsageError as error:
        return fail(name, f"{path} can't be used", str(error))
    if readable_by_others(path):
        return warn(name, f"every user may read {path}", f"chmod 600 {path}")
    return ok(name, f"{path} holds one")
