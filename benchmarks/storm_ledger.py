"""Counts what became of each sample of a storm, from what workers wrote while they trained.

Theory of operation. A worker writes `computes` before it sends a gradient, and `kept` after its
optimizer moved the model. Both name the commit, and `kept` also names the commit that the model had
before; that name travels with the weights, through checkpoints and transfers. So the commits form a
tree, and the model that is there at the end has one path of it: its history. A gradient is in a
commit if the worker computed it for that commit and anyone kept that commit, since an all-reduce
ends for all with the gradients of all. So a worker that is killed between the two lines is counted
right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["Commit", "Counts", "commits_of", "count", "history_of", "longest_pause_s", "passed_by"]
__all__ += ["computed_of", "read_ledger", "samples_per_s"]

Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Commit:
    """A step that moved a model; `at` is in seconds since 1970."""

    name: str
    parent: str
    at: float
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Samples of a run."""

    kept: int
    """In the history of the model, each as often as it is there."""
    lost: int
    """Passed over: in no step of the history, and not to come any more."""
    doubled: int
    """In the history more than once; each time after the first counts."""
    recomputed: int
    """Computed more than once; each time after the first counts."""
    wasted: int
    """Computed, and not for the history."""


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a ledger; a worker that has written none has an empty one."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def commits_of(ledgers: Iterable[Events]) -> dict[str, Commit]:
    """Every commit that anybody kept, by name."""
    kept: dict[str, tuple[str, float]] = {}
    sent: dict[str, list[int]] = {}
    for ledger in ledgers:
        # A commit that was tried twice under one name has the later samples.
        own = {event["commit"]: event["positions"] for event in ledger if _names(event, "computes")}
        for name, positions in own.items():
            sent.setdefault(name, []).extend(positions)
        for event in ledger:
            if _names(event, "kept"):
                known = kept.setdefault(event["commit"], (event["parent"], event["at"]))
                kept[event["commit"]] = known[0], min(known[1], event["at"])
    return {
        name: Commit(name, parent, at, tuple(sent.get(name, ())))
        for name, (parent, at) in kept.items()
    }


def _names(event: Mapping[str, Any], kind: str) -> bool:
    return event["event"] == kind and bool(event["commit"])


def history_of(commits: Mapping[str, Commit], last: str) -> list[Commit]:
    """The commits that the model with the commit `last` has, first to last.

    Raises:
        ValueError: a commit is its own ancestor.
    """
    history: dict[str, Commit] = {}
    while last in commits:
        if last in history:
            raise ValueError(f"the commit {last} is its own ancestor")
        history[last] = commits[last]
        last = commits[last].parent
    return list(history.values())[::-1]


def computed_of(ledgers: Iterable[Events]) -> Counter[int]:
    """How often each position was computed."""
    return Counter(
        position
        for ledger in ledgers
        for event in ledger
        if event["event"] == "computes"
        for position in event["positions"]
    )


def passed_by(ledgers: Sequence[Events]) -> set[int]:
    """The positions that fixed shards have gone past, where slot `i` has each R-th from `i` on.

    A worker goes on behind the last samples that it took, whatever became of them.
    """
    passed: set[int] = set()
    for slot, ledger in enumerate(ledgers):
        taken = [event["positions"] for event in ledger if event["event"] == "computes"]
        if taken:
            passed.update(range(slot, max(taken[-1]) + 1, len(ledgers)))
    return passed


def count(kept: Iterable[int], passed: Iterable[int], computed: Counter[int]) -> Counts:
    """What became of the samples: `kept` in the history, `passed` over by the data's order."""
    times = Counter(kept)
    total = times.total()
    return Counts(
        kept=total,
        lost=sum(position not in times for position in passed),
        doubled=total - len(times),
        recomputed=computed.total() - len(computed),
        wasted=computed.total() - total,
    )


def samples_per_s(history: Iterable[Commit], begin: float, end: float) -> float:
    """Samples of the history's commits within a time, in a second."""
    within = [len(each.positions) for each in history if begin <= each.at < end]
    return sum(within) / (end - begin)


def longest_pause_s(commits: Iterable[Commit], begin: float, end: float) -> float:
    """The longest time in which nobody committed anything, of those that began within a time.

    One that lasts beyond `end` counts to its own end, if anything was committed later.
    """
    moments = sorted(each.at for each in commits if each.at > begin)
    pauses = [after - before for before, after in pairwise([begin, *moments]) if before < end]
    last = moments[-1] if moments else begin
    return max([*pauses, end - last])
