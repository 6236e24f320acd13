"""ReportLanes on the wire: what one end of a call asks about its TCP lanes, and what it is told.

A ring's ReportLane has the same bytes: its messages have the first fields of the same numbers.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from andon.protocol.messages import LaneReport
from andon.v1 import reducer_pb2
from andon.wire.fields import FrameError

__all__ = [
    "REDUCER_METHOD",
    "RING_METHOD",
    "frame_asked",
    "frame_report",
    "read_asked",
    "read_report",
]

REDUCER_METHOD = "/andon.v1.Reducer/ReportLanes"
RING_METHOD = "/andon.v1.Ring/ReportLane"


def frame_asked(nonce: bytes) -> bytes:
    """The question about the lanes of an offer."""
    return reducer_pb2.ReportLanesRequest(nonce=nonce).SerializeToString()


def read_asked(data: bytes) -> bytes:
    """The nonce of a question.

    Raises:
        FrameError: it is not one.
    """
    try:
        return reducer_pb2.ReportLanesRequest.FromString(data).nonce
    except DecodeError:
        raise FrameError("not a ReportLanesRequest") from None


def frame_report(report: LaneReport) -> bytes:
    """The answer."""
    return reducer_pb2.ReportLanesResponse(
        received_bytes=report.received_bytes,
        reading=report.reading,
        sent_bytes=report.sent_bytes,
        connections=report.connections,
    ).SerializeToString()


def read_report(data: bytes) -> LaneReport:
    """What an answer says.

    Raises:
        FrameError: it is not one.
    """
    try:
        said = reducer_pb2.ReportLanesResponse.FromString(data)
    except DecodeError:
        raise FrameError("not a report of lanes") from None
    return LaneReport(said.received_bytes, said.reading, said.sent_bytes, said.connections)
