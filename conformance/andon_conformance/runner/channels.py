"""Channels: the only place where the conformance suite reaches a server."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio

from andon.host.tls import TlsError, open_aio_channel
from andon_server.errors import UsageError
from andon_server.security import CLEAR, Access, Metadata

__all__ = ["Reach"]

_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where a server is, and what it has to be shown."""

    address: str
    """As host:port."""
    access: Access = CLEAR
    """Certificates and tokens."""

    def channel(self, address: str = "") -> grpc.aio.Channel:
        """A connection of its own, to another address if one is given: bulk must not delay control,
        nor one worker another.

        Raises:
            UsageError: the certificates can't be used.
        """
        try:
            return open_aio_channel(address or self.address, _OPTIONS, self.access.tls)
        except TlsError as error:
            raise UsageError(str(error)) from error

    @property
    def metadata(self) -> Metadata:
        """What an operator's call shows.

        Raises:
            UsageError: a token can't be read, or would be sent for everybody to read.
        """
        return self.access.metadata(self.address, operates=True)
