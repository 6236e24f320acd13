"""A worker that trains without PyTorch, stops at barriers, and logs the records that it applies.

Usage: worker.py SPEC.json, with the line's variables in the environment. It uses the trainer's own
membership, exchange and transfers; only the model is made up (model.py). Its log has one JSON
object per line. Each line is one system call, so a kill loses no complete line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from andon.protocol.capabilities import LEARNING
from andon.protocol.records import Key, PositionRange
from andon.protocol.schedules import (
    BALANCE_CAPABILITY,
    CADENCE_CAPABILITY,
    FRAGMENTS_CAPABILITY,
    LOCAL_CAPABILITY,
    OVERLAP_CAPABILITY,
    QUORUM_CAPABILITY,
)
from andon_trainer.averaging.norms import l2_norm, limiting_factor
from andon_trainer.config import LineConfig
from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned, AveragesComplete, Committed
from andon_trainer.core.reports import NO_DIGEST, Digest, LeaveReport, StepReport
from andon_trainer.errors import AndonError, RunOver
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.exchange.control.transfer import PackedCut
from andon_trainer.place.candidate import Candidate
from andon_trainer.place.membership import Membership
from andon_trainer.telemetry import Telemetry
from chaos.barrier import RECEIVING, Barrier
from chaos.computing import Computing, LocalSteps, computing_for
from chaos.model import Floats, LineState, Task

__all__ = ["Worker", "main"]


class Log:
    """Appends events with times of CLOCK_MONOTONIC, which all processes of a host share."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "at": time.monotonic(), **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())


class Said(logging.Handler):
    """Copies the trainer's log messages about lost streams and void rounds into the log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write("said", message=record.getMessage())


class Replica:
    """The line's state, packed as a newcomer receives it."""

    def __init__(self, weights: Floats, barrier: Barrier) -> None:
        self.state = LineState(weights=weights)
        self._barrier = barrier

    def cut_state(self) -> PackedCut:
        return PackedCut(self.packed())

    def room_ahead(self) -> None:
        return None

    def base_elements(self) -> bytes:
        # Whoever receives asks for it first: to leave out what it has of its own, which is nothing.
        self._barrier.pass_by(RECEIVING, 0)
        return b""

    def packed(self) -> PackedState:
        return PackedState([self.state.pack()])

    def install(self, data: bytes | bytearray) -> None:
        numbers, size = np.frombuffer(data, dtype=np.float32).copy(), self.state.weights.size
        if numbers.size not in (size, 2 * size):
            raise ValueError(f"the state has {numbers.size} numbers, not {size} or {2 * size}")
        momentum = numbers[size:] if numbers.size > size else None
        self.state = LineState(weights=numbers[:size], momentum=momentum)


