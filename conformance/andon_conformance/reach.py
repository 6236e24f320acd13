"""How the suite reaches the server under test: its address, certificates and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from andon.host.run_token import TokenError, bearer_metadata, read_token
from andon.host.tls import TlsError, host_of, is_loopback, open_aio_channel
from andon_conformance.errors import UsageError

__all__ = ["Reach"]

_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where a server is, and the credentials that it asks for."""

    address: str
    """As host:port."""
    tls: Path | None = None
    """The folder of certificates; None: no encryption."""
    token_file: Path | None = None
    """Holds the run's token."""
    operator_token_file: Path | None = None
    """Holds the operator's token; None: the run's token serves for both."""
    token_text: str = field(default="", repr=False)
    """The run's token itself; `token_file` wins over it."""
    insecure: bool = False
    """Whether tokens may travel beyond loopback without encryption."""

    def channel(self, address: str = "") -> grpc.aio.Channel:
        """Opens a connection of its own, to `address` if one is given.

        Each worker, and each of its two planes, gets its own connection: bulk data must not delay
        control messages, nor one worker another.

        Raises:
            UsageError: the certificates can't be used.
        """
        try:
            return open_aio_channel(address or self.address, _OPTIONS, self.tls)
        except TlsError as error:
            raise UsageError(str(error)) from error

    @property
    def run_token(self) -> bytes:
        """The run's token; empty: there is none.

        Raises:
            UsageError: it can't be read.
        """
        return _token(self.token_file, self.token_text, "token")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that an operator's call carries.

        Raises:
            UsageError: a token can't be read, or would travel in the clear.
        """
        token = _token(self.operator_token_file, "", "operator-token") or self.run_token
        if token and self.tls is None and not (self.insecure or is_loopback(host_of(self.address))):
            raise UsageError(
                f"the token would travel to {self.address} unencrypted, for anybody to read: pass "
                "--tls DIR, or accept that with --insecure"
            )
        return bearer_metadata(token)


def _token(path: Path | None, text: str, name: str) -> bytes:
    variable = f"ANDON_{name.replace('-', '_').upper()}"
    try:
        return read_token(path, text, file_setting=f"--{name}-file", text_setting=variable)
    except TokenError as error:
        raise UsageError(str(error)) from error
