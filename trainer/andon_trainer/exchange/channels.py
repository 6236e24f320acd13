"""Channels: how a worker connects to other processes of its line.

Three things are the same for every connection: gRPC's options, that children forked by the script
do not keep it open, and how to find out whether certificates are why it fails.

Theory of operation of forks. The prepared loader's processes start before any connection exists.
Those of other loaders fork while this worker is on the line, and inherit its sockets: Python's own,
and those of older gRPC. A connection ends for the other side only when the last process that holds
it is gone. So as long as such a child lives, the line would not notice this worker's death, and its
ports would stay taken. Each child therefore closes what it inherited of the line's.

Nothing of gRPC may run in a child either: its threads are not there, and the locks that they held
stay locked. A child uses none of it, but collecting garbage might; so what it inherited is never
collected. And gRPC's own handlers of forks, which abort such children, are not there: see the
package's `__init__`.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

import grpc

import andon.host.tls
from andon.host.keepalive import Keepalive, Options
from andon.host.tls import TlsError
from andon.host.tls_diagnosis import diagnose_tls
from andon.protocol.limits import MAX_MESSAGE_BYTES

__all__ = ["close_in_children", "is_here", "open_channel", "tls_trouble"]


def open_channel(address: str, tls: Path | None = None, options: Options = ()) -> grpc.Channel:
    """Opens a channel with a connection of its own, so that bulk never delays control.

    Args:
        address: as host:port.
        tls: the folder of certificates to encrypt with; None: the channel is not encrypted.
        options: more of gRPC's.

    Raises:
        TlsError: the folder can't be used.
    """
    # First: a child that is forked while the connection is made must know its port.
    close_in_children(address)
    return andon.host.tls.open_channel(
        address,
        (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.enable_retries", 0),
            *Keepalive().client_options(),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            *options,
        ),
        tls,
    )


def tls_trouble(error: grpc.RpcError | TlsError, address: str, tls: Path | None) -> str:
    """Finds out whether TLS is why a call failed.

    gRPC often says only UNAVAILABLE. Then this tries a handshake itself, which may take seconds.

    Args:
        error: why the call failed.
        address: where the call went, as host:port.
        tls: the folder of certificates; None: this worker does not encrypt.

    Returns:
        Whose fault it is, the fact and the remedy; empty if TLS is not the reason.
    """
    if isinstance(error, TlsError):
        return str(error)
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return ""
    return diagnose_tls(address, tls)


_DESCRIPTORS = Path("/dev/fd")

_ports: set[int] = set()
"""The ports of the line's connections, at either end."""


def is_here(address: str) -> bool:
    """Whether a host:port is one of this host's own addresses. Nothing is sent."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):
        family, kind, protocol, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connecting a datagram socket only picks the route: to itself, a host uses the address
            # that it is reached by.
            probe.connect(place)
            return bool(probe.getsockname()[0] == place[0])
    return False


def close_in_children(address: str) -> None:
    """Makes children that are forked from now on close connections with this port at either end."""
    port = address.rpartition(":")[2]
    if not port.isdecimal():
        return  # Without a port there is no connection.
    # Once: what is registered at a fork can't be taken back.
    if not _ports:
        os.register_at_fork(after_in_child=_forget_the_line)
    _ports.add(int(port))


def _forget_the_line() -> None:
    gc.freeze()  # First: closing runs Python code, and a collection must not meet gRPC's objects.
    for entry in os.listdir(_DESCRIPTORS):
        descriptor = int(entry)
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _ports & _ports_of(descriptor):
                os.close(descriptor)
        except OSError:
            continue  # The descriptor of the listing itself, which is closed by now.


def _ports_of(descriptor: int) -> set[int]:
    """The ports at both ends of a socket; none if it is not of TCP or UDP."""
    ports: set[int] = set()
    # Of a copy: the end of the block closes what it was given.
    with socket.socket(fileno=os.dup(descriptor)) as probe:
        if probe.family not in (socket.AF_INET, socket.AF_INET6):
            return ports
        ports.add(probe.getsockname()[1])
        with suppress(OSError):  # A listening socket has no peer.
            ports.add(probe.getpeername()[1])
    return ports