class Worker:
    """One worker, from its Join to its Leave."""

    replica = Replica

    def __init__(self, spec: dict[str, Any]) -> None:
        """Reads the spec: `folder`, `slot`, `task`, `finish`, `judged`, `learns`, `numbers`."""
        self._task = Task(**{**spec["task"], "blocks": tuple(spec["task"]["blocks"])})
        self._judged: bool = spec.get("judged", True)
        self._numbers: int = spec.get("numbers", 0)
        """After every so many steps, and after each epoch, it averages a number; 0: never."""
        self._finish = Path(spec["finish"])
        folder = Path(spec["folder"])
        self._log = Log(folder / "log.jsonl")
        self._pace = folder / "pace"
        self._barrier = Barrier(folder)
        self._replica = self.replica(self._task.initial(spec["slot"]), self._barrier)
        self._known: Key | None = None
        """The head of the log's last line."""
        self._averaged: Key | None = None
        """The head at which it looked last whether to average a number."""
        logging.basicConfig(level=logging.INFO, handlers=[Said(self._log)])
        self._log.write("start", pid=os.getpid(), slot=spec["slot"])
        config = LineConfig.read(seed=self._task.seed)
        candidate = Candidate(
            layout=self._task.layout,
            plan=self._task.plan,
            replica=self._replica,
            device=("cpu", "none", 0, 1),
            capabilities=(
                BALANCE_CAPABILITY,
                CADENCE_CAPABILITY,
                FRAGMENTS_CAPABILITY,
                LOCAL_CAPABILITY,
                OVERLAP_CAPABILITY,
                QUORUM_CAPABILITY,
                *((LEARNING,) if spec.get("learns", True) else ()),
            ),
        )
        self._member = Membership(config, candidate, Telemetry(config))

    def run(self) -> None:
        """Trains until the run is over."""
        self._member.join()
        self._note_head()
        self._computing = self.computing()
        self._member.on_drop = self._drop
        while not self._member.position.stop_reason:
            try:
                assigned = self._member.next_round()
                self._note_head()
                self._step(assigned)
                self._average()
            except RunOver:
                # The run is over for all, although this worker did not apply the last step.
                self._log.write("dismissed", head=_pair(self._member.position.head))
                break
        end, digest = self._member.position, self._replica.state.digest
        reason = "DRAINED" if end.stop_reason == "drained" else "COMPLETE"
        self._log.write("complete", head=_pair(end.head), step=end.step, digest=digest.hex())
        last = Digest(digest)
        self._member.leave(
            LeaveReport(reason=reason, final_step=end.step, head=end.head, digest=last)
        )

    def computing(self) -> Computing:
        """What this worker computes, by the line's policy."""
        computing = computing_for(self._task, self._member.policy, self._member.computed)
        if self._member.policy.quorum:
            computing.wanted = self._member.look
        return computing

    def leave(self, error: Exception) -> None:
        """Logs why the worker ended."""
        self._log.write("failed", type=type(error).__name__, message=str(error))

    def _step(self, assigned: Assigned) -> None:
        """One attempt at one step."""
        self._note_assigned(assigned)
        stop = self._barrier.pass_by
        stop("assigned", assigned.step)
        self._computing.pace.seconds_per_sample = self._seconds_per_sample()

        def middle() -> None:
            stop("mid-compute", assigned.step)

        state = self._replica.state
        parts = self._computing.compute(assigned, self._member.position.doubts, state, middle)
        # Before anything is sent: the judge makes the same local steps in the same order.
        self._note_computed("computed", assigned, parts)
        vector = self._computing.contribution(assigned, state)
        own_norm = l2_norm([vector])
        vector = self._limited(vector, own_norm)
        samples, blocks = _given(assigned), self._blocks(assigned)
        whole = len(blocks) == len(self._task.blocks)
        call = None if whole else Call(name="fragment", blocks=blocks)
        if not self._member.begin(self.weight(samples), call):
            return
        stop("before-blocks", assigned.step)
        self._submit(vector, samples, assigned.step, blocks)
        ahead = self._computing.compute_ahead(assigned, middle)
        self._note_computed("ahead", assigned, ahead)
        stop("after-blocks", assigned.step)
        complete = self._member.await_averages()
        if complete is None:
            return
        mean = np.concatenate(self._member.exchange.averages)  # valid only until the report
        self._report(assigned, own_norm, complete)
        stop("ready-sent", assigned.step)
        commit = self._member.await_commit()
        if commit is None:
            return
        stop("before-apply", assigned.step)
        # As if nobody had contributed: no weight moves.
        self._apply(commit, assigned, 0.0 if commit.overflow else complete.total_weight, mean)
        stop("after-apply", assigned.step)

    def _seconds_per_sample(self) -> float:
        """As the test says now; it may change while the line trains."""
        return float(self._pace.read_text()) if self._pace.exists() else 0.0

    def weight(self, samples: int) -> float:
        """The weight of a contribution of so many samples."""
        return float(samples)

    def _limited(self, vector: Floats, own_norm: float) -> Floats:
        """A gradient with no greater norm than the line allows; a change of weights as it is."""
        policy = self._member.policy
        if policy.local_steps or policy.max_grad_norm is None:
            return vector
        factor = limiting_factor(own_norm, policy.max_grad_norm)
        return vector if factor is None else vector * np.float32(factor)

    def _blocks(self, assigned: Assigned) -> range:
        """The blocks that the round exchanges."""
        count = len(self._task.blocks)
        if assigned.fragment is None:
            return range(count)
        return range(assigned.fragment, count, self._member.policy.fragments)

    def _submit(self, vector: Floats, samples: int, step: int, places: range) -> None:
        exchange = self._member.exchange
        if not samples:
            exchange.abstain()
            self._barrier.pass_by("mid-blocks", step)
            return
        blocks = self._task.split(vector)
        for number, index in enumerate(places):
            if number == len(places) // 2:
                self._barrier.pass_by("mid-blocks", step)
            exchange.submit(index, blocks[index])

    def _report(self, assigned: Assigned, own_norm: float, complete: AveragesComplete) -> None:
        samples = _given(assigned)
        # Nobody compares the weights of a worker that only attends.
        due = (assigned.wants_digest or self._member.position.digest_due) and not assigned.attends
        self._member.report(
            StepReport(
                key=assigned.key,
                loss_sum=float(samples),
                weight=self.weight(samples),
                samples=samples,
                timings=self._computing.pace.timings,
                digest=Digest(self._replica.state.digest) if due else NO_DIGEST,
                digest_head=assigned.parent,
                stop_reason="finish" if self._finish.exists() else "",
                total_weight=complete.total_weight,
                world_size=complete.world_size,
                gradient_norm=(
                    l2_norm(self._member.exchange.averages)
                    if self._member.policy.gradient_norm
                    else None
                ),
                own_gradient_norm=own_norm if self._member.policy.own_gradient_norm else None,
            )
        )
        self._log.write("ready", key=_pair(assigned.key), step=assigned.step)
        # The next heartbeat shows this phase. It follows the report on the same stream.
        self._member.talk.show("COMMITTING")

    def _apply(
        self, commit: Committed, assigned: Assigned, total_weight: float, mean: Floats
    ) -> None:
        record, before = commit.record, self._replica.state
        self._replica.state = self._computing.after(before, assigned, total_weight, mean)
        self._known = record.key
        self._log.write(
            "applied",
            key=_pair(record.key),
            parent=_pair(record.parent),
            step=record.step,
            roster=list(record.roster),
            attends=assigned.attends,
            digest=self._digest(),
        )

    def _average(self) -> None:
        """Averages the step's number, which is the same for all, so the mean must be it too."""
        here = self._member.position
        if not self._numbers or here.head == self._averaged or here.stop_reason:
            return
        ends_epoch = here.cursor.position == 0
        self._averaged = here.head
        if here.step % self._numbers and not ends_epoch:
            return
        mean, _, contributors = self._member.scalar_all_reduce(float(here.step), 1.0)
        self._log.write("averaged", step=here.step, mean=mean, contributors=contributors)
        if ends_epoch:
            given = self._member.all_gather(str(here.step).encode())
            self._log.write("gathered", step=here.step, given=[each.decode() for each in given])

    def _note_assigned(self, assigned: Assigned) -> None:
        """Logs all that the line says about the window."""
        self._log.write(
            "attending" if assigned.attends else "assigned",
            key=_pair(assigned.key),
            parent=_pair(assigned.parent),
            step=assigned.step,
            attempt=assigned.attempt,
            roster=list(assigned.roster),
            rank=assigned.rank,
            epoch=assigned.epoch,
            batch=[assigned.batch.start, assigned.batch.stop],
            positions=_pairs(assigned.positions),
            ahead=_pairs(assigned.ahead),
            ahead_batch=_pairs([assigned.ahead_batch] if assigned.ahead_batch else []),
            micro_batches=assigned.micro_batches,
            window=assigned.window,
            targets=list(assigned.split.targets),
            interleaved=assigned.split.interleaved,
            rate_scale=assigned.learning_rate_scale,
            change_scale=assigned.change_scale,
            fragment=assigned.fragment,
        )

    def _note_computed(self, event: str, assigned: Assigned, parts: Sequence[list[int]]) -> None:
        """Logs what was computed now, in its order; under LOCAL each part is a local step."""
        if parts or not assigned.attends:
            self._log.write(event, key=_pair(assigned.key), step=assigned.step, parts=parts)

    def _drop(self) -> None:
        """What was computed beyond the head does not count any more."""
        self._log.write("dropped", head=_pair(self._member.position.head))
        if isinstance(self._computing, LocalSteps):
            self._computing.drop()

    def _note_head(self) -> None:
        """Logs a head that came from a bootstrap or a transfer."""
        here = self._member.position
        if here.head != self._known:
            self._known = here.head
            self._log.write(
                "installed", key=_pair(here.head), step=here.step, digest=self._digest()
            )

    def _digest(self) -> str:
        """The digest for the judge; empty if nobody judges this run."""
        return self._replica.state.digest.hex() if self._judged else ""


def _given(assigned: Assigned) -> int:
    """How many samples it gives to a round; what it owes is no part of one that it attends."""
    return 0 if assigned.attends else sum(map(len, assigned.positions))


def _pair(key: Key | None) -> list[int] | None:
    return None if key is None else [key.term, key.round]


def _pairs(ranges: Iterable[PositionRange]) -> list[list[int]]:
    return [[part.start, part.stop] for part in ranges]


def main(kind: type[Worker] = Worker) -> int:
    """Trains; returns the exit code."""
    worker = kind(json.loads(Path(sys.argv[1]).read_text()))
    try:
        worker.run()
    except AndonError as error:
        worker.leave(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
