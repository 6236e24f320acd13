"""The last worker is not told of a step's record."""

from __future__ import annotations

from andon.protocol.records import Record, RecordKind
from andon_coordinator.core.board import Board
from andon_coordinator.core.effects import StepResult
from andon_coordinator.core.roster import Member
from conformance.breaking import serve_with

announce = Board.announce


def to_others(board: Board, member: Member, record: Record, result: StepResult | None) -> None:
    before = len(board.effects)
    announce(board, member, record, result)
    if record.kind is RecordKind.STEP and member.worker == max(record.roster):
        del board.effects[before:]


if __name__ == "__main__":
    serve_with((Board, "announce", to_others))
