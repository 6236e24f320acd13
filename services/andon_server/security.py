"""Security: how this process shows who it is, and whom it lets in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from andon.host.run_token import TokenError, bearer_metadata, read_token
from andon.host.tls import host_of, is_loopback
from andon_server.errors import UsageError

if TYPE_CHECKING:
    from andon_cli.settings import Settings

__all__ = ["CLEAR", "Access", "Metadata", "access_of", "in_the_clear"]

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Certificates and tokens of one process; tokens are read when they are used."""

    tls: Path | None = None
    """The folder of certificates; None: what is sent is not encrypted."""
    token_file: Path | None = None
    """Holds the run's token."""
    operator_token_file: Path | None = None
    """Holds the token of those who may halt, resume and drain."""
    token_text: str = field(default="", repr=False)
    """The run's token itself, from ANDON_TOKEN; a file beats it."""
    insecure: bool = False
    """Whether tokens may travel beyond loopback without encryption."""

    @property
    def run_token(self) -> bytes:
        """The run's token; empty: there is none.

        Raises:
            UsageError: it can't be read, or could be guessed.
        """
        return _token(self.token_file, self.token_text, "token")

    @property
    def operator_token(self) -> bytes:
        """The operators' token; empty: there is none.

        Raises:
            UsageError: as for `run_token`.
        """
        return _token(self.operator_token_file, "", "operator-token")

    def flags(self) -> list[tuple[str, object]]:
        """The flags that say the same; the token itself is never one."""
        return [
            ("--tls", self.tls),
            ("--token-file", self.token_file),
            ("--operator-token-file", self.operator_token_file),
        ]

    def environment(self) -> dict[str, str]:
        """The variables that hand it to workers, who are no operators."""
        given: dict[str, str] = {}
        if self.tls is not None:
            given["ANDON_TLS_DIR"] = str(self.tls.absolute())
        if self.token_file is not None:
            given["ANDON_TOKEN_FILE"] = str(self.token_file.absolute())
        elif self.token_text:
            given["ANDON_TOKEN"] = self.token_text
        return given

    def metadata(self, address: str, *, operates: bool = False) -> Metadata:
        """What a call to `address` shows: the run's token or the operators', as it has them.

        Raises:
            UsageError: a token can't be read, or would be sent for everybody to read.
        """
        run, operator = self.run_token, self.operator_token
        token = (operator or run) if operates else (run or operator)
        if token and self.tls is None and not (is_loopback(host_of(address)) or self.insecure):
            raise UsageError(
                f"the token would go to {address} for everybody on the way to read: pass --tls DIR "
                "(make it with `andon certs`), or accept that with --insecure"
            )
        return bearer_metadata(token)


CLEAR = Access()
"""No certificates and no tokens."""


def access_of(settings: Settings) -> Access:
    """What the flags and the environment give this process."""
    return Access(
        tls=settings.path("tls_dir"),
        token_file=settings.path("token_file"),
        operator_token_file=settings.path("operator_token_file"),
        token_text=settings.text("token"),
        insecure=settings.switch("insecure"),
    )


def in_the_clear(what: str) -> UsageError:
    """The refusal of something that other hosts could listen to; `what` says what it is."""
    return UsageError(
        f"{what}: encrypt it with --tls DIR (`andon certs HOST...` makes the certificates), or "
        "accept an unencrypted line with --insecure, on a network that you trust"
    )


def _token(path: Path | None, text: str, name: str) -> bytes:
    variable = f"ANDON_{name.replace('-', '_').upper()}"
    try:
        return read_token(path, text, file_setting=f"--{name}-file", text_setting=variable)
    except TokenError as error:
        raise UsageError(str(error)) from error
