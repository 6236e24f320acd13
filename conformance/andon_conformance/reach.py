"""How the suite reaches the server under test: its address, certificates and tokens."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio

from andon.host.access import CLEAR, Access, Metadata
from andon.host.errors import UsageError
from andon.host.tls import TlsError, open_aio_channel

__all__ = ["Reach"]

_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where a server is, and the credentials that it asks for."""

    address: str
    """As host:port."""
    access: Access = CLEAR
    """Certificates and tokens."""

    def channel(self, address: str = "") -> grpc.aio.Channel:
        """Opens a connection of its own, to `address` if one is given.

        Each worker, and each of its two planes, gets its own connection: bulk data must not delay
        control messages, nor one worker another.

        Raises:
            UsageError: the certificates can't be used.
        """
        try:
            return open_aio_channel(address or self.address, _OPTIONS, self.access.tls_dir)
        except TlsError as error:
            raise UsageError(str(error)) from error

    @property
    def metadata(self) -> Metadata:
        """The metadata that an operator's call carries.

        Raises:
            UsageError: a token can't be read, or would travel in the clear.
        """
        return self.access.metadata(self.address, operates=True)
