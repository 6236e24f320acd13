"""The judge: checks what must hold after any fault, in the journal and in every worker's log.

The journal says which positions each rank contributed to each committed step. From that alone the
judge trains the model again, with its own arithmetic. So it knows to the bit the weights of every
record. It detects a contribution that was partial, missing, doubled, or computed from other
weights.

The order of a rank's local steps is not in the journal, but in its log (`replay.py`). The judge
requires that these took exactly the positions of the record, and makes them again in that order,
with the outer optimizer's momentum.
What every worker was told about a window is compared too (`windows.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from andon.protocol.halts import HaltReason
from andon.protocol.records import Key, RecordKind
from andon.protocol.run_settings import Policy
from andon.protocol.shards import shard_of
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.transport.reader import JournalEntry, JournalReader
from chaos.model import Floats, LineState, Task, weighted_mean
from chaos.owed import Owed, judge_owed
from chaos.replay import Replay, exchanged_in
from chaos.rig import ChaosLine, events_of
from chaos.schedules import EVERY_STEP, LineSchedule
from chaos.windows import Logs, judge_windows
from unit.andon_trainer.ring_bench import expected_means

__all__ = ["Verdict", "judge", "judge_journal"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's result for a correct run."""

    chain: Sequence[JournalEntry]
    weights: Floats
    """The weights after the last record."""
    bootstrap_worker: int
    resplit: frozenset[int]
    """Steps that were not split evenly over all workers of the line."""
    divisions: frozenset[tuple[int, ...]]
    """How many positions each rank had, wherever all workers of the line took part."""

    @property
    def steps(self) -> int:
        """Steps committed."""
        return self.chain[-1].record.step

    def entry(self, step: int) -> JournalEntry:
        """The record of a step."""
        return next(entry for entry in self.chain if entry.record.step == step)

    def roster(self, step: int = -1) -> tuple[int, ...]:
        """Who is in the record of a step; -1: in the last one."""
        return (self.chain[-1] if step < 0 else self.entry(step)).record.roster

    def result(self, step: int) -> StepResult:
        """What a step came to."""
        result = self.entry(step).result
        assert result is not None
        return result

    @property
    def attempts(self) -> dict[int, int]:
        """The attempt that was committed, of each step."""
        return {each.record.step: each.result.attempt for each in self.chain if each.result}


def judge(line: ChaosLine, *, cord: bool = False, left_behind: bool = False) -> Verdict:
    """Judges a line whose workers have ended.

    Args:
        line: the line.
        cord: whether somebody pulled its cord; no other halt is expected.
        left_behind: whether the run may have ended while a worker was still learning.

    Raises:
        AssertionError: a contract was broken; the message says which, and where.
    """
    logs = {slot: events_of(worker.log) for slot, worker in line.workers.items()}
    verdict = judge_journal(line.journal, line.task, line.expected, logs, line.schedule, cord=cord)
    ends = [
        event
        for log in logs.values()
        for before, event in pairwise(log)
        if event["event"] == "complete" and not (left_behind and before["event"] == "dismissed")
    ]
    assert ends, "no worker ended with the run done"
    head = verdict.chain[-1].record.key
    for end in ends:
        assert _key(end["head"]) == head, f"a worker ended at {end['head']}, the line at {head}"
    return verdict


def judge_journal(
    journal: Path,
    task: Task,
    workers: int,
    logs: Logs,
    schedule: LineSchedule = EVERY_STEP,
    *,
    cord: bool = False,
) -> Verdict:
    """Judges a journal and its workers' logs, by slot."""
    with JournalReader(journal) as reader:
        chain = reader.chain()
        assert len(chain) == len(reader.entries()), "a record is not of the line's history"
        assert reader.ledger_faults() == [], "F-DP-002: the ledger has gaps or overlaps"
        pulled = (HaltReason.OPERATOR,) if cord else ()
        halts = [each for each in reader.halts() if each.evidence.reason not in pulled]
        assert halts == [], f"the line halted: {halts}"
    assert chain, "nothing was ever committed"
    _judge_positions(chain, task)
    for entry in chain:
        _judge_contributions(entry)
    judge_windows(chain, task, schedule, logs)
    judge_owed(chain, task, schedule, logs)
    states = _trained_again(chain, task, schedule, logs)
    digests = {key: state.digest.hex() for key, state in states.items()}
    for slot, log in logs.items():
        _judge_log(slot, log, chain, digests)
        _judge_numbers(slot, log)
    return Verdict(
        chain=chain,
        weights=states[chain[-1].record.key].weights,
        bootstrap_worker=chain[0].record.roster[0],
        resplit=frozenset(_resplit(chain, workers)),
        divisions=frozenset(_divisions(chain, workers)),
    )


def _judge_positions(chain: Iterable[JournalEntry], task: Task) -> None:
    """F-DP-002: each position before the cursor is committed exactly once, and none after it."""
    taken = Counter(
        (entry.result.epoch, at)
        for entry in chain
        if entry.result is not None
        for part in entry.result.contributions
        for positions in part.positions
        for at in range(positions.start, positions.stop)
    )
    doubled = [place for place, times in taken.items() if times > 1]
    assert not doubled, f"F-DP-002: committed more than once: {doubled[:5]}"
    end = list(chain)[-1].record.cursor
    wanted = {(epoch, at) for epoch in range(end.epoch) for at in range(task.dataset)}
    wanted |= {(end.epoch, at) for at in range(end.position)}
    assert taken.keys() == wanted, f"F-DP-002: {sorted(taken.keys() ^ wanted)[:5]}"


