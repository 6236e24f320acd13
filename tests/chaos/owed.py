"""What a line owes after each record: positions that a late worker computes, and no record has yet.

An independent implementation of the rule. A round's work is what was owed and its batch; its record
covers the shares of its roster, and the rest is owed from then on. So each position is in one
record, or owed. Each sample moves the weights as much, whichever record it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from andon.protocol.records import PositionRange
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.transport.reader import JournalEntry
from chaos.model import Task
from chaos.schedules import LineSchedule
from chaos.windows import Logs

__all__ = ["Owed", "judge_owed", "most_left_out"]


@dataclass
class Owed:
    """What is owed, from one record to the next."""

    task: Task
    schedule: LineSchedule
    positions: set[int] = field(default_factory=set)

    def scale(self, entry: JournalEntry) -> float:
        """What the mean change of a record is multiplied with; takes its shares away.

        It is the part that its shares have of a window. At the end of an epoch, and wherever else
        nothing may stay owed, there may be less than a window to take.

        Raises:
            AssertionError: a share is no part of the round's work, or the scale is another one.
        """
        result = entry.result
        assert result is not None
        work, covered = self.positions | _all([result.batch]), _covered(result)
        assert covered <= work, f"step {entry.record.step}: {sorted(covered - work)[:5]}: no work"
        self.positions = work - covered
        window = self.schedule.local_steps * self.task.batch
        right = {len(covered) / window}
        if not self.positions:
            right.add(len(covered) / min(len(work), window))
        scale = result.change_scale
        assert scale in right, f"step {entry.record.step}: scaled by {scale}, not by {right}"
        return scale


def judge_owed(
    chain: Iterable[JournalEntry], task: Task, schedule: LineSchedule, logs: Logs
) -> None:
    """Judges what is owed after each record, and the weight of each window."""
    told: dict[tuple[int, int], set[float]] = {}
    for log in logs.values():
        for event in log:
            if event["event"] in ("assigned", "attending"):
                told.setdefault(tuple(event["key"]), set()).add(event.get("change_scale", 1.0))
    owed = Owed(task, schedule)
    for entry in chain:
        record, where = entry.record, f"step {entry.record.step}"
        if entry.result is not None:
            scale = owed.scale(entry) if schedule.quorum else 1.0
            given = told.get((record.key.term, record.key.round), set())
            assert given <= {scale}, f"{where}: the change is scaled by {given}, not by {scale}"
        assert _all(record.cursor.owed) == owed.positions, f"{where}: {record.cursor.owed}"
        assert record.cursor.position or not owed.positions, f"{where} ends an epoch that owes"


def most_left_out(logs: Logs) -> int:
    """The greatest number of consecutive records that a worker attended since it was in one."""
    most = 0
    for log in logs.values():
        missed = 0
        for event in log:
            if event["event"] == "applied":
                missed = missed + 1 if event["attends"] else 0
            elif event["event"] in ("start", "installed"):
                missed = 0
            most = max(most, missed)
    return most


def _covered(result: StepResult) -> set[int]:
    return _all([each for part in result.contributions for each in part.positions])


def _all(ranges: Sequence[PositionRange]) -> set[int]:
    return {at for each in ranges for at in range(each.start, each.stop)}
