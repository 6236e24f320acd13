"""Measures calls of `torch.distributed` beside Gloo's; `exchange.py --paths c10d` prints them.

Each process is a rank of two groups, one of Andon and one of Gloo, and makes the same call in each,
in turns: ours, theirs, ours, theirs. Small calls are timed many at a time, since one is as short as
the barrier before it. All ranks start together; a call takes as long as its slowest rank.

A size is that of the larger tensor: the input of all_reduce, reduce_scatter and all_to_all, and the
output of all_gather.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from beside_gloo import outputs_of
from service import serving

__all__ = ["CALLS", "WARM_UP", "CallCase", "RankSpec", "line_of", "measure"]

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
WARM_UP = 2
"""Pairs that don't count: they open connections, and touch memory for the first time."""
_AT_ONCE_KIB = 4096
"""How much of small calls is timed at once."""
_MOST_AT_ONCE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """One row: what is called, with how much, among how many."""

    call: str
    """One of CALLS."""
    ranks: int
    kib: int
    """KiB of float32."""
    backend: str = "andon"
    gate: str = "all"
    """ANDON_GATE: whether sums are checked for values that are not finite."""

    @property
    def at_once(self) -> int:
        """How many calls are timed as one."""
        return min(max(_AT_ONCE_KIB // self.kib, 1), _MOST_AT_ONCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec(CallCase):
    """The parameters of one process."""

    pairs: int
    rank: int
    rendezvous: str
    """The rendezvous file of the groups."""


def measure(case: CallCase, pairs: int) -> dict[str, Any]:
    """Runs a service and the ranks of one case; returns its row.

    `ratio` is Gloo's median over ours: above 1, ours is faster. `spread` is the smallest and the
    largest ratio of a pair. Times are those of one call. CPU time is a mean, summed over all ranks.
    """
    with TemporaryDirectory() as folder, serving(Path(folder), case.ranks) as service:
        specs = [
            RankSpec(**asdict(case), pairs=pairs, rank=rank, rendezvous=str(Path(folder) / "gloo"))
            for rank in range(case.ranks)
        ]
        seen = outputs_of(
            "c10d_worker.py",
            [asdict(spec) for spec in specs],
            ANDON_ADDRESS=service.address,
            ANDON_GATE=case.gate,
        )
    ours, gloo = (
        [max(times) / case.at_once for times in zip(*(each[side] for each in seen), strict=True)]
        for side in ("ours_s", "gloo_s")
    )
    ratios = [theirs / mine for mine, theirs in zip(ours, gloo, strict=True)]
    ours_s, gloo_s = statistics.median(ours), statistics.median(gloo)
    cpu = {
        side: sum(statistics.mean(each[side]) for each in seen) / case.at_once
        for side in ("ours_cpu_s", "gloo_cpu_s")
    }
    return {
        "path": "c10d",
        **asdict(case),
        "at_once": case.at_once,
        "ours_s": round(ours_s, 7),
        "gloo_s": round(gloo_s, 7),
        "ratio": round(gloo_s / ours_s, 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        **{side: round(seconds, 7) for side, seconds in cpu.items()},
    }


def line_of(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    low, high = row["spread"]
    size = f"{row['kib'] // 1024} MiB" if row["kib"] % 1024 == 0 else f"{row['kib']} KiB"
    return (
        f"{row['call']:14}{row['ranks']:8}{size:>9}  {'float32':10}"
        f"{row['ours_s'] * 1e3:9.3f} ms{row['gloo_s'] * 1e3:9.3f} ms{row['ratio']:8.2f}"
        f"  {low:.2f} to {high:.2f}{'':11}"
        f"{row['ours_cpu_s'] * 1e3:14.3f} ms{row['gloo_cpu_s'] * 1e3:9.3f} ms"
    )
