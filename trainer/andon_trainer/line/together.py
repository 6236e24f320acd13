"""Calls of `Line` that all workers make together between steps: evaluation and its mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch.utils.data import DataLoader

from andon.protocol.order import splitmix64
from andon_trainer.data.evaluation import Coverage
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
from andon_trainer.line.properties import LineProperties
from andon_trainer.schedules.loop_steps import LoopSteps
from andon_trainer.state.best import BEST, BestSoFar

log = logging.getLogger(__name__)

__all__ = ["Together"]


class Together(LineProperties):
    """What `Line` offers between two steps."""

    _coverage: Coverage
    _best: BestSoFar | None = None

    def split(self, loader: DataLoader[Any] | LineLoader) -> Iterator[Any]:
        """Yields this worker's share of a loader's samples; all shares together hold each once.

        Use it for evaluation, and combine the results with `line.mean`. Samples come in the order
        of the dataset or of the loader's own sampler. Batches of a batch sampler or of an
        `IterableDataset` are not divided: each goes to one worker, and every worker reads the
        whole stream. If a worker is lost, so is its share; `line.covered` tells. Before its first
        step a worker gets all samples.

        ```python
        for x, y in line.split(val_loader):
            total += F.cross_entropy(model(x), y, reduction="sum").item()
            n += len(y)
        val_loss = line.mean(total / max(n, 1), weight=n)
        ```

        Args:
            loader: with whatever sampler, `collate_fn` and loading processes it has; processes
                stay between evaluations if it says `persistent_workers=True`. Its batches are
                moved to `line.device`. The prepared loader may be given, too: to evaluate on the
                training set.

        Raises:
            TypeError: it is what `line.shards` returned.
        """
        given = loader_of_script(loader)
        self._member.talk.show("EVALUATING")
        # Until its first round a worker does not know who evaluates beside it: at the start the
        # others may still wait for their weights. Every worker then evaluates everything, and
        # the mean of the same number is that number.
        assigned = self._member.position.assigned
        if assigned is None:
            place = self._coverage.place(0, 1, None)
        else:
            place = self._coverage.place(assigned.rank, assigned.world_size, assigned.key)
            if (host := self._worker.host) is not None:
                place = replace(place, part=host.rank, parts=host.size)
        seed = splitmix64(self.seed) ^ self.step
        units, batches = self._splitting.split(given, place, seed=seed)
        self._coverage.divided(units)
        return batches

    @property
    def covered(self) -> bool:
        """Whether what followed the last `line.split` covered every sample of it.

        It becomes False, on every worker, in a `line.mean` or `line.gather` that lacks a worker's
        samples, and stays so until the next `line.split`. Evaluate again, and the workers that are
        left divide all samples.
        """
        return self._coverage.complete

    @overload
    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float: ...

    @overload
    def mean(
        self, value: Mapping[str, float | torch.Tensor], weight: float = 1.0
    ) -> dict[str, float]: ...

    def mean(
        self,
        value: float | torch.Tensor | Mapping[str, float | torch.Tensor],
        weight: float = 1.0,
    ) -> float | dict[str, float]:
        """Returns the weighted mean of all workers' values: the same number on every worker.

        Every worker must call it, between two steps.

        ```python
        val = line.mean({"loss": total / n, "accuracy": right / n}, weight=n)
        ```

        Args:
            value: a number or a tensor with one element; or several of them by name, the same
                names on every worker.
            weight: this worker's weight in the mean, such as its number of samples.

        Returns:
            The mean, computed in float64; nan if all weights are 0. Of several numbers the means
            by name.

        Raises:
            ValueError: the weight is negative or not finite, or the workers' names differ.
            RuntimeError: a step is under way; its workers wait for gradients, not for this.
            LineHalted: the line stopped.
        """
        if not (weight >= 0 and weight < float("inf")):
            raise ValueError(f"weight must be finite and at least 0, not {weight}")
        self._require_between_steps("mean")
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
        """Returns what all workers give, concatenated in the order of ranks, on every worker.

        Every worker must call it. Integers, float64 and booleans arrive exactly.

        Between two steps it is meant for small values: metrics, predictions of a validation set.
        Before its first step a worker gets only its own, as it evaluates everything then.

        ```python
        predicted = line.gather(torch.cat(predicted))  # of all samples, in the loader's order
        ranks = line.gather(line.rank)  # tensor([0, 1])
        ```

        In the body of a training loop, before `line.backward`, it is differentiable, for losses
        that compare samples with each other. Compute the same loss of all rows on every worker:
        the mean over workers is then the gradient of one process with the whole batch. In a step
        that is void it returns this worker's own rows.

        ```python
        z = line.gather(F.normalize(model(x), dim=1))
        line.backward(contrastive_loss(z))
        ```

        Args:
            value: a tensor of shape (n, ...), where n may differ from worker to worker; a number
                or a tensor without dimensions, which counts as n = 1; or lists, tuples and dicts
                of them, of the same structure on every worker. At most 16 MiB.

        Returns:
            The same structure of tensors, of shape (sum of all n, ...), on the device of `value`;
            those of numbers are on the CPU.

        Raises:
            TypeError: there is something else in the value.
            ValueError: the value is too large, or the workers' structures, dtypes or shapes differ.
            RuntimeError: the loop body has gone backward, or has a part of this worker's share;
                the schedule or the host can't gather in a loop body; the line's service is too old.
            LineHalted: the line stopped, or a row with a gradient is not finite.
        """
        if self._manual is None and self._stepper is not None and self._stepper.in_body:
            return self._gather_in_body(self._stepper, value)
        self._require_between_steps("gather")
        parts = self._gather(value)
        return concatenate(parts, value)

    def _gather_in_body(self, steps: LoopSteps, value: Any) -> Any:
        """What all workers give in this loop body; gradients reach this worker's own rows."""
        data = b""
        if self.world_size > 1:  # A worker that is alone copies nothing from its GPU.
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
        return concatenate(parts, value)

    def best(
        self, value: float, mode: Literal["min", "max"] = "min", patience: int | None = None
    ) -> bool:
        """Returns whether an evaluation is the best so far: the same on every worker.

        Every worker must call it, between two steps, once for each evaluation. The best value is
        in checkpoints and goes to new workers. If the run has a folder, the checkpoint of the best
        step is written and kept, and `checkpoints/best` leads to it.

        ```python
        if line.best(val_loss, patience=3) and line.is_main:
            print("best so far:", val_loss)
        ```

        Args:
            value: what `line.mean` returned; nan is never the best.
            mode: whether the smallest or the greatest value is the best.
            patience: calls `line.stop` after so many evaluations without a better one; None: never.

        Raises:
            ValueError: the mode is neither `min` nor `max`.
            RuntimeError: a step is under way.
            LineHalted: the line stopped.
        """
        self._require_between_steps("best")
        if self._best is None:
            self._best = BestSoFar()
            self._worker.replica.register(BEST, self._best)
        # What decides must be one number, even if a script passes its own worker's.
        is_best = self._best.take(self._mean(float(value), 1.0), mode, self.step)
        if is_best:
            self._worker.checkpoints.keep_best(self.step)
        elif patience is not None and self._best.since >= patience:
            self._want_stop(f"{self._best.since} evaluations without a better one")
        return is_best

    def _mean(self, value: float, weight: float) -> float:
        try:
            mean, _, contributors = self._member.scalar_all_reduce(value, weight)
        except RunOver as over:
            self._warn_of_being_alone(over)
            return value if weight else math.nan
        if self._coverage.lacks(contributors):
            # The answer is the same on every worker that is left, so all of them ask.
            assigned = self._member.position.assigned
            self._coverage.lost(self._ranks_left(), assigned.key if assigned else None)
        return mean

    def _gather(self, value: Any) -> list[Any]:
        """What each worker gave, by rank; numbers as tensors."""
        assigned = self._member.position.assigned
        if assigned is None:
            return [unpack(pack(value))]  # See `split`: it evaluates everything.
        found = self._gather_bytes(pack(value))
        if self._coverage.lacks(len(found)):
            self._coverage.lost(list(found), assigned.key)
        return [unpack(each) for parts in found.values() for each in parts]

    def _gather_bytes(self, data: bytes) -> dict[int, list[bytes]]:
        """What the processes of each worker gave, by the worker's rank."""
        assigned, host = self._member.position.assigned, self._worker.host
        rank = assigned.rank if assigned else 0
        try:
            if host is None:
                found = gather_bytes(self._member, rank, framed([data]))
            else:
                found = answer_in_host(
                    host,
                    "line.gather",
                    data,
                    lambda given: gather_bytes(self._member, rank, framed(given)),
                )
        except RunOver as over:
            self._warn_of_being_alone(over)
            return {rank: [data]}
        return {each: unframed(parts) for each, parts in found.items()}

    def _warn_of_being_alone(self, over: RunOver) -> None:
        """The script goes on, to its `torch.save`: an exception here would end it before that."""
        self._coverage.complete = False
        log.warning(
            "%s while it had no step to finish, so nobody else answers: line.mean and line.gather "
            "give what this worker has alone, and line.covered is False",
            over,
        )

    def _ranks_left(self) -> list[int]:
        """The ranks that still take part."""
        return list(self._gather_bytes(b""))

    def _require_between_steps(self, what: str) -> None:
        steps = self._manual or self._stepper
        if steps is not None and steps.midway:
            raise RuntimeError(
                f"step {self.step + 1} is under way, and line.{what} is taken between two steps: "
                "call it once line.committed is true, or outside the loop"
            )

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Shows in `andon status` what this worker does while the others wait for it.

        A worker is never dropped for being slow; this only tells people why.

        ```python
        with line.busy("upload"):
            upload(model)
        ```

        Args:
            what: a few words.
        """
        self._member.talk.show("BUSY", what)
        try:
            yield
        finally:
            self._member.talk.show("IDLE")


def _weighted(parts: Sequence[Any], name: str) -> float:
    """The weighted mean of a number, in float64 and rank order; nan if all weights are 0."""
    total = weights = 0.0
    for part in parts:
        weight = float(part["weight"])
        if weight:  # A number without weight may be nan: an empty share has no mean.
            total += weight * float(part["numbers"][name])
            weights += weight
    return total / weights if weights else float("nan")
