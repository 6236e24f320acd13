"""Access: the certificates and tokens of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from andon.host.errors import UsageError
from andon.host.run_token import TokenError, bearer_metadata, read_token
from andon.host.settings import EVERYDAY, VARIABLE_ONLY, File
from andon.host.tls import host_of, is_loopback

__all__ = ["CLEAR", "Access", "Metadata", "in_the_clear", "token_of"]

Metadata = tuple[tuple[str, str], ...]


@Parameter(name="*", group=Group("Security", sort_key=4))
@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Certificates and tokens of one process. Token files are read when they are needed."""

    tls_dir: Annotated[Path | None, Parameter(name="--tls", metavar="DIR", group=EVERYDAY)] = None
    """Encrypt, with tls.crt, tls.key and ca.crt of DIR (`andon certs` makes them)."""
    token_file: File | None = None
    """The file with the run's token, which workers and people have to show."""
    operator_token_file: File | None = None
    """The file with the token for halt, resume and drain. Default: the run's token."""
    viewer_token_file: File | None = None
    """The file with the token that may only look: status, and the board without its buttons."""
    token: Annotated[str, VARIABLE_ONLY] = field(default="", repr=False)
    """The run's token itself. A file overrides it."""
    insecure: bool = False
    """Allow connections to other hosts, and tokens on them, without encryption."""

    @property
    def run_token(self) -> bytes:
        """The run's token; empty if there is none.

        Raises:
            UsageError: it can't be read, or is short enough to be guessed.
        """
        return token_of(self.token_file, self.token, "token")

    @property
    def operator_token(self) -> bytes:
        """The operators' token; empty if there is none.

        Raises:
            UsageError: as for `run_token`.
        """
        return token_of(self.operator_token_file, "", "operator-token")

    @property
    def viewer_token(self) -> bytes:
        """The viewers' token; empty if there is none.

        Raises:
            UsageError: as for `run_token`.
        """
        return token_of(self.viewer_token_file, "", "viewer-token")

    def environment(self) -> dict[str, str]:
        """The variables that hand this to workers. They are not operators."""
        given: dict[str, str] = {}
        if self.tls_dir is not None:
            given["ANDON_TLS_DIR"] = str(self.tls_dir.absolute())
        if self.token_file is not None:
            given["ANDON_TOKEN_FILE"] = str(self.token_file.absolute())
        elif self.token:
            given["ANDON_TOKEN"] = self.token
        return given

    def metadata(self, address: str, *, operates: bool = False) -> Metadata:
        """The metadata of a call to `address`: the run's token, or the operators' if it `operates`.

        Raises:
            UsageError: a token can't be read, or would be sent unencrypted.
        """
        run, operator = self.run_token, self.operator_token
        token = (operator or run) if operates else (run or operator or self.viewer_token)
        if token and self.tls_dir is None and not (is_loopback(host_of(address)) or self.insecure):
            raise UsageError(
                f"the token would go to {address} unencrypted: pass --tls DIR "
                "(make it with `andon certs`), or accept that with --insecure"
            )
        return bearer_metadata(token)


CLEAR = Access()
"""No certificates and no tokens."""


def in_the_clear(what: str) -> UsageError:
    """The refusal of `what`, because other hosts could listen to it."""
    return UsageError(
        f"{what}: encrypt it with --tls DIR (`andon certs HOST...` makes the certificates), or "
        "accept an unencrypted line with --insecure, on a network that you trust"
    )


def token_of(path: Path | None, text: str, name: str) -> bytes:
    """The token in a file, or else the text; empty if there is neither.

    Raises:
        UsageError: it can't be read, or is short enough to be guessed.
    """
    variable = f"ANDON_{name.replace('-', '_').upper()}"
    try:
        return read_token(path, text, file_setting=f"--{name}-file", text_setting=variable)
    except TokenError as error:
        raise UsageError(str(error)) from error
