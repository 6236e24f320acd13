"""Announcements of a coordinator as messages of a registration's stream, and back."""

from __future__ import annotations

from andon.protocol.announcements import (
    Announcement,
    RoundOpening,
    Session,
    SessionsRevoked,
    TransferOpening,
)
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.wire.conversion import key_to_proto

__all__ = ["announcement_from", "announcement_to"]


def announcement_to(announcement: Announcement) -> pb.RegisterReducerResponse:
    """The message that announces it."""
    match announcement:
        case RoundOpening(key):
            return pb.RegisterReducerResponse(round_opening=pb.RoundOpening(key=key_to_proto(key)))
        case TransferOpening():
            opening = pb.TransferOpening(
                transfer_id=announcement.transfer_id,
                donor=_session_to(announcement.donor),
                joiner=_session_to(announcement.joiner),
                beside_training=announcement.beside_training,
                holds_up=announcement.holds_up,
            )
            return pb.RegisterReducerResponse(transfer_opening=opening)
        case SessionsRevoked(least):
            revoked = pb.SessionsRevoked(least=_session_to(least))
            return pb.RegisterReducerResponse(sessions_revoked=revoked)


def announcement_from(message: pb.RegisterReducerResponse) -> Announcement | None:
    """What a message announces; None: it is no announcement that this version knows."""
    match message.WhichOneof("message"):
        case "round_opening":
            key = message.round_opening.key
            return RoundOpening(Key(key.term, key.round))
        case "transfer_opening":
            opening = message.transfer_opening
            return TransferOpening(
                opening.transfer_id,
                _session_from(opening.donor),
                _session_from(opening.joiner),
                opening.beside_training,
                opening.holds_up,
            )
        case "sessions_revoked":
            return SessionsRevoked(_session_from(message.sessions_revoked.least))
        case _:
            return None


def _session_to(session: Session) -> pb.Session:
    term, number = session.serial
    return pb.Session(worker=session.worker, term=term, number=number)


def _session_from(message: pb.Session) -> Session:
    return Session(message.worker, (message.term, message.number))
