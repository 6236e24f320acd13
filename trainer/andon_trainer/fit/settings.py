"""The settings of one run of `Trainer.fit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from andon.protocol.schedules import LearningRateScaling
from andon_trainer.line_options import LineSchema

__all__ = ["PRECISIONS", "Fit"]

PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What autocast computes in; None: there is no autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Settings of one run of `Trainer.fit`.

    ```python
    Fit(batch_size=64, epochs=3, evaluate_every="epoch", keep_best="accuracy", precision="bfloat16")
    ```

    Raises:
        ValueError: a value is out of its range, or two settings contradict each other.
    """

    batch_size: int | None = None
    """Samples in one step, over all workers. Needed unless `data` returns a DataLoader."""
    steps: int | None = None
    """Steps after which training ends. Give this, or `epochs`."""
    epochs: int | None = None
    """Epochs after which training ends. Give this, or `steps`."""
    micro_batch_size: int | None = None
    """The most samples in one forward; None: all of a worker's share. With same bits each forward
    sees exactly so many, and it must be given."""
    loader_processes: int = 0
    """Number of processes in which each worker loads training samples; they stay to the end."""
    drop_last: bool = False
    """Whether the last, short batch of an epoch is left out."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """`float32`; or `bfloat16` or `float16` by autocast, the latter with a GradScaler."""
    max_grad_norm: float | None = None
    """The norm to which averaged gradients are clipped; None: they are not."""
    warmup_steps: int = 0
    """Steps in which a scheduler that is given by name raises the learning rate from 0."""
    warmup_ratio: float = 0.0
    """The same as a part of all steps, from 0 to 1. Give this, or `warmup_steps`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the optimizer's learning rates follow the batch: times the batch divided by
    `base_batch_size` (`linear`, usual for SGD), or times the square root of that (`sqrt`, usual for
    Adam). `none`: they are as they were made."""
    base_batch_size: int | None = None
    """With `lr_scaling`: the batch, in samples, that the optimizer's learning rates were chosen
    for."""
    scheduler_interval: Literal["step", "epoch"] = "step"
    """When the scheduler steps. ReduceLROnPlateau steps with each evaluation's loss instead."""
    evaluate_every: int | Literal["epoch"] = 0
    """Steps between evaluations, or `epoch`; there is one at the end, too. 0: none."""
    keep_best: str | None = None
    """Keep the checkpoint of the best evaluation by `loss`, or by the metric of this name."""
    patience: int | None = None
    """End after so many evaluations without a better one, by `keep_best`'s value or the loss."""
    mode: Literal["min", "max"] | None = None
    """Whether the least or the greatest value is the best. None: the least of a value whose name
    ends with `loss` or `error`, else the greatest."""
    checkpoint_every: int = 0
    """Steps between checkpoints. 0: the environment decides (`ANDON_CHECKPOINT_EVERY`)."""
    line_options: LineSchema | None = None
    """How the line works, if rank 0 of this launch serves it: the schedule, what is done about
    spikes, encodings, and whatever else is a flag of `andon serve`, as
    `andon_coordinator.config.LineOptions`. None: the environment decides."""
    run_dir: Path | str | None = None
    """Folder of the run's files. None: the environment decides (`ANDON_RUN_DIR`)."""
    resume: Path | str | None = None
    """`latest`: go on from the newest whole checkpoint in `run_dir`, or begin if there is none. A
    path: go on from this checkpoint. None: the environment decides (`andon run --resume`)."""
    save_to: Path | str | None = None
    """Where the main worker writes the final weights: a `.safetensors` file; or a folder, if the
    model has `save_pretrained`."""
    seed: int = 0
    """Seed of the weights, of the sample order, and of dropout: with a worker's rank, or, with same
    bits, with a grain's place."""
    progress: bool | None = None
    """Whether the main worker shows a progress bar. None: if its output is a terminal."""

    def __post_init__(self) -> None:
        """Refuses invalid values."""
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("Fit needs exactly one of steps= and epochs=: how long to train")
        for name in (
            "batch_size",
            "steps",
            "epochs",
            "micro_batch_size",
            "patience",
            "base_batch_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self._check_choices()
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give warmup_steps or warmup_ratio, not both")
        if self.warmup_steps < 0 or not 0 <= self.warmup_ratio <= 1:
            raise ValueError(
                "warmup_steps must be 0 or more, and warmup_ratio from 0 to 1, not "
                f"{self.warmup_steps} and {self.warmup_ratio}"
            )
        if (self.keep_best or self.patience) and not self.evaluate_every:
            raise ValueError(
                "keep_best and patience compare evaluations: say when to evaluate, "
                'evaluate_every="epoch" or a number of steps'
            )
        if self.mode and not (self.keep_best or self.patience):
            raise ValueError("mode is of keep_best or patience: give one of them, too")

    def _check_choices(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, not {self.precision}")
        scalings = [each.value for each in LearningRateScaling]
        if self.lr_scaling not in scalings:
            raise ValueError(f"lr_scaling is one of {', '.join(scalings)}, not {self.lr_scaling}")
        if (self.lr_scaling == "none") != (self.base_batch_size is None):
            raise ValueError(
                "lr_scaling and base_batch_size go together: how learning rates follow the batch, "
                "and for which batch they were chosen"
            )
        if self.scheduler_interval not in ("step", "epoch"):
            raise ValueError(f"scheduler_interval is step or epoch, not {self.scheduler_interval}")
        if self.mode not in (None, "min", "max"):
            raise ValueError(f"mode is min or max, not {self.mode}")
        every = self.evaluate_every
        if every != "epoch" and not (isinstance(every, int) and every >= 0):
            raise ValueError(f'evaluate_every is a number of steps or "epoch", not {every!r}')

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context for a forward and its loss."""
        dtype = PRECISIONS[self.precision]
        return torch.autocast(device.type, dtype, enabled=dtype is not None)

    @property
    def judged_by(self) -> str:
        """The value by which one evaluation is better than another."""
        return self.keep_best or "loss"

    @property
    def best_is(self) -> Literal["min", "max"]:
        """Whether the least or the greatest value is the best."""
        if self.mode:
            return self.mode
        return "min" if self.judged_by.endswith(("loss", "error")) else "max"
