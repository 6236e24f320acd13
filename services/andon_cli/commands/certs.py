"""`andon certs`: makes a private CA, and a certificate for each host of a small cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from andon.host.errors import CommandError, ExitCode
from andon.host.tls import CA, CERTIFICATE, KEY
from andon_cli.questions import CertsConfig

__all__ = ["make_certificates"]


@dataclass(frozen=True, slots=True)
class _Host:
    """A host whose certificate was made, or is there already."""

    host: str
    folder: Path
    made: bool
    until: datetime | None
    """When it expires; None: what is there can't be read."""

    def __str__(self) -> str:
        """One line for people."""
        if not self.made:
            return f"kept  {self.folder}: --renew makes it anew"
        return f"made  {self.folder}/{CERTIFICATE}, {KEY}, {CA}: valid until {self.until:%Y-%m-%d}"

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        until = None if self.until is None else f"{self.until:%Y-%m-%d}"
        return {
            "host": self.host, "folder": str(self.folder), "made": self.made, "valid_until": until,
        }  # fmt: skip


def make_certificates(config: CertsConfig) -> int:
    """Makes what is missing, and says so. Replaces a key only with `--renew`.

    Raises:
        CommandError: the library is missing, or what is there can't be used.
    """
    try:
        from andon_cli.commands.authority import Authority, expiry_of
    except ImportError as error:
        raise CommandError(
            "`andon certs` needs the library cryptography, which is not installed "
            f"({error}): pip install 'andon[certs]'"
        ) from error
    now, out = datetime.now(UTC), config.settings.out
    hosts: list[_Host] = []
    try:
        authority, is_new = Authority.in_folder(out / "ca", now)
        for host in config.hosts:
            folder = out / host
            made = config.settings.renew or not (folder / KEY).exists()
            until: datetime | None
            if made:
                until = authority.certify(host, folder, now=now, days=config.settings.days)
            else:
                until = expiry_of(folder / CERTIFICATE)
            hosts.append(_Host(host, folder, made, until))
    except OSError as error:
        raise CommandError(
            f"{error.filename} can't be written ({error.strerror}): choose another --out"
        ) from error
    # Only now: who reads the first line alone gets all certificates, too.
    if config.settings.format == "json":
        ca = {"folder": f"{out}/ca", "made": is_new}
        print(json.dumps({"authority": ca, "hosts": [each.fields() for each in hosts]}))
        return ExitCode.COMPLETE
    if is_new:
        print(f"made  {out}/ca/ca.crt, ca.key: keep the key on this host")
    for each in hosts:
        print(each)
    return ExitCode.COMPLETE
