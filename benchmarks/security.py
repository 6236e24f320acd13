"""What does encryption cost an exchange over the wire?

Each worker process holds a place on two lines of one machine, one in the clear and one over mTLS
with certificates as `andon certs` makes them, and takes whole steps without a model on them by
turns: clear, mTLS, clear, mTLS. All workers start each at a barrier; a step took as long as its
slowest worker. Services and workers share the machine's cores, so that what encryption costs in
processor time shows in full: over a real network it hides in part behind the link.

    python benchmarks/security.py --mib 64 --json benchmarks/results/security.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from service import serving

from andon_cli.authority import Authority

__all__ = ["WARM_UP", "Seat"]

WARM_UP = 2
"""Pairs before the first that counts: connections, buffers and the founding of both runs."""
_PATIENCE_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one worker process has to know."""

    mib: int
    workers: int
    pairs: int
    rank: int
    certs: str
    clear: tuple[str, str]
    """Address and run of the line in the clear."""
    mtls: tuple[str, str]
    """Likewise of the line over mTLS."""
    rendezvous: str
    """The file over which the ranks find each other, for the barriers."""


def main() -> None:
    """Measures each size that was asked for, and prints its row."""
    options = _arguments()
    rows = []
    print(f"{'workers':>7}{'size':>9}{'clear':>12}{'mTLS':>12}{'ratio':>8}  of single pairs")
    for mib in options.mib:
        row = measure(mib, options.workers, options.pairs)
        rows.append(row)
        low, high = row["spread"]
        print(
            f"{row['workers']:7}{mib:5} MiB{row['clear_s'] * 1e3:9.1f} ms"
            f"{row['mtls_s'] * 1e3:9.1f} ms{row['ratio']:8.2f}  {low:.2f} to {high:.2f}",
            flush=True,
        )
    if options.json:
        notes = [
            "whole steps over the wire without a model, two services and all workers on one host",
            "both lines in one run, by turns; a step took as long as its slowest worker",
        ]
        machine = {**describe_machine(), "warm_up_pairs": WARM_UP, "notes": notes}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def measure(mib: int, workers: int, pairs: int) -> dict[str, Any]:
    """Runs both services and the workers; `ratio` is the time over mTLS over that in the clear."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        now, certs = datetime.now(UTC), folder / "certs"
        Authority.in_folder(folder / "ca", now)[0].certify("localhost", certs, now=now, days=1)
        (folder / "clear").mkdir()
        (folder / "mtls").mkdir()
        clear = stack.enter_context(serving(folder / "clear", workers))
        mtls = stack.enter_context(serving(folder / "mtls", workers, ["--tls", str(certs)]))
        seats = [
            Seat(
                mib=mib,
                workers=workers,
                pairs=pairs,
                rank=rank,
                certs=str(certs),
                clear=(clear.address, clear.run_id),
                mtls=(mtls.address, mtls.run_id),
                rendezvous=str(folder / "rendezvous"),
            )
            for rank in range(workers)
        ]
        seen = [_output(process) for process in _started(seats, stack)]
    clear_s, mtls_s = (
        [max(times) for times in zip(*(each[side] for each in seen), strict=True)]
        for side in ("clear_s", "mtls_s")
    )
    ratios = [secret / plain for plain, secret in zip(clear_s, mtls_s, strict=True)]
    medians = statistics.median(clear_s), statistics.median(mtls_s)
    moved = 2 * workers * mib
    return {
        "workers": workers,
        "mib": mib,
        "pairs": pairs,
        "clear_s": round(medians[0], 6),
        "mtls_s": round(medians[1], 6),
        "ratio": round(medians[1] / medians[0], 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "clear_mib_per_s": round(moved / medians[0], 1),
        "mtls_mib_per_s": round(moved / medians[1], 1),
    }


def _started(seats: list[Seat], stack: ExitStack) -> list[subprocess.Popen[str]]:
    """The worker processes; those that still run when the stack ends are killed."""
    script = str(Path(__file__).with_name("security_worker.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for seat in seats:
        process = subprocess.Popen(
            [sys.executable, script, json.dumps(asdict(seat))],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        processes.append(process)
    return processes


def _output(process: subprocess.Popen[str]) -> dict[str, list[float]]:
    output, _ = process.communicate(timeout=_PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"a worker ended with {process.returncode}: see what it printed")
    times: dict[str, list[float]] = json.loads(output)
    return times


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[64], help="sizes (default: 64)")
    parser.add_argument("--workers", type=int, default=2, help="default: 2")
    parser.add_argument("--pairs", type=int, default=7, help="steps of each line that count")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(*options.mib, options.workers, options.pairs) < 1:
        parser.error("--mib, --workers and --pairs must be at least 1")
    return options


if __name__ == "__main__":
    main()
