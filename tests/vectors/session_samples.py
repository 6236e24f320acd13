"""Samples of sessions: each kind of message between a rank and the coordinator, or two ranks."""

from __future__ import annotations

import hashlib

from google.protobuf.message import Message

from andon.v1 import session_pb2 as pb
from vectors.names import KEY, TERM, TOKEN

__all__ = ["peer_frames", "session_samples", "session_status"]

_FOLDER = hashlib.sha256(b"a folder").digest()[:16]
_GROUP = 0x0123456789ABCDEF


def _call() -> pb.Call:
    return pb.Call(
        kind=pb.CALL_KIND_REDUCE,
        dtype="float32",
        count=1_000_000,
        reduction="sum",
        root=2,
        tag=0,
        tensors=3,
    )


def _pending() -> pb.PendingCall:
    return pb.PendingCall(
        group_name="default",
        group=_GROUP,
        sequence=17,
        call=_call(),
        open_s=3.25,
        missing=[1, 3],
    )


def _fault() -> pb.RankFault:
    other = _pending()
    other.call.count = 999_999
    return pb.RankFault(
        key=KEY,
        end=pb.SESSION_END_CALLS_DIFFER,
        culprit=1,
        message="rank 1 made another call",
        call=_pending(),
        other_call=other,
        parameter="head.weight",
        element=[4, 3],
        value="nan",
    )


def _over() -> pb.SessionOver:
    return pb.SessionOver(
        key=KEY,
        end=pb.SESSION_END_CALLS_DIFFER,
        culprit=1,
        culprit_node="beta",
        message="rank 1 on beta made another call",
        fault=_fault(),
        reported_by=0,
        halt_id=3,
    )


def session_status() -> pb.SessionStatus:
    """What people see of a session."""
    rank = pb.RankStatus(
        rank=1,
        node_id="beta",
        backend="cuda",
        device="a GPU",
        state=pb.RANK_STATE_IN_CALL,
        steps=118,
        exchange_s=2.5,
        exchange_ratio=0.125,
        bytes=2**40,
        calls=354,
        pending=_pending(),
        silent_s=0.25,
        overflows=1,
        metrics_address="10.0.0.2:9401",
    )
    return pb.SessionStatus(
        key=KEY, world_size=2, awaited=[0], ranks=[rank], age_s=60.5, last=_over(), formed=2
    )


def session_samples() -> list[Message]:
    """The messages; parts come out of wholes."""
    peers = [
        pb.Peer(rank=0, node_id="alpha", address="10.0.0.1:7100", shared_folder=_FOLDER),
        pb.Peer(
            rank=1,
            node_id="beta",
            address="[fe80::1]:7100",
            token_to=TOKEN,
            token_from=TOKEN[::-1],
        ),
    ]
    return [
        pb.Attend(
            run_id="7f3a",
            node_id="alpha",
            rank=1,
            world_size=2,
            incarnation=_GROUP,
            protocol_version=1,
            capabilities=["crc32c.v1", "session-memory.v1"],
            token=b"secret",
            address=":7100",
            shared_folder=_FOLDER,
            process_host=_FOLDER,
            process_id=4711,
            backend="cuda",
            device="a GPU",
            metrics_address="10.0.0.1:9401",
            greatest_term=TERM,
        ),
        pb.RankReport(
            key=KEY,
            steps=118,
            exchange_s=2.5,
            bytes=2**40,
            calls=354,
            pending=_pending(),
            numbers=[pb.NamedNumber(name="loss", step=118, value=2.5)],
            overflows=1,
            number=41,
        ),
        _fault(),
        pb.EndAttendance(key=KEY, done=True),
        pb.SessionFormed(
            key=KEY, peers=peers, capabilities=["crc32c.v1"], lease_s=3.0, report_s=1.0
        ),
        _over(),
        pb.RankReportAnswer(number=41),
        pb.PeerFrame(
            group=_GROUP,
            sequence=17,
            begin=pb.Begin(call=_call(), rank=1, receives=True, gives_bytes=4_000_000),
            crc32c=0x89ABCDEF,
        ),
        pb.Piece(stage=1, offset=2**33, length=4 * 2**20),
        pb.LaneEnd(),
    ]


def peer_frames() -> dict[str, pb.PeerFrame]:
    """Heads of frames between ranks, by what they show."""
    send = pb.Call(kind=pb.CALL_KIND_SEND, dtype="int64", count=3, tag=5, tensors=1)
    piece = pb.Piece(stage=1, offset=2**33, length=4 * 2**20)
    return {
        "send": pb.PeerFrame(group=_GROUP, begin=pb.Begin(call=send, rank=1, gives_bytes=24)),
        "piece": pb.PeerFrame(group=_GROUP, sequence=17, piece=piece),
        "lane_end": pb.PeerFrame(lane_end=pb.LaneEnd()),
    }
