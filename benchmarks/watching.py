"""What does watching cost a run? Steps a second with viewers and a scraper, and without.

One service and its workers run from the beginning to the end, and exchange `--mib` MiB a step, as
fast as they can. Meanwhile they are watched and left alone by turns: watched means ten viewers of
the board, each with its stream of events, and a scraper that reads /metrics and /sd every second.
The journal says how many steps each of these phases had. The viewers run on the same machine, in
one process, so its time is part of the cost.

    python benchmarks/watching.py --json benchmarks/results/watching.json
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from machine import describe_machine
from protocol_worker import ProtocolWorker, block_sizes
from service import Service, serving

from andon_coordinator.transport.reader import JournalReader

SAMPLES_EACH = 4
SETTLE_S = 1.0
"""The beginning of a phase that does not count: viewers connect, or leave."""
_PATIENCE_S = 60


def work(address: str, run_id: str, slot: int, options: argparse.Namespace) -> None:
    """A worker: steps until the service ends."""
    (mib,) = options.mib
    gradients = [np.ones(size, dtype=np.float32) for size in block_sizes(mib)]
    batch = SAMPLES_EACH * options.workers
    with ProtocolWorker(address, run_id, slot, mib, batch) as worker:
        while worker.step(gradients):
            pass


def view(url: str, viewers: int) -> None:
    """Reads streams of the board, and scrapes once a second, until it is ended."""
    where = urlsplit(url)
    selector = selectors.DefaultSelector()
    for _ in range(viewers):
        stream = socket.create_connection((where.hostname, where.port), timeout=_PATIENCE_S)
        stream.sendall(f"GET /board/api/live HTTP/1.0\r\nHost: {where.netloc}\r\n\r\n".encode())
        selector.register(stream, selectors.EVENT_READ)
    print("ready", flush=True)
    scraped_at = 0.0
    while True:
        for key, _events in selector.select(0.1):
            stream = key.fileobj  # type: ignore[assignment]  # it was registered as a socket
            if not stream.recv(1 << 20):
                return
        if time.monotonic() - scraped_at >= 1.0:
            scraped_at = time.monotonic()
            for path in ("/metrics", "/sd"):
                urllib.request.urlopen(url + path, timeout=_PATIENCE_S).read()


@contextmanager
def watched(url: str, viewers: int) -> Iterator[None]:
    """Viewers and a scraper, while entered."""
    command = [sys.executable, __file__, "--view", url, "--viewers", str(viewers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the viewers did not connect")
            yield
            if process.poll() is not None:
                raise RuntimeError("the viewers were sent away")
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)


def measure(mib: float, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs a service, its workers and all phases; returns the row."""
    with ExitStack() as stack:
        service = stack.enter_context(serving(folder, options.workers))
        for slot in range(options.workers):
            command = [sys.executable, __file__, "--mib", str(mib)]
            command += ["--workers", str(options.workers)]
            command += ["--worker", service.address, service.run_id, str(slot)]
            stack.callback(_end, subprocess.Popen(command))
        _await_steps(service, folder)
        alone, seen = [], []
        for _ in range(options.pairs):
            alone.append(_phase(service, options.seconds))
            with watched(service.metrics_url.removesuffix("/metrics"), options.viewers):
                seen.append(_phase(service, options.seconds))
    committed = _commits(folder)
    return _row(mib, options, [_rates(committed, phases) for phases in (alone, seen)])


Phase = tuple[float, float, float]
"""When it began and ended, by the journal's clock, and the service's processor time in it."""


def _phase(service: Service, seconds: float) -> Phase:
    time.sleep(SETTLE_S)
    began, spent_s = time.time(), _processor_s(service.pid)
    time.sleep(seconds)
    return began, time.time(), _processor_s(service.pid) - spent_s


def _rates(committed: np.ndarray[Any, Any], phases: list[Phase]) -> list[tuple[float, float]]:
    """Of each phase, its steps a second, and the service's processor time of each step."""
    rates = []
    for began, ended, spent_s in phases:
        steps = int(np.count_nonzero((committed >= began) & (committed < ended)))
        rates.append((steps / (ended - began), spent_s / max(steps, 1)))
    return rates


def _row(
    mib: float, options: argparse.Namespace, rates: list[list[tuple[float, float]]]
) -> dict[str, Any]:
    alone, seen = rates
    ratios = [there[0] / here[0] for here, there in zip(alone, seen, strict=True)]
    return {
        "workers": options.workers,
        "mib": mib,
        "viewers": options.viewers,
        "pairs": options.pairs,
        "seconds": options.seconds,
        "alone_steps_per_s": round(statistics.median(rate for rate, _ in alone), 2),
        "watched_steps_per_s": round(statistics.median(rate for rate, _ in seen), 2),
        "ratio": round(statistics.median(ratios), 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "alone_service_cpu_ms": round(statistics.median(spent for _, spent in alone) * 1e3, 3),
        "watched_service_cpu_ms": round(statistics.median(spent for _, spent in seen) * 1e3, 3),
    }


def _commits(folder: Path) -> np.ndarray[Any, Any]:
    """When each record was written, in seconds since the Unix epoch."""
    with JournalReader(folder / "run" / "journal.sqlite") as reader:
        return np.array([entry.at_unix_s for entry in reader.backwards()])


def _await_steps(service: Service, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        with JournalReader(folder / "run" / "journal.sqlite") as reader:
            if reader.steps() >= 3:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the workers of {service.address} took no step")


def _processor_s(pid: int) -> float:
    """Processor time of a process, of threads that have ended, too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(_PATIENCE_S)


def main() -> None:
    """Measures each size, or is one of the processes of a measurement."""
    options = _arguments()
    if options.worker:
        address, run_id, slot = options.worker
        work(address, run_id, int(slot), options)
        return
    if options.view:
        view(options.view, options.viewers)
        return
    rows, machine = [], describe_machine()
    print(f"{'size':>8}{'alone':>14}{'watched':>14}{'ratio':>8}  of single pairs")
    for mib in options.mib:
        with TemporaryDirectory() as folder:
            row = measure(mib, options, Path(folder))
        rows.append(row)
        low, high = row["spread"]
        print(
            f"{mib:4g} MiB{row['alone_steps_per_s']:10.1f} /s{row['watched_steps_per_s']:11.1f} /s"
            f"{row['ratio']:8.3f}  {low:.3f} to {high:.3f}",
            flush=True,
        )
    if options.json:
        notes = [
            "steps over the wire without a model, the service, workers and viewers on one host",
            "watched and alone by turns in one run; the rates are medians of the phases",
            "ratio: the median of watched over alone, of neighbouring phases",
        ]
        figures = {"machine": {**machine, "notes": notes}, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16], help="sizes of a step")
    parser.add_argument("--workers", type=int, default=2, help="default: 2")
    parser.add_argument("--viewers", type=int, default=10, help="default: 10")
    parser.add_argument("--pairs", type=int, default=7, help="phases of each kind (default: 7)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a phase (default: 6)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--view", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(*options.mib, options.workers, options.pairs, options.seconds) <= 0:
        parser.error("--mib, --workers, --pairs and --seconds must be above 0")
    return options


if __name__ == "__main__":
    main()
