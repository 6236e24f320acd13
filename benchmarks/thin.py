"""How much of their time do two hosts with a thin network between them spend computing?

It makes two hosts on this machine: network namespaces, each with a link to a switch (`tc tbf`). One
has the service and a worker, the other has a worker. Each worker gets the same part of a core. Just
before and just after the line the same processes train at the same time, each alone: *utilisation*
is the time that the same samples take them alone, over the time that they take on the line. The
optimizer's step counts as computing on both sides.

With `--round-trip-ms` the hosts are that far from each other, too (`wide_network.py`).

It needs root and iproute2, and control groups or four cores; for a distance a C compiler.

    sudo python benchmarks/thin.py --json benchmarks/results/thin.json
    sudo python benchmarks/thin.py --mbit 50 --schedules every-step,local-32
    sudo python benchmarks/thin.py --mbit 10 --round-trip-ms 20 --schedules local-16-int4
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpu_share import CpuShare, NoShares, equal_shares
from crew import Crew, Hand, Load
from hosts_network import Network, NoNetwork, network
from machine import describe_machine
from schedules import chosen_from, write_rows
from service import serving
from wide_network import Distance, wide_network

HOSTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule: its flags of `andon serve`, and how long its windows are."""

    flags: tuple[str, ...] = ()
    batches: int = 1
    """Of a window."""
    windows: int = 4
    """That count."""


_LOCAL = ("--schedule", "local", "--local-steps")
_INT4 = ("--encoding", "int4")
_INT2 = ("--encoding", "int2")
_TOPK = ("--encoding", "topk", "--topk-kept", "7")


