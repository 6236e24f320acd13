"""Compares two lines that differ in one setting: each worker process is on both and alternates.

All workers start each step at a barrier, and the time of a step is that of its slowest worker.
Services and workers share the machine's cores, so a difference in CPU time shows in full. Over a
real network, the link would hide part of it.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beside_gloo import outputs_of

__all__ = ["WARM_UP", "Side", "Steps", "WorkerSpec", "compare", "figures_of"]

WARM_UP = 2
"""Pairs that don't count: they set up connections and buffers, and bootstrap both runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two lines, and how a worker connects to it."""

    address: str
    run_id: str
    pid: int
    """The service's."""
    path: str = "wire"
    """One of PATHS."""
    certs: str = ""
    """The folder of certificates; empty: plaintext."""
    checked: bool = True
    """Whether chunks have checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The parameters of one worker process."""

    mib: int
    workers: int
    pairs: int
    rank: int
    sides: tuple[Side, Side]
    rendezvous: str
    """The rendezvous file of the Gloo group, which provides the barriers."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The measured steps of one line."""

    seconds: list[float]
    processor_s: list[float]
    """The sum over the service and all workers."""


def compare(
    sides: tuple[Side, Side], folder: Path, *, mib: int, workers: int, pairs: int
) -> tuple[Steps, Steps]:
    """Measures the steps of both lines.

    Args:
        sides: both lines; each serves this number of workers.
        folder: for the rendezvous file.
        mib: the size of the model.
        workers: on each line.
        pairs: steps of each line that count.

    Raises:
        RuntimeError: a worker failed.
    """
    specs = [
        WorkerSpec(
            mib=mib,
            workers=workers,
            pairs=pairs,
            rank=rank,
            sides=sides,
            rendezvous=str(folder / "rendezvous"),
        )
        for rank in range(workers)
    ]
    seen = outputs_of("two_lines_worker.py", [asdict(spec) for spec in specs])
    first, second = (
        Steps(
            [max(seconds for seconds, _ in each) for each in zip(*of_workers, strict=True)],
            [sum(spent for _, spent in each) for each in zip(*of_workers, strict=True)],
        )
        for of_workers in zip(*seen, strict=True)
    )
    return first, second


def figures_of(first: Steps, second: Steps, names: tuple[str, str]) -> dict[str, Any]:
    """Medians of both lines, in seconds, and their `ratio`: the second over the first.

    `processor_ratio` is the ratio of CPU time, which other load on the machine affects less.
    """
    ratios = [theirs / ours for ours, theirs in zip(first.seconds, second.seconds, strict=True)]
    medians = [statistics.median(each.seconds) for each in (first, second)]
    spent = [statistics.median(each.processor_s) for each in (first, second)]
    return {
        f"{names[0]}_s": round(medians[0], 6),
        f"{names[1]}_s": round(medians[1], 6),
        "ratio": round(medians[1] / medians[0], 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        f"{names[0]}_processor_s": round(spent[0], 6),
        f"{names[1]}_processor_s": round(spent[1], 6),
        "processor_ratio": round(spent[1] / spent[0], 4) if spent[0] else None,
    }
