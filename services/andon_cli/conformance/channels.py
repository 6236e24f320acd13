"""Channels: the only place where the conformance suite reaches a server."""

from __future__ import annotations

import grpc.aio

__all__ = ["open_channel"]


def open_channel(address: str) -> grpc.aio.Channel:
    """A connection of its own: bulk must not delay control, nor one worker another."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(address, options=options)