def _judge_contributions(entry: JournalEntry) -> None:
    """C-COMMIT-001: a committed step has the complete contribution of each worker of its roster."""
    record, result = entry.record, entry.result
    if record.kind is not RecordKind.STEP:
        return
    assert result is not None
    givers = tuple(part.worker for part in result.contributions)
    assert givers == record.roster, f"C-COMMIT-001: step {record.step} of {record.roster}: {givers}"
    for part in result.contributions:
        given = sum(map(len, part.positions))
        assert part.samples == given == part.weight, f"C-COMMIT-001: step {record.step}: {part}"


def _trained_again(
    chain: Sequence[JournalEntry], task: Task, schedule: LineSchedule, logs: Logs
) -> dict[Key, LineState]:
    """Computes what every worker holds after each record."""
    founded = chain[0].record
    assert founded.kind is RecordKind.INITIAL, "the first record bootstraps the run"
    state = LineState(weights=task.initial(founded.roster[0]))
    by_record, owed = {founded.key: state}, Owed(task, schedule)
    replays = {slot: Replay(slot, log, task, schedule) for slot, log in logs.items()}
    assigned = {
        Key(*event["key"]): event
        for log in logs.values()
        for event in log
        if event["event"] == "assigned"
    }
    for before, entry in pairwise(chain):
        record, result = entry.record, entry.result
        assert record.parent == before.record.key, f"step {record.step} has another parent"
        assert result is not None, f"{record.kind.name} {record.key}: no fault asks for one"
        assert record.step == before.record.step + 1
        parts = result.contributions
        if schedule.local_steps:
            vectors = [
                replays[part.worker].contribution(record.key, part, by_record) for part in parts
            ]
        else:
            vectors = [task.gradient(state.weights, result.epoch, part.positions) for part in parts]
        weighted = [(part.weight, vector) for part, vector in zip(parts, vectors, strict=True)]
        mean = _ring_mean(weighted, task) if schedule.ring else weighted_mean(weighted)
        if result.overflow:
            pass  # A committed step that moves no weight.
        elif schedule.local_steps:
            scale = owed.scale(entry) if schedule.quorum else 1.0
            moved = exchanged_in(assigned[record.key], task, schedule)
            state = task.outer_step(state, mean, schedule.outer, scale, moved)
        else:
            scale = schedule.rate_scale(len(result.batch), task.batch)
            state = LineState(weights=task.moved(state.weights, mean, scale))
        by_record[record.key] = state
    return by_record


def _ring_mean(parts: Sequence[tuple[float, Floats]], task: Task) -> Floats:
    """The mean as docs/ring.md defines it: each part of a block begins at another rank."""
    blocks = [task.split(vector) for _, vector in parts]
    return np.concatenate(expected_means(blocks, [weight for weight, _ in parts], Policy()))


def _judge_log(
    slot: int,
    log: Sequence[dict[str, Any]],
    chain: Sequence[JournalEntry],
    digests: Mapping[Key, str],
) -> None:
    """F-DP-001; and the worker applied only records that the journal holds."""
    records = {entry.record.key: entry.record for entry in chain}
    last: Key | None = None
    for event in log:
        if event["event"] == "start":
            last = None
        if event["event"] not in ("applied", "installed"):
            continue
        key, where = _key(event["key"]), f"worker {slot} at step {event['step']}"
        assert key in records, f"{where} holds a record that the journal does not"
        assert event["digest"] == digests[key], f"F-DP-001: {where} holds other weights"
        assert event["step"] == records[key].step, where
        assert last is None or key > last, f"{where} went back"
        if event["event"] == "applied":
            assert last == records[key].parent, f"{where} applied it to another head"
            assert tuple(event["roster"]) == records[key].roster, where
            on_roster = slot in records[key].roster
            assert on_roster is not event["attends"], f"{where}: on its roster: {on_roster}"
        last = key


def _judge_numbers(slot: int, log: Sequence[dict[str, Any]]) -> None:
    """Each worker gives its step: whoever was paired with another step's call has another mean."""
    for event in log:
        where = f"worker {slot} after step {event.get('step')}"
        if event["event"] == "averaged":
            assert event["mean"] == event["step"], f"{where}: the mean is {event['mean']}"
        if event["event"] == "gathered":
            others = set(event["given"]) - {str(event["step"])}
            assert event["given"], f"{where}: nothing was gathered"
            assert not others, f"{where}: gathered {event['given']}"


def _resplit(chain: Iterable[JournalEntry], workers: int) -> Iterable[int]:
    """Steps whose shares differ from those of an undisturbed line of `workers` workers."""
    for entry in chain:
        if entry.result is None:
            continue
        batch = entry.result.batch
        even = [shard_of(batch, rank, workers) for rank in range(workers)]
        given = [part.positions for part in entry.result.contributions]
        if given != [(part,) if len(part) else () for part in even]:
            yield entry.record.step


def _divisions(chain: Iterable[JournalEntry], workers: int) -> Iterable[tuple[int, ...]]:
    for entry in chain:
        if entry.result is not None and len(entry.result.contributions) == workers:
            yield tuple(part.samples for part in entry.result.contributions)


def _key(pair: Sequence[int]) -> Key:
    return Key(*pair)