def _narrow(batches: int, encoding: tuple[str, ...], ahead: str = "") -> Schedule:
    """Windows in a hundredth of the bytes; `ahead`: steps until their mean arrives."""
    overlap = ("--overlap", "--overlap-steps", ahead) if ahead else ()
    flags = (*_LOCAL, str(batches), *encoding, *overlap)
    return Schedule(flags=flags, batches=batches, windows=128 // batches)


SCHEDULES = {
    "every-step": Schedule(windows=8),
    "every-step-overlap": Schedule(flags=(*_LOCAL, "1", "--overlap"), windows=8),
    "local-8": Schedule(flags=(*_LOCAL, "8"), batches=8),
    "local-8-overlap": Schedule(flags=(*_LOCAL, "8", "--overlap"), batches=8),
    "local-32": Schedule(flags=(*_LOCAL, "32"), batches=32),
    "local-32-overlap": Schedule(flags=(*_LOCAL, "32", "--overlap"), batches=32),
    "fragments-32-4": Schedule(flags=(*_LOCAL, "32", "--fragments", "4"), batches=8, windows=8),
    "fragments-32-4-overlap": Schedule(
        flags=(*_LOCAL, "32", "--fragments", "4", "--overlap"), batches=8, windows=8
    ),
    "local-128": Schedule(flags=(*_LOCAL, "128"), batches=128, windows=2),
    "local-128-overlap": Schedule(flags=(*_LOCAL, "128", "--overlap"), batches=128, windows=2),
    "fragments-128-4-overlap": Schedule(
        flags=(*_LOCAL, "128", "--fragments", "4", "--overlap"), batches=32
    ),
    "local-16-int4": _narrow(16, _INT4),
    **{f"local-16-int4-overlap-{each}": _narrow(16, _INT4, each) for each in "1234"},
    "local-16-int2": _narrow(16, _INT2),
    **{
        f"local-{steps}-int2-overlap-{late}": _narrow(steps, _INT2, late)
        for steps in (13, 16)
        for late in "123"
    },
    "local-5-topk-7": _narrow(5, _TOPK),
    **{f"local-5-topk-7-overlap-{each}": _narrow(5, _TOPK, each) for each in "12"},
}
_LEFT_OUT = 2
"""Windows that do not count: the first opens connections, and the last overlaps with nothing."""


def main() -> int:
    """Measures each schedule at each speed, and prints a row for it."""
    options = _arguments()
    machine = describe_machine()
    load = Load(
        workers=HOSTS,
        layers=options.layers,
        width=options.width,
        context=options.context,
        batch=options.batch,
        samples=0,
    )
    rows: list[dict[str, Any]] = []
    try:
        with equal_shares(HOSTS, options.cores) as (shares, service, how):
            for mbit in options.mbit:
                with (
                    _between(mbit, options.round_trip_ms) as hosts,
                    Crew(_hands(hosts, shares)) as crew,
                ):
                    bench = Bench(
                        hosts=hosts,
                        load=load,
                        crew=crew,
                        service=service,
                        chunk_elements=options.chunk_elements,
                    )
                    for name in options.schedules:
                        row = bench.measure(SCHEDULES[name], options.phase_s)
                        rows.append({"mbit": mbit, "schedule": name, **row})
                        print(_line(rows[-1]), flush=True)
    except (NoNetwork, NoShares) as error:
        print(f"thin.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        write_rows(options.json, {**machine, **_circumstances(options, load, how)}, rows)
    return 0


def _between(mbit: float, round_trip_ms: float) -> AbstractContextManager[Network]:
    if not round_trip_ms:
        return network(HOSTS, mbit)
    return wide_network(HOSTS, Distance(mbit=mbit, round_trip_ms=round_trip_ms))


def _hands(hosts: Network, shares: Sequence[CpuShare]) -> list[Hand]:
    return [
        Hand(share=share, inside=tuple(hosts.inside(number))) for number, share in enumerate(shares)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Two hosts at one speed, and their workers."""

    hosts: Network
    load: Load
    crew: Crew
    service: CpuShare
    chunk_elements: int | None

    def measure(self, schedule: Schedule, phase_s: float) -> dict[str, Any]:
        """Trains alone, on a line, and alone again; returns one row."""
        batches = (schedule.windows + _LEFT_OUT) * schedule.batches
        load = replace(self.load, samples=batches * self.load.batch * HOSTS)
        flags = ["--insecure", "--shared-dir", "off", *schedule.flags]
        if self.chunk_elements is not None:
            flags += ["--chunk-elements", str(self.chunk_elements)]
        with (
            TemporaryDirectory() as folder,
            serving(
                Path(folder), HOSTS, flags, inside=self.hosts.inside(0), bind="0.0.0.0"
            ) as served,
        ):
            self.service.enter(served.pid)
            port = served.address.rpartition(":")[2]
            address = f"{self.hosts.address(0)}:{port}"
            seen = self.crew.work(load, address, served.run_id, phase_s)
        first, *_, last, _ = windows = seen.windows
        seconds = last.ended_s - first.ended_s
        samples = sum(sum(window.samples) for window in windows[1:-1])
        # The link of the host without the service: the other one's is its mirror image.
        carried = last.carried[1] - first.carried[1]
        each = [after.carried[1] - before.carried[1] for before, after in pairwise(windows[:-1])]
        return {
            "utilisation": round(seen.ideal_s(samples) / seconds, 4),
            "computing": round(seen.computing(first, last), 4),
            "bytes_per_sample": round(carried / samples, 1),
            "most_bytes": max(each),
            "windows": len(windows) - _LEFT_OUT,
            "window_s": round(seconds / (len(windows) - _LEFT_OUT), 3),
        }


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['mbit']:6g} Mbit/s  {row['schedule']:24}{row['utilisation']:6.1%} of the rate alone"
        f"  computing {row['computing']:6.1%}"
        f"{row['bytes_per_sample']:12.0f} bytes a sample{row['window_s']:9.2f} s a window"
        f"{row['most_bytes'] / 1e6:8.2f} MB at most in one"
    )


def _circumstances(options: argparse.Namespace, load: Load, how: str) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "load_after": round(os.getloadavg()[0], 2),
        "round_trip_ms": options.round_trip_ms,
        "chunk_elements": options.chunk_elements,
        "batch": load.batch * load.workers,
        "model": {"layers": load.layers, "width": load.width, "context": load.context},
        "flags": {name: SCHEDULES[name].flags for name in options.schedules},
        "notes": [
            f"{HOSTS} network namespaces of one machine; links limited each way (tc tbf)",
            f"equal shares of the processors: {how}",
            "the service and one worker are on the first host; float32, where no encoding is named",
            "utilisation: the time that the counted samples take the same workers alone, over the "
            "time from the first window's commit to that of the last but one",
            "computing: the processor time that the training threads spend on batches in a second "
            "meanwhile, over the same alone; a machine whose speed drifts changes the first, and "
            "not this",
            "every-step-overlap is local steps, one in each window",
            "bytes_per_sample: over the second host's link, both ways, headers included, over the "
            "samples of both workers",
            "most_bytes: over the same link between two neighbouring commits, at most",
            "fragments-32-4: a window is 8 steps, after which a quarter of the blocks is exchanged",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=_speeds, default=[10.0, 50.0, 200.0], help="10,50,200")
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="between the hosts")
    parser.add_argument("--chunk-elements", type=int, help="of `andon serve` (default: its own)")
    parser.add_argument("--batch", type=int, default=16, help="a worker's part of a batch")
    parser.add_argument("--cores", type=float, default=0.4, help="a worker's part of a core")
    parser.add_argument(
        "--phase-s", type=float, default=4, help="a phase alone: two before, two after"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="letters of a sample")
    parser.add_argument(
        "--schedules",
        type=chosen_from(SCHEDULES),
        default=list(SCHEDULES),
        help=f"of: {','.join(SCHEDULES)} (default: all)",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    for name in ("batch", "cores", "phase_s", "layers", "width", "context"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return options


def _speeds(text: str) -> list[float]:
    speeds = [float(each) for each in text.split(",")]
    if min(speeds) <= 0:
        raise argparse.ArgumentTypeError("a link's speed must be above 0")
    return speeds


if __name__ == "__main__":
    sys.exit(main())
