"""`andon certs`: makes a private CA, and a certificate for each host of a small cluster."""

from __future__ import annotations

from datetime import UTC, datetime

from andon.host.errors import CommandError, ExitCode
from andon.host.tls import CA, CERTIFICATE, KEY
from andon_cli.questions import CertsConfig

__all__ = ["make_certificates"]


def make_certificates(config: CertsConfig) -> int:
    """Makes what is missing, and says so. Replaces a key only with `--renew`.

    Raises:
        CommandError: the library is missing, or what is there can't be used.
    """
    try:
        from andon_cli.authority import Authority
    except ImportError as error:
        raise CommandError(
            "`andon certs` needs the library cryptography, which is not installed "
            f"({error}): pip install 'andon[certs]'"
        ) from error
    now = datetime.now(UTC)
    try:
        authority, is_new = Authority.in_folder(config.settings.out / "ca", now)
        if is_new:
            print(f"made  {config.settings.out}/ca/ca.crt, ca.key: keep the key on this host")
        for host in config.hosts:
            folder = config.settings.out / host
            if (folder / KEY).exists() and not config.settings.renew:
                print(f"kept  {folder}: --renew makes it anew")
                continue
            until = authority.certify(host, folder, now=now, days=config.settings.days)
            print(f"made  {folder}/{CERTIFICATE}, {KEY}, {CA}: valid until {until:%Y-%m-%d}")
    except OSError as error:
        raise CommandError(
            f"{error.filename} can't be written ({error.strerror}): choose another --out"
        ) from error
    return ExitCode.COMPLETE
