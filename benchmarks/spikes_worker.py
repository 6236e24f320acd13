"""A worker of the benchmark of spikes: it trains, and does what was planted for it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from convergence_tasks import Drawn, task_of, unseen_loss
from spikes import LASTING, LOUD, SpikeKind, SpikeSpec
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torch.utils.hooks import RemovableHandle

from andon_trainer import AndonError, Line


def work(spec: SpikeSpec) -> dict[str, Any]:
    """Trains; returns the loss on unseen data."""
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    task = task_of(spec.task)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate)
    planted = {batch: (SpikeKind(kind), slot) for batch, kind, slot in spec.planted}
    line = Line(
        address=spec.address,
        run_id=spec.run_id,
        run_dir=spec.run_dir or None,
        checkpoint_every=spec.checkpoint_every or None,
    )
    drawn = Drawn(task, spec.batch * spec.batches, spec.seed)
    kept = [at for at in range(len(drawn)) if at // spec.batch not in spec.left_out]
    model, optimizer, loader = line.prepare(
        model, optimizer, DataLoader(Subset(drawn, kept), batch_size=spec.batch)
    )
    told: dict[str, Any] = {}
    fault = Fault(model, {})
    try:
        for _ in line.epochs(1):
            for x, y, positions in loader:
                if not told:
                    # In the first batch it is the worker's number. It changes when another goes,
                    # and what is planted stays with its process.
                    told["worker"] = line.rank
                    mine = {at: it for at, it in planted.items() if it[1] in (-1, line.rank)}
                    fault = Fault(model, mine)
                fault.turn(int(positions[0]) // spec.batch)
                if spec.decays_over:
                    left = 0.5 + 0.5 * math.cos(math.pi * line.step / spec.decays_over)
                    optimizer.param_groups[0]["lr"] = spec.learning_rate * left
                model.zero_grad()
                with fault.gradients():
                    loss = task.loss_of(model, x, fault.labels(y))
                    line.backward(loss * LOUD if fault.loud else loss)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    except AndonError as error:
        return {**told, "left": str(error)}
    told |= {"loss": unseen_loss(task, model), "steps": line.step}
    line.close()
    return told


class Fault:
    """What is wrong with this worker in the present batch."""

    def __init__(self, model: nn.Module, planted: dict[int, tuple[SpikeKind, int]]) -> None:
        """Takes what is planted for this worker, by the batch in which it begins."""
        self._model = model
        self._planted = planted
        self._kind: SpikeKind | None = None
        self._lasts_for = 0

    @property
    def loud(self) -> bool:
        """Whether its loss is far too large."""
        return self._kind in (SpikeKind.BATCH, SpikeKind.DATA)

    def turn(self, batch: int) -> None:
        """A batch begins."""
        begun = [at for at, (kind, _) in self._planted.items() if at <= batch and kind in LASTING]
        self._kind = self._planted.get(batch, (None, -1))[0]
        if self._kind is SpikeKind.RUIN:
            with torch.no_grad():
                # All of them: what stands before a normalisation makes no difference by its size.
                for parameter in self._model.parameters():
                    parameter.mul_(LOUD)
        if begun:
            self._kind, self._lasts_for = self._planted[begun[0]][0], batch - begun[0]

    def labels(self, y: Tensor) -> Tensor:
        """Those of other samples, if they are wrong."""
        return y.roll(1, 0) if self._kind is SpikeKind.LABELS else y

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Makes gradients too large, as a wrong scale in a kernel does."""
        if self._kind not in (SpikeKind.BLOCK, SpikeKind.SMALL_BLOCK, SpikeKind.GROWS):
            yield
            return
        largest = max(self._model.parameters(), key=Tensor.numel)
        # A GPT's own modules are blocks of the layout; here that is the last norm.
        parts = [list(each.parameters()) for each in self._model.children()]
        smallest = min(filter(None, parts), key=lambda each: sum(map(Tensor.numel, each)))
        scaled = {
            SpikeKind.BLOCK: ([largest], 10 * LOUD),
            SpikeKind.SMALL_BLOCK: (smallest, 3.0),
            SpikeKind.GROWS: (list(self._model.parameters()), 1.03 ** min(self._lasts_for, 100)),
        }
        parameters, factor = scaled[self._kind]
        hooks = [_scales(each, factor) for each in parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _scales(parameter: nn.Parameter, factor: float) -> RemovableHandle:
    hook: RemovableHandle = parameter.register_hook(  # type: ignore[no-untyped-call]  # torch's own
        lambda gradient: gradient * factor
    )
    return hook


if __name__ == "__main__":
    for given in sys.stdin:
        print(json.dumps(work(SpikeSpec.from_json(given))), flush=True)
