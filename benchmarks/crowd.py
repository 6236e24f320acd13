"""What does a crowd cost? The real coordinator and reducer, and scripted workers over real gRPC.

`andon serve` runs in its own process, as ever, with a journal on the disk. The workers are scripted
(`crowd_workers.py`): they speak the protocol and compute nothing, many in one process, each on its
own connection. Beside it the core alone, with simulated workers (`simulated`), says what of it are
the coordinator's decisions.

    python benchmarks/crowd.py --workers 64,256,1024 --json benchmarks/results/crowd.json

A row takes a minute at most on two cores. The workers need about five times the service's processor
time: on few cores the steps a second are those of both together, so judge the service by its
processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine, resident_mib
from service import Service, serving

from andon.protocol.records import make_term

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from scenarios.crowd_simulation import SimulatedCrowd  # tests/ is not a package

_WORKERS = Path(__file__).parent / "crowd_workers.py"
_WARM_UP = 2
_SCRAPES = 5


def measure(workers: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: a line of so many workers."""
    with TemporaryDirectory() as folder:
        over_grpc = line_of(workers, options, Path(folder))
    return {"workers": workers, "simulated": simulated(workers), **over_grpc}


def simulated(workers: int, steps: int = 5) -> dict[str, Any]:
    """The core alone: processor time of its start, of a step, and of an event of one."""
    began = time.process_time()
    crowd = SimulatedCrowd(workers)
    start_s = time.process_time() - began
    crowd.step()
    spent = []
    before = crowd.events
    for _ in range(steps):
        began = time.process_time()
        crowd.step()
        spent.append(time.process_time() - began)
    step_s = statistics.median(spent)
    began = time.process_time()
    crowd.line.status(crowd.now)
    return {
        "start_s": round(start_s, 3),
        "step_ms": round(step_s * 1e3, 2),
        "event_us": round(step_s * 1e6 * steps / (crowd.events - before), 2),
        "status_ms": round((time.process_time() - began) * 1e3, 2),
    }


def line_of(workers: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A real line: its steps, and what they cost the service and the scripted workers."""
    # They are on one host, and a launcher would start this many over many.
    flags = ["--max-calls-per-host", str(4 * workers + 64), "--digest-every", "0", "--insecure"]
    if options.silent_calls:
        flags += ["--max-silent-calls", str(options.silent_calls)]
    with serving(folder, workers, flags) as service, ExitStack() as started:
        idle_mib = round(resident_mib(service.pid))
        began = time.monotonic()
        crowds = [
            started.enter_context(crowd)
            for crowd in start_crowds(service, workers, options.processes, options.steps)
        ]
        refused = sum(heard(crowd, "joined")["refused"] for crowd in crowds)
        joined_s, joined_cpu = time.monotonic() - began, processor_s(service.pid)
        joined_mib = round(resident_mib(service.pid))
        times: list[float] = []
        spent: list[float] = []
        while len(times) < options.steps:
            times.append(heard(crowds[0], "step")["at"])
            spent.append(processor_s(service.pid))
        mib = round(resident_mib(service.pid))
        ends = [heard(crowd, "cpu_s") for crowd in crowds]
        idle = resting(service, options.rest_s)
        scraped = scrape(service)
        beats = sum(each["heartbeats"] for each in ends)
    counted = len(times) - 1 - _WARM_UP
    return {
        "join_s": round(joined_s, 2),
        "join_cpu_s": round(joined_cpu, 2),
        "joins_refused": refused,
        "steps": counted,
        "steps_per_s": round(counted / (times[-1] - times[_WARM_UP]), 3),
        "step_s": round(statistics.median(_differences(times[_WARM_UP:])), 3),
        "service_cpu_s_a_step": round((spent[-1] - spent[_WARM_UP]) / counted, 3),
        "workers_cpu_s_a_step": round(sum(each["cpu_s"] for each in ends) / options.steps, 3),
        "service_mib": {"idle": idle_mib, "joined": joined_mib, "after_steps": mib},
        "heartbeats": beats,
        **scraped,
        **idle,
    }


@contextmanager
def _crowd(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def start_crowds(service: Service, workers: int, processes: int, steps: int) -> Iterator[Any]:
    """The processes of scripted workers, each a context."""
    term = make_term(0, time.time() - 60, 1)
    each = -(-workers // processes)
    for first in range(0, workers, each):
        yield _crowd(
            [
                *(sys.executable, str(_WORKERS)),
                *("--address", service.address, "--run", service.run_id, "--term", str(term)),
                *("--first", str(first), "--count", str(min(each, workers - first))),
                *("--workers", str(workers), "--steps", str(steps)),
            ]
        )


def heard(crowd: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """The next line of a process that has `name`.

    Raises:
        RuntimeError: the process ended; its error is on the terminal.
    """
    assert crowd.stdout is not None
    for line in crowd.stdout:
        told: dict[str, Any] = json.loads(line)
        if name in told:
            return told
    raise RuntimeError("the scripted workers ended before they were done")


def scrape(service: Service) -> dict[str, Any]:
    """What a scrape and the board's view cost: bytes, and the service's processor time."""
    found: dict[str, Any] = {}
    base = service.metrics_url.rsplit("/", 1)[0]
    for name, path in (("metrics", "/metrics"), ("sd", "/sd"), ("board", "/board/api/state")):
        before, size = processor_s(service.pid), 0
        for _ in range(_SCRAPES):
            with urllib.request.urlopen(base + path, timeout=60) as answer:
                size = len(answer.read())
        spent = (processor_s(service.pid) - before) / _SCRAPES
        found[name] = {"bytes": size, "cpu_ms": round(spent * 1e3, 1)}
    return found


def resting(service: Service, seconds: float) -> dict[str, Any]:
    """What the line costs while nobody steps: heartbeats, pings, ticks and statuses."""
    before, began = processor_s(service.pid), time.monotonic()
    time.sleep(seconds)
    spent = (processor_s(service.pid)) - before
    return {"rest_cpu_ms_a_second": round(spent * 1e3 / (time.monotonic() - began), 1)}


def processor_s(pid: int) -> float:
    """Processor time of a process so far, that of threads which have ended too."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def _differences(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="64,256,1024", help="sizes of lines")
    parser.add_argument("--steps", type=int, default=12, help="steps of each line")
    parser.add_argument("--processes", type=int, default=2, help="of scripted workers")
    parser.add_argument("--rest-s", type=float, default=5.0, help="seconds without steps")
    parser.add_argument(
        "--silent-calls", type=int, help="the service's --max-silent-calls (default: its own)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures: dict[str, Any] = {"machine": describe_machine(), "descriptors": [soft, hard]}
    figures["rows"] = []
    for workers in map(int, options.workers.split(",")):
        figures["rows"].append(measure(workers, options))
        print(json.dumps(figures["rows"][-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
