"""What a loading process does before it loads a batch: random states, `set_epoch`, its stack.

Theory of operation. A loading process has a copy of the dataset as it was at the start. What must
not stay as it was travels with each batch's indices: the seeds for random augmentation, and the
arguments of `set_epoch` of the dataset or of a dataset in it. The indices are pickled on their way
to the loading process, and unpickling them there applies the calls. Iterating them seeds the
generators before each sample (see `randomness`), and `Collating` does so before the batch is
collated.

It also begins with `Beginning`, so that it can be asked where it is when the line waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from andon_trainer.data.dataset_epochs import METHOD, EpochCalls, set_changes
from andon_trainer.data.digest import nested_datasets
from andon_trainer.data.randomness import SampleLoading, SeededBatch
from andon_trainer.exchange.control.written_stacks import write_when_asked

__all__ = ["Beginning", "Collating", "Indices"]

_applied: EpochCalls = {}
"""The calls of `set_epoch` that this loading process has made."""
_set = b""
"""The attributes that were set in it."""
_loading: SampleLoading | None = None
"""Loads in this process; None in the script's."""
_batch: SeededBatch | None = None
"""What it loads now."""


class Indices(SeededBatch):
    """One batch's indices, with what a loading process must apply before it loads them."""

    def __init__(
        self,
        indices: list[Any],
        places: list[int],
        epoch_seed: int,
        calls: EpochCalls,
        changes: bytes = b"",
    ) -> None:
        """Describes a batch; see `SeededBatch` for the first arguments.

        Args:
            indices: of the dataset.
            places: of the samples, in their epoch.
            epoch_seed: the epoch's.
            calls: those of `set_epoch` that are due.
            changes: what the script has set of the dataset, pickled.
        """
        super().__init__(indices, places, epoch_seed)
        self.calls = calls
        self.changes = changes

    def __reduce__(self) -> tuple[Callable[..., Indices], tuple[Any, ...]]:
        """Unpickles to the same, after applying the calls in that process."""
        return _unpickle, (list(self), self.places, self.epoch_seed, self.calls, self.changes)


class Beginning:
    """How a loading process begins: it can be asked where it is; then the script's own function."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        """Calls `init`, the script's `worker_init_fn`, if there is one."""
        self._init = init

    def __call__(self, worker: int) -> None:
        """Called once, in the loading process."""
        write_when_asked()
        if self._init is not None:
            self._init(worker)


class Collating:
    """A script's `collate_fn` in a loading process, under a seed of its own."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        """Calls `collate`."""
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        """The batch."""
        if _loading is not None and _batch is not None:
            samples = _loading.finished(_batch, samples)
        return self._collate(samples)


def _unpickle(
    indices: list[Any], places: list[int], epoch_seed: int, calls: EpochCalls, changes: bytes
) -> Indices:
    """Unpickles a batch's indices; in a loading process, prepares it to load them."""
    global _applied, _batch, _loading, _set
    batch = Indices(indices, places, epoch_seed, calls, changes)
    info = get_worker_info()
    if info is not None:
        if changes != _set or calls != _applied:
            parts = list(nested_datasets(info.dataset))
            if changes != _set:
                set_changes(info.dataset, changes)
            for place, (arguments, named) in calls.items():
                getattr(parts[place], METHOD)(*arguments, **named)
            _applied, _set = calls, changes
        if _loading is None:
            _loading = SampleLoading(info.dataset)
        _batch = batch
        _loading.begin(batch)
    return batch
