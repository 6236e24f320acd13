"""A line with simulated workers, streams that delay and break, a reducer, a journal, and faults.

Every choice comes from one seeded generator. Workers obey the rules of docs/protocol.md, and
remember everything that moved their weights, so that two workers' weights are equal exactly
if their memories are.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.reasons import Reason
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.run_settings import Policy, RunPlan
from andon.protocol.shards import Ranges, subtract
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.core.step_results import Skip, StepResult
from andon_coordinator.core.transfers import TransferRole
from scenarios.line_bench import Bench
from scenarios.member_scans import check_indices

__all__ = ["Simulation"]

Weights = tuple[object, ...]

_ANSWERABLE = (
    HaltReason.OPERATOR,
    HaltReason.NON_FINITE_GRADIENT,
    HaltReason.PROTOCOL_VIOLATION,
)

_MADE_UP = (2**31, 2**32 - 1, 2**52, 2**53 - 1)
"""Counts that the door lets in, and that no worker of these runs could have."""


@dataclass
class Process:
    """One worker's process."""

    slot: int
    """Its place among the processes; it asks for this slot."""
    incarnation: int
    head: Key | None = None
    weights: Weights = ()
    held: Key | None = None
    assignment: do.Assignment | None = None
    stream: int | None = None
    greatest_term: int = 0
    accepted: bool = False
    asked_at: Key | None = None
    finished: bool = False
    pacing: bytes = b""
    up: deque[on.Event] = field(default_factory=deque)
    down: deque[do.Effect] = field(default_factory=deque)
    worker: int | None = None
    """The slot that the line gave it last."""


