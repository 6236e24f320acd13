"""What Linux says of a connection that sends: how much the other end has, and how long it took."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LaneFlow", "flow_of", "sum_of"]

_TCP_INFO = struct.Struct("=24xI40xI28xI16xQ40xQ52xI")
"""Of struct tcp_info: unacked, rtt, total_retrans, bytes_acked, busy_time, snd_wnd."""
_SHUT_BYTES = 2**16
"""A window below it is shut, or about to be: the other end holds back."""


@dataclass(frozen=True, slots=True)
class LaneFlow:
    """The sending side of connections, since they were opened."""

    acked_bytes: int
    """Of all of them together."""
    busy_s: float
    """How long the busiest of them had bytes under way."""
    rtt_s: float
    """The longest round trip."""
    lost: int
    """How many packets were sent again."""
    shut: bool
    """Whether the other end takes nothing on one of them now."""


def flow_of(connection: socket.socket) -> LaneFlow | None:
    """What the kernel says of a connection; None: it says nothing."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        unacked, rtt, lost, acked, busy, window = _TCP_INFO.unpack(found)
    except (OSError, struct.error):
        return None
    shut = bool(unacked) and window < _SHUT_BYTES
    return LaneFlow(acked, busy / 1e6, rtt / 1e6, lost, shut)


def sum_of(flows: Sequence[LaneFlow | None]) -> LaneFlow | None:
    """Several connections as one; None if the kernel says nothing of one of them."""
    known = [each for each in flows if each is not None]
    if not known or len(known) < len(flows):
        return None
    return LaneFlow(
        acked_bytes=sum(each.acked_bytes for each in known),
        busy_s=max(each.busy_s for each in known),
        rtt_s=max(each.rtt_s for each in known),
        lost=sum(each.lost for each in known),
        shut=any(each.shut for each in known),
    )
