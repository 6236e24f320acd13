"""What all workers do together: evaluations, means, and what they gather."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from andon.protocol.order import splitmix64
from andon_trainer.averaging.broadcast import NormBuffers
from andon_trainer.averaging.copied_buffers import script_buffers
from andon_trainer.averaging.held_buffers import Held
from andon_trainer.core.events import Assigned
from andon_trainer.data.evaluation import Coverage, EvaluationShare, WholeBatches
from andon_trainer.data.grain_seeds import GrainSeeds
from andon_trainer.data.loader import LineLoader, loader_of_script
from andon_trainer.errors import RunOver
from andon_trainer.hosts.calls import answer_in_host
from andon_trainer.line.gathering import (
    concatenate,
    first_not_finite_row,
    framed,
    gather_bytes,
    own_rows,
    pack,
    refuse_size,
    unframed,
    unpack,
)
from andon_trainer.line.session import LineSession
from andon_trainer.line.tallies import Tallies
from andon_trainer.place.audit import AuditMember
from andon_trainer.schedules.loop_steps import LoopSteps
from andon_trainer.state.best import BEST, BestSoFar

log = logging.getLogger(__name__)

__all__ = ["Together"]


class Together:
    """Evaluation, and what workers tell each other between two steps or in a loop body."""

    def __init__(self, session: LineSession) -> None:
        """Nothing was evaluated yet."""
        self._session = session
        self.coverage = Coverage()
        self._best: BestSoFar | None = None
        self._tallies = Tallies()

    def split(self, loader: DataLoader[Any] | LineLoader) -> Iterator[Any]:
        """See `Line.split`."""
        session = self._session
        given = loader_of_script(loader)
        session.member.talk.show("EVALUATING")
        if session.worker.config.same_bits:
            return self._whole_batches(given)
        assigned = session.member.position.assigned
        place = self._place(assigned)
        seed = splitmix64(session.worker.config.seed) ^ session.step
        units, batches = session.splitting.split(given, place, seed=seed)
        self.coverage.divided(units)
        # A worker that learns has no share: what it computes counts for nothing, and the results
        # are the others'. It gets a batch, so that the script has something to compute.
        return islice(batches, 1) if self._attends(assigned) else batches

    def _whole_batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """This worker's batches, and what others are lost with; then all workers' tallies."""
        session = self._session
        self._tallies = tallies = Tallies()
        seed = splitmix64(session.worker.config.seed) ^ session.step
        batches = session.splitting.whole_batches(loader, seed=seed)
        missing: list[int] | None = None
        modules = session.worker.replica.modules
        # A forward in training mode moves them, on each worker by other batches.
        held = [Held(NormBuffers(modules)), Held(script_buffers(modules))]
        for buffers in held:
            buffers.begin()
        while missing is None or missing:
            yield from self._part_of(batches, missing)
            assert batches.count is not None
            missing = tallies.missing(batches.count)
        for buffers in held:
            buffers.put_away()
        # Whatever was lost has been computed by others.
        self.coverage.complete = True
        tallies.end()
        GrainSeeds(session.worker.config.seed).between(session.step)

    def _part_of(self, batches: WholeBatches, missing: list[int] | None) -> Iterator[Any]:
        """This worker's part of the batches that are missing; then it has all workers' tallies."""
        session, tallies = self._session, self._tallies
        seeds = GrainSeeds(session.worker.config.seed)
        assigned = session.member.position.assigned
        attends = self._attends(assigned)
        place = self._place(assigned)
        for number, batch in batches.deal(place, missing):
            # A worker that learns computes one, so that its script has something to do.
            if not (attends and tallies.present is not None):
                tallies.begin_batch(number)
                seeds.evaluation(session.step, number)
                yield batch
        if attends:
            tallies.forget_own()
        if assigned is not None:
            found = self._gather_bytes(tallies.packed())
            told = list(chain.from_iterable(found.values()))
            if isinstance(session.member, AuditMember):
                self._compare(session.member, told)
            for each in told:
                tallies.take(each)
            if self.coverage.lacks_any(found, assigned.key):
                self.coverage.shrink(list(found), assigned.key)

    def _place(self, assigned: Assigned | None) -> EvaluationShare:
        """Which part of an evaluation this process has.

        Until its first round a worker does not know who evaluates beside it: at the start the
        others may still wait for their weights. Every worker then evaluates everything, and the
        mean of the same number is that number.
        """
        if assigned is None:
            return self.coverage.place(0, 1, None)
        rank = None if self._attends(assigned) else assigned.rank
        place = self.coverage.place(rank, assigned.world_size, assigned.key)
        host = self._session.worker.host
        return place if host is None else replace(place, part=host.rank, parts=host.size)

    def _attends(self, assigned: Assigned | None) -> bool:
        """Whether this worker only sees what others evaluate, of whom somebody is left."""
        if assigned is None or not assigned.attends:
            return False
        return not self.coverage.has_share(assigned.rank, assigned.key)

    def _compare(self, member: AuditMember, told: Sequence[bytes]) -> None:
        """Compares what was recomputed with what the line's workers told, which takes its place.

        What a worker was lost with was missing on the line then, and was told of later.
        """
        differing = [number for each in told for number in self._tallies.differing(each)]
        if differing:
            member.differs(sorted(set(differing)))
        self._tallies.forget_own()

    def tally(
        self, value: float | torch.Tensor | Mapping[str, float | torch.Tensor], n: float
    ) -> None:
        """See `Line.tally`."""
        self._same_bits_only("tally", "line.mean")
        self._tallies.add(value, float(n))

    def tallied(self) -> float | dict[str, float]:
        """See `Line.tallied`."""
        self._same_bits_only("tallied", "line.mean")
        return self._tallies.means()

    def _same_bits_only(self, what: str, instead: str) -> None:
        if not self._session.worker.config.same_bits:
            raise RuntimeError(
                f"line.{what} is for lines with same_bits, which deal whole batches: use {instead}"
            )

    def mean(
        self,
        value: float | torch.Tensor | Mapping[str, float | torch.Tensor],
        weight: float = 1.0,
    ) -> float | dict[str, float]:
        """See `Line.mean`."""
        if not (weight >= 0 and weight < float("inf")):
            raise ValueError(f"weight must be finite and at least 0, not {weight}")
        self._session.require_between_steps("mean")
        if self._session.worker.config.same_bits:
            raise RuntimeError(
                "line.mean adds up what each worker has, and with same_bits a mean may not depend "
                "on the workers: call line.tally(loss_sum, n) for each batch of line.split, and "
                "line.tallied() after the loop"
            )
        if not isinstance(value, Mapping):
            return self._mean(float(value), float(weight))
        names = sorted(value)
        mine = {name: torch.tensor(float(value[name]), dtype=torch.float64) for name in names}
        weighed = self._gather({"numbers": mine, "weight": float(weight)})
        if any(part["numbers"].keys() != mine.keys() for part in weighed):
            raise ValueError(
                f"this worker gave line.mean {', '.join(names) or 'nothing'}, and another worker "
                "other names: give the same ones on every worker, also where there is no sample"
            )
        return {name: _weighted(weighed, name) for name in value}

    def gather(self, value: Any) -> Any:
        """See `Line.gather`."""
        session = self._session
        if session.manual is None and session.stepper is not None and session.stepper.in_body:
            return self._gather_in_body(session.stepper, value)
        session.require_between_steps("gather")
        parts = self._gather(value)
        return concatenate(parts, value)

    def _gather_in_body(self, steps: LoopSteps, value: Any) -> Any:
        """What all workers give in this loop body; gradients reach this worker's own rows."""
        data = b""
        if not self._session.alone:  # A worker that is alone copies nothing from its GPU.
            data = pack(value)
            refuse_size(data)
            bad = first_not_finite_row(value)
            if bad is not None:
                steps.refuse_rows(bad)
        rows = steps.gather(data)
        if rows is None or not any(rows.given):
            return own_rows(value)
        mine = own_rows(value, rows.factor)
        parts = [
            mine if rank == rows.rank else unpack(given)
            for rank, given in enumerate(rows.given)
            if given or rank == rows.rank
        ]
        if rows.rank >= len(rows.given):
            parts.append(mine)  # This worker only attends: it has no rows, and a graph.
        return concatenate(parts, value)

    def best(
        self, value: float, mode: Literal["min", "max"] = "min", patience: int | None = None
    ) -> bool:
        """See `Line.best`."""
        session = self._session
        session.require_between_steps("best")
        if self._best is None:
            self._best = BestSoFar()
            session.worker.replica.register(BEST, self._best)
        # What decides must be one number, even if a script passes its own worker's.
        if session.worker.config.same_bits:
            # It is the same everywhere if it comes from `tallied`; a mean of it would be rounded.
            one = float(self._gather(float(value))[0])
        else:
            one = self._mean(float(value), 1.0)
        is_best = self._best.take(one, mode, session.step)
        if is_best:
            session.worker.checkpoints.keep_best(session.step)
        elif patience is not None and self._best.since >= patience:
            session.want_stop(f"{self._best.since} evaluations without a better one")
        return is_best

    def _mean(self, value: float, weight: float) -> float:
        try:
            mean, _, contributors = self._session.member.scalar_all_reduce(value, weight)
        except RunOver as over:
            self._warn_of_being_alone(over)
            return value if weight else math.nan
        assigned = self._session.member.position.assigned
        round_ = assigned.key if assigned else None
        if self.coverage.lacks(contributors, round_):
            # The answer is the same on every worker that is left, so all of them ask.
            self.coverage.lost(self._ranks_left(), round_)
        return mean

    def _gather(self, value: Any) -> list[Any]:
        """What each worker gave, by rank; numbers as tensors."""
        assigned = self._session.member.position.assigned
        if assigned is None:
            return [unpack(pack(value))]  # See `_place`: it evaluates everything.
        found = self._gather_bytes(pack(value))
        if self.coverage.lacks_any(found, assigned.key):
            self.coverage.lost(list(found), assigned.key)
        return [unpack(each) for parts in found.values() for each in parts]

    def _gather_bytes(self, data: bytes) -> dict[int, list[bytes]]:
        """What the processes of each worker gave, by the worker's rank."""
        session = self._session
        assigned, host = session.member.position.assigned, session.worker.host
        rank = assigned.rank if assigned else 0

        def gather(given: list[bytes]) -> dict[int, bytes]:
            return gather_bytes(session.whole, rank, framed(given))

        try:
            if host is None:
                found = gather([data])
            else:
                found = answer_in_host(host, "line.gather", data, gather)
        except RunOver as over:
            self._warn_of_being_alone(over)
            return {rank: [data]}
        return {each: unframed(parts) for each, parts in found.items()}

    def _warn_of_being_alone(self, over: RunOver) -> None:
        """The script goes on, to its `torch.save`: an exception here would end it before that."""
        self.coverage.complete = False
        log.warning(
            "%s while it had no step to finish, so nobody else answers: line.mean and line.gather "
            "give what this worker has alone, and line.covered is False",
            over,
        )

    def _ranks_left(self) -> list[int]:
        """The ranks that still take part."""
        return list(self._gather_bytes(b""))

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """See `Line.busy`."""
        self._session.member.talk.show("BUSY", what)
        try:
            yield
        finally:
            self._session.member.talk.show("IDLE")


def _weighted(parts: Sequence[Any], name: str) -> float:
    """The weighted mean of a number, in float64 and rank order; nan if all weights are 0."""
    total = weights = 0.0
    for part in parts:
        weight = float(part["weight"])
        if weight:  # A number without weight may be nan: an empty share has no mean.
            total += weight * float(part["numbers"][name])
            weights += weight
    return total / weights if weights else float("nan")
