"""How long does it take to write and to read one message of the data plane?

One thread frames and parses a worker's messages: contributions with their payload, and slices of
shared memory. It measures its own CPU time. With `--before` it compares two checkouts: it runs a
process for each alternately, so that other load on the machine slows both equally.

    python benchmarks/frames.py --before ../andon-before --json benchmarks/results/frames.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from machine import describe_machine

from andon.protocol.messages import BlockGradient, Slice
from andon.protocol.records import Key
from andon.wire import frames

_KEY = Key(1_795_351_994 << 32 | 0x9F3C77E1, 1234)
_BATCH = 32
_PAYLOADS = {"4 KiB": 2**12, "256 KiB": 2**18, "2 MiB": 2**21}


def main() -> None:
    """Prints microseconds per message, and the ratio to the other checkout if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="root of the checkout to compare with")
    parser.add_argument("--repeats", type=int, default=9, help="measured runs of each")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--once", action="store_true", help="do one run and print JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure()))
        return
    here = Path(__file__).resolve().parents[1]
    roots = {"now": here} if options.before is None else {"before": options.before, "now": here}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in roots}
    for _ in range(options.repeats):
        for side, root in roots.items():
            runs[side].append(_run_in(root))
    rows = [_row(case, runs) for case in runs["now"][0]]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.json:
        figures = {"machine": describe_machine(), "repeats": options.repeats, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure() -> dict[str, float]:
    """Microseconds per message, by operation."""
    found = {}
    for name, size in _PAYLOADS.items():
        message = _gradient(size // 4, payload=memoryview(bytes(size)))
        found[f"write {name}"] = _time(partial(frames.frame_request, message))
        found[f"read {name}"] = _time(partial(frames.parse_request, frames.frame_request(message)))
    slices = [_gradient(1024, slice=Slice(4096 * place, 4096, 5)) for place in range(_BATCH)]
    framed = [frames.frame_request(each) for each in slices]
    found["write a slice"] = _time(lambda: [frames.frame_request(each) for each in slices]) / _BATCH
    found["read a slice"] = _time(lambda: [frames.parse_request(each) for each in framed]) / _BATCH
    return found


def _gradient(count: int, **content: memoryview | Slice) -> BlockGradient:
    return BlockGradient(
        key=_KEY,
        rank=1,
        world_size=4,
        block=7,
        offset=2**20,
        count=count,
        weight=32.0,
        sequence=1,
        **content,  # type: ignore[arg-type] # payload or slice
    )


def _time(act: Callable[[], object], seconds: float = 0.1) -> float:
    """This thread's CPU time for one call, in microseconds."""
    act()
    times, start = 0, time.thread_time()
    while time.thread_time() - start < seconds:
        for _ in range(10):
            act()
        times += 10
    return (time.thread_time() - start) / times * 1e6


def _run_in(root: Path) -> dict[str, float]:
    """One run in a process that imports the checkout at `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root / "proto")}
    command = [sys.executable, __file__, "--once"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    found: dict[str, float] = json.loads(output)
    return found


def _row(case: str, runs: dict[str, list[dict[str, float]]]) -> dict[str, str | float]:
    row: dict[str, str | float] = {"case": case}
    for side, each in runs.items():
        row[f"{side}_us"] = round(statistics.median(run[case] for run in each), 2)
    if "before" in runs:
        pairs = zip(runs["before"], runs["now"], strict=True)
        row["ratio"] = round(statistics.median(now[case] / then[case] for then, now in pairs), 2)
    return row


if __name__ == "__main__":
    main()