class Simulation:
    """Runs one seed. `check` asserts what must always hold."""

    def __init__(
        self, seed: int, *, workers: int = 3, steps: int = 12, dataset: int = 10, spare: int = 0
    ) -> None:
        """`spare`: slots beyond the expected workers."""
        self.random = random.Random(seed)
        settings = LineSettings(
            run_id="sim",
            expect_workers=workers,
            min_workers=self.random.choice([1, workers]),
            max_workers=workers + spare,
            policy=Policy(max_steps=steps),
            max_attempts=1000,
        )
        self.bench = Bench(settings, RunPlan(global_batch=4, dataset_size=dataset))
        self.incarnations = 0
        self.processes = [self._spawn(slot) for slot in range(workers)]
        self.averages: dict[Key, set[int]] = {}
        self.rosters: dict[Key, tuple[int, ...]] = {}
        self.shares: dict[Key, dict[int, Ranges]] = {}
        self.parents: dict[Key, Key | None] = {}
        self.before: dict[Key, Key] = {}
        """The round that was the last attempt at the same head before another one."""
        self.relay: dict[int, tuple[Key, Weights]] = {}
        self.skips: dict[Key, Skip] = {}
        self.past: list[tuple[Record, StepResult | None]] = []

    @property
    def history(self) -> list[tuple[Record, StepResult | None]]:
        """The chain of records: what lost journals held of it, and the present one."""
        return [*self.past, *self.bench.journal.records]

    def run(self, actions: int) -> None:
        """Takes this many random actions, including faults; fewer if a worker is done."""
        for _ in range(actions):
            if any(each.finished for each in self.processes):
                return
            fault = self.random.random() < 0.05
            self.random.choice(self._faults() if fault else self._moves())()
            self.check()

    def finish(self, limit: int = 20_000) -> None:
        """Goes on without faults until the run is complete; answers every halt."""
        for _ in range(limit):
            if self.bench.line.state is LineState.COMPLETE:
                return
            self.random.choice([*self._moves(), self._answer])()
            self.check()
        raise AssertionError(f"stuck: {self.bench.line.status(self.bench.now)}")

    def check(self) -> None:
        """No two workers of one head differ; what moved weights is durable and whole."""
        by_head: dict[Key, Weights] = {}
        durable = {record.key for record, _ in self.history}
        for process in self.processes:
            if process.head is not None:
                assert by_head.setdefault(process.head, process.weights) == process.weights
                assert process.head in durable

    # What goes on by itself.

    def _moves(self) -> list[Callable[[], None]]:
        return [
            *[partial(self._step, process) for process in self.processes * 2],
            self._write,
            self._pass_time,
        ]

    def _step(self, process: Process) -> None:
        if process.finished:
            return
        if process.stream is None:
            self._join(process)
        elif process.down and self.random.random() < 0.5:
            self._hear(process, process.down.popleft())
        elif process.up:
            self._deliver(process.up.popleft())
        else:
            self._work(process)

    def _work(self, process: Process) -> None:
        stream = process.stream
        assert stream is not None
        assignment = process.assignment
        if assignment is not None:
            newest = max(self.averages, default=assignment.key)
            if newest > assignment.key:
                process.assignment = None
                seen = on.Fault(kind=on.FaultKind.STALE_ROUND, key=assignment.key, greatest=newest)
                process.up.append(on.FaultReported(stream, seen))
                return
            self.averages.setdefault(assignment.key, set()).add(self._id_of(process))
            if self.averages[assignment.key] == set(assignment.roster):
                process.held = assignment.key
                process.assignment = None
                ready = self.bench.ready(stream)
                timings = self._timings(process, ready.samples)
                ready = replace(ready, key=process.held, timings=timings)
                process.up.append(on.WorkerReady(stream, ready))
        elif process.accepted and process.head is not None and process.asked_at != process.head:
            process.asked_at = process.head
            process.up.append(on.WorkRequested(stream, process.head))

    def _timings(self, process: Process, samples: int) -> on.StepTimings:
        """How long a process says that its step took."""
        return on.StepTimings()

    def _write(self) -> None:
        journal = self.bench.journal
        if journal.pending_records:
            self._deliver(on.RecordSaved(journal.save_record()))
        elif journal.pending_terms:
            self._deliver(on.TermSaved(journal.save_term()))

    def _pass_time(self) -> None:
        self.bench.now += self.random.choice([0.05, 0.3])
        for process in self.processes:
            if process.stream is not None:
                self._deliver(on.HeartbeatArrived(process.stream, 1))
        self._deliver(on.TimePassed())

    def _answer(self) -> None:
        halt = self.bench.journal.open_halt
        if halt is not None:
            newest = self.history[-1][0].key if self.history else None
            applied = any(each.head == newest for each in self.processes)
            # A second MARK after one that nobody has heard of could reach nobody (rule 8).
            answers = [HaltAnswer.RETRY, HaltAnswer.SKIP] if applied else [HaltAnswer.RETRY]
            if halt.reason is HaltReason.STATE_LOST:
                # Its only holder has not reported yet, or the bootstrap worker never got it.
                answers = [HaltAnswer.RETRY]
            else:
                assert halt.reason in _ANSWERABLE
            answer = self.random.choice(answers)
            self._deliver(on.HaltCleared(halt.id, answer))

    # What goes wrong.

    def _faults(self) -> list[Callable[[], None]]:
        return [
            self._crash,
            self._crash,
            self._break_stream,
            self._break_stream,
            self._fall_silent,
            self._see_defect,
            self._lose_data_stream,
            self._make_up_numbers,
            self._make_up_a_join,
            lambda: self._deliver(on.CordPulled("a test")),
            self._answer,
            self._answer,
            self._answer,
            self._restart_coordinator,
        ]

    def _crash(self) -> None:
        """A process dies; not the last one that holds the newest record.

        Its averages will do while the journal has the record, to send it again.
        """
        process = self.random.choice(self.processes)
        others = [each for each in self.processes if each is not process]
        pending = [each.record.key for each in self.bench.journal.pending_records]
        newest = [record.key for record, _ in self.history[-1:]]
        known = {record.key for record, _ in self.bench.journal.records} | set(pending)
        if not newest or not all(
            any(key == each.head or (key == each.held and key in known) for each in others)
            for key in [*newest, *pending]
        ):
            return
        stream = process.stream
        self.processes[process.slot] = self._spawn(process.slot)
        if stream is not None:
            self._deliver(on.WorkerStreamEnded(stream, gone=self.random.random() < 0.5))

    def _break_stream(self) -> None:
        process = self.random.choice(self.processes)
        if process.stream is not None and not process.finished:
            stream = self._hang_up(process)
            if self.random.random() < 0.7:
                self._deliver(on.WorkerStreamEnded(stream))

    def _fall_silent(self) -> None:
        """A long time without a word of some workers, or of all, as if hosts were suspended."""
        heard = [each.stream for each in self.processes if self.random.random() < 0.5]
        self.bench.now += self.bench.settings.liveness.silence_s
        for stream in heard:
            if stream is not None:
                self._deliver(on.HeartbeatArrived(stream, 1))
        self._deliver(on.TimePassed())

    def _see_defect(self) -> None:
        process = self.random.choice(self.processes)
        if process.assignment is not None and process.stream is not None:
            kind = on.FaultKind.NON_FINITE_GRADIENT
            seen = on.Fault(kind=kind, key=process.assignment.key, value="nan")
            process.up.append(on.FaultReported(process.stream, seen))

    def _lose_data_stream(self) -> None:
        process = self.random.choice(self.processes)
        if process.assignment is not None and process.stream is not None:
            seen = on.Fault(kind=on.FaultKind.DATA_STREAM_LOST, key=process.assignment.key)
            process.assignment = None
            process.up.append(on.FaultReported(process.stream, seen))

    def _make_up_numbers(self) -> None:
        """A worker sends numbers that no worker can have, on its own stream."""
        process = self.random.choice(self.processes)
        stream, assignment = process.stream, process.assignment
        if stream is None or not process.accepted:
            return
        made_up = self._made_up_key()
        said: list[on.Event] = [
            on.WorkRequested(stream, made_up),
            on.StateReported(stream, self.random.choice(_MADE_UP), made_up),
            on.ScalarAllReduceArrived(
                stream, process.head, self.random.choice(_MADE_UP), math.nan, 1e308
            ),
            on.FaultReported(
                stream, on.Fault(kind=on.FaultKind.STALE_ROUND, key=made_up, greatest=made_up)
            ),
        ]
        if assignment is not None:
            key = assignment.key
            ready = replace(self.bench.ready(stream), samples=self.random.choice(_MADE_UP))
            stale = on.Fault(kind=on.FaultKind.STALE_ROUND, key=key, greatest=made_up)
            said += [
                on.WorkerReady(stream, replace(ready, key=key)),
                on.WorkerReady(stream, replace(ready, key=made_up)),
                on.FaultReported(stream, stale),
            ]
        self._deliver(self.random.choice(said))

    def _make_up_a_join(self) -> None:
        """A stranger joins with numbers that no worker of this run can have."""
        request = replace(
            self.bench.request(None, 10**9),
            head=self._made_up_key(),
            step=self.random.choice(_MADE_UP),
            cursor=Cursor(self.random.choice(_MADE_UP), self.random.choice(_MADE_UP)),
            greatest_term=self.random.choice(_MADE_UP),
        )
        _, effects = self.bench.join("stranger", request)
        assert any(isinstance(each, do.RefuseJoin) for each in effects)
        self._post(effects)

    def _made_up_key(self) -> Key:
        term = self.random.choice([self.bench.journal.term, 2**64 - 1, (2**32 - 2) << 32])
        return Key(term, self.random.choice(_MADE_UP))

    def _restart_coordinator(self) -> None:
        journal = self.bench.journal
        while journal.pending_records and self.random.random() < 0.5:
            journal.save_record()
        heads = [each.head for each in self.processes if each.head is not None]
        lost = bool(heads) and self.random.random() < 0.3
        if lost:
            # What nobody applied never happened (rule 9).
            self.past = [each for each in self.history if each[0].key <= max(heads)]
        self.bench.restart(journal_kept=not lost)
        for process in self.processes:
            if process.stream is not None:
                self._hang_up(process)

    # One worker.

    def _spawn(self, slot: int) -> Process:
        self.incarnations += 1
        return Process(slot, self.incarnations)

    def _asks_for(self, process: Process) -> int | None:
        """The slot that a process asks for when it joins."""
        return process.slot

    @staticmethod
    def _id_of(process: Process) -> int:
        assert process.worker is not None
        return process.worker

    def _hang_up(self, process: Process) -> int:
        assert process.stream is not None
        stream, process.stream = process.stream, None
        process.accepted = False
        process.assignment = None
        process.asked_at = None
        process.up.clear()
        process.down.clear()
        return stream

    def _join(self, process: Process) -> None:
        step, cursor = 0, Cursor(0, 0)
        for record, _ in self.history:
            if record.key == process.head:
                step, cursor = record.step, record.cursor
        request = replace(
            self.bench.request(self._asks_for(process), process.incarnation),
            head=process.head,
            held_key=process.held,
            step=step,
            cursor=cursor,
            greatest_term=process.greatest_term,
            pacing=process.pacing,
        )
        stream, effects = self.bench.join(str(process.slot), request)
        process.stream = stream
        self._post(effects)

    def _deliver(self, event: on.Event) -> None:
        self._post(self.bench.send(event))

    def _post(self, effects: list[do.Effect]) -> None:
        """Passes on what an event had for effects, after which the core's indices must be right."""
        check_indices(self.bench.line._core.members)
        streams = {each.stream: each for each in self.processes if each.stream is not None}
        for effect in effects:
            process = streams.get(getattr(effect, "stream", -1))
            if isinstance(effect, do.Assign):
                self._note(effect.assignment)
            if isinstance(effect, do.SaveRecord) and effect.skipped is not None:
                self.skips[effect.record.key] = effect.skipped
            if process is not None and not isinstance(effect, do.SendHeartbeatAnswer):
                process.down.append(effect)

    def _note(self, assignment: do.Assignment) -> None:
        """Keys are never used twice, and workers keep their positions in the next attempt."""
        roster = self.rosters.setdefault(assignment.key, assignment.roster)
        assert roster == assignment.roster
        assert assignment.key >= max(self.rosters), "keys only grow"
        assert assignment.key.term == self.bench.journal.term, "a term is durable before its use"
        key, worker = assignment.key, assignment.roster[assignment.rank]
        if key not in self.shares:
            last = max(self.shares, default=key)
            if self.parents.get(last) == assignment.parent and last.term == key.term:
                self.before[key] = last
            self.parents[key] = assignment.parent
        self.shares.setdefault(key, {})[worker] = assignment.positions
        if key in self.before and self._survived(self.before[key], key, worker):
            kept = self.shares[self.before[key]].get(worker, ())
            assert not subtract(kept, assignment.positions), "a survivor keeps its positions"

    def _survived(self, before: Key, key: Key, worker: int) -> bool:
        """Whether a worker that was in the round `before` is the one that is in `key`'s now."""
        return True  # A slot's next process computes what the one before it had to.

    def _hear(self, process: Process, effect: do.Effect) -> None:  # noqa: C901 (one case an effect)
        match effect:
            case do.AcceptJoin():
                process.accepted = True
                process.worker = effect.worker
            case do.Assign(_, assignment):
                process.greatest_term = max(process.greatest_term, assignment.key.term)
                process.held = None
                process.assignment = assignment
                if assignment.parent != process.head:
                    self._give_up(process)
            case do.SendCommitted(_, record, _, stop_reason):
                process.pacing = effect.pacing or process.pacing
                self._apply(process, record, stop_reason)
            case do.SendVoided(_, key) | do.SendHalt(_, HaltEvidence(key=Key() as key)):
                process.assignment = None
                process.held = None if process.held == key else process.held
            case do.SendTransfer(role=TransferRole.SEND):
                if process.head == effect.head:
                    self.relay[effect.transfer_id] = (effect.head, process.weights)
            case do.SendTransfer():
                self._receive(process, effect)
            case do.CloseStream():
                self._hang_up(process)
            case do.RefuseJoin(_, refusal):
                self._hang_up(process)
                process.finished = refusal.reason is Reason.COMPLETE
            case do.SendShutdown():
                self._leave(process)
            case _:
                pass

    def _apply(self, process: Process, record: Record, stop_reason: str) -> None:
        key = record.key
        if process.head == key:
            return
        fresh = record.kind is RecordKind.INITIAL and process.head is None
        if record.kind is RecordKind.INITIAL and fresh and process.worker in record.roster:
            process.weights = (("initial", process.incarnation),)
        elif process.head != record.parent or fresh:
            self._give_up(process)
            return
        elif record.kind is RecordKind.STEP:
            if process.held != key:
                self._give_up(process)
                return
            assert self.averages[key] == set(record.roster), "a committed step is whole"
            process.weights = (*process.weights, key)
        if record.kind is RecordKind.MARK and process.asked_at == process.head:
            process.asked_at = key  # the request stands
        process.head = key
        process.held = None
        if stop_reason:
            self._leave(process)

    def _receive(self, process: Process, effect: do.SendTransfer) -> None:
        if effect.transfer_id not in self.relay:
            process.down.appendleft(effect)  # The donor has not sent it yet.
            donors = [each for each in self.processes if each.worker == effect.peer]
            there = any(each.stream is not None and each.head == effect.head for each in donors)
            if not there or self.random.random() < 0.1:
                process.down.popleft()
                self._report(process, effect.transfer_id, "the donor is gone")
            return
        process.head, process.weights = self.relay[effect.transfer_id]
        process.held = None
        self._report(process, effect.transfer_id, "")

    def _report(self, process: Process, transfer_id: int, failure: str) -> None:
        assert process.stream is not None
        head = process.head
        process.up.append(on.StateReported(process.stream, transfer_id, head, failure))

    def _give_up(self, process: Process) -> None:
        """Rule 4: a worker that can't follow closes its stream and joins again."""
        self._deliver(on.WorkerStreamEnded(self._hang_up(process)))

    def _leave(self, process: Process) -> None:
        assert process.stream is not None
        digest = repr(process.weights).encode()
        stream = self._hang_up(process)
        process.finished = True
        reason = on.LeaveReason.COMPLETE
        self._deliver(on.WorkerLeft(stream, reason, "", 0, digest, process.head))
