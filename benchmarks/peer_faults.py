"""How long until every other rank of a process group has raised, when one dies, freezes or leaves?

Three ranks of a group of Andon make one kind of call after the other, on one host, through memory.
Rank 1 has its fault in the middle of them, or a person halts them, or their service is killed. The
time of a fault ends when the last of the other ranks has the error, which names the culprit.

    python benchmarks/peer_faults.py --repeats 5 --json benchmarks/results/peer-faults.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # where the ranks are

from machine import describe_machine

from integration.andon_torch.rank_scripts import COLLECTIVES
from integration.andon_torch.rig import in_trouble

CASES = [
    *(("kill", place) for place in (*COLLECTIVES, "send", "backward")),
    *((act, "all_reduce") for act in ("stop", "raise", "end", "halt")),
    ("kill the service", "all_reduce"),  # The last: it serves all of them.
]
"""What happens, and in which call."""


def main() -> None:
    """Measures each fault, and prints a line for it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="how often each fault happens")
    parser.add_argument("--liveness", type=float, default=3.0, help="the lease in seconds")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    machine = describe_machine()
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in CASES}
    for _ in range(options.repeats):
        for case, found in measured(options.liveness).items():
            seconds[case].append(found)
    rows = [row_of(act, place, found) for (act, place), found in seconds.items()]
    for row in rows:
        print(f"{row['fault']:18}{row['call']:16}{row['median_s']:9.3f} s{row['worst_s']:9.3f} s")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"machine": machine, "lease_s": options.liveness, "ranks": 3, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(lease_s: float) -> dict[tuple[str, str], float]:
    """Each fault once: seconds until the last of the other ranks has raised."""
    return {
        case: max(each.get("result", each)["seconds"] for each in (first, last))
        for case, (first, _, last) in in_trouble(CASES, lease_s).items()
    }


def row_of(act: str, place: str, seconds: list[float]) -> dict[str, Any]:
    """What a fault took."""
    return {
        "fault": act,
        "call": place,
        "times": len(seconds),
        "median_s": round(statistics.median(seconds), 4),
        "best_s": round(min(seconds), 4),
        "worst_s": round(max(seconds), 4),
    }


if __name__ == "__main__":
    main()
