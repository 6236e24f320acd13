"""How much of their time do two hosts with a thin network between them spend computing?

It makes two hosts on this machine: network namespaces, each with a link to a switch (`tc tbf`). One
has the service and a worker, the other has a worker. Each worker gets the same part of a core. The
same two workers first train at the same time, each alone: *utilisation* is the time that the same
samples take them alone, over the time that they take on the line. The optimizer's step counts as
computing on both sides.

It needs root and iproute2, and control groups or four cores.

    sudo python benchmarks/thin.py --json benchmarks/results/thin.json
    sudo python benchmarks/thin.py --mbit 50 --schedules every-step,local-32
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpu_share import CpuShare, NoShares, equal_shares
from crew import Crew, Hand, Load, windows_of
from hosts_network import Network, NoNetwork, network
from machine import describe_machine
from schedules import chosen_from, write_rows
from service import serving

HOSTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule: its flags of `andon serve`, and how long its windows are."""

    flags: tuple[str, ...] = ()
    batches: int = 1
    """Of a window."""
    windows: int = 4
    """That count."""


SCHEDULES = {
    "every-step": Schedule(windows=8),
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
                with network(HOSTS, mbit) as hosts:
                    bench = Bench(hosts=hosts, load=load, shares=shares, service=service)
                    rate = bench.alone(options.phase_s)
                    for name in options.schedules:
                        row = bench.measure(SCHEDULES[name], rate)
                        rows.append({"mbit": mbit, "schedule": name, **row})
                        print(_line(rows[-1]), flush=True)
    except (NoNetwork, NoShares) as error:
        print(f"thin.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        write_rows(options.json, {**machine, **_circumstances(options, load, how)}, rows)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Two hosts at one speed, and their workers."""

    hosts: Network
    load: Load
    shares: Sequence[CpuShare]
    service: CpuShare

    @property
    def crew(self) -> Crew:
        """A worker on each host."""
        return Crew(
            hands=[
                Hand(share=share, inside=tuple(self.hosts.inside(number)))
                for number, share in enumerate(self.shares)
            ]
        )

    def alone(self, phase_s: float) -> float:
        """Samples a second of both workers together, each alone."""
        return sum(sum(phases) / 2 for phases in self.crew.alone(self.load, phase_s))

    def measure(self, schedule: Schedule, rate: float) -> dict[str, Any]:
        """One row: `rate` is what both reach together without an exchange, in samples a second."""
        batches = (schedule.windows + _LEFT_OUT) * schedule.batches
        load = replace(self.load, samples=batches * self.load.batch * HOSTS)
        flags = ["--insecure", "--shared-dir", "off", *schedule.flags]
        with (
            TemporaryDirectory() as folder,
            serving(
                Path(folder), HOSTS, flags, inside=self.hosts.inside(0), bind="0.0.0.0"
            ) as served,
        ):
            self.service.enter(served.pid)
            port = served.address.rpartition(":")[2]
            address = f"{self.hosts.address(0)}:{port}"
            windows = windows_of(self.crew.train(load, address, served.run_id))
        first, last = windows[0], windows[-2]
        seconds = last["ended_s"] - first["ended_s"]
        samples = sum(sum(window["samples"]) for window in windows[1:-1])
        # The link of the host without the service: the other one's is its mirror image.
        carried = last["carried"][1] - first["carried"][1]
        return {
            "utilisation": round(samples / rate / seconds, 4),
            "bytes_per_sample": round(carried / samples, 1),
            "windows": len(windows) - _LEFT_OUT,
            "window_s": round(seconds / (len(windows) - _LEFT_OUT), 3),
        }


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['mbit']:6g} Mbit/s  {row['schedule']:20}computing {row['utilisation']:6.1%}"
        f"{row['bytes_per_sample']:12.0f} bytes a sample{row['window_s']:9.2f} s a window"
    )


def _circumstances(options: argparse.Namespace, load: Load, how: str) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "load_after": round(os.getloadavg()[0], 2),
        "batch": load.batch * load.workers,
        "model": {"layers": load.layers, "width": load.width, "context": load.context},
        "flags": {name: SCHEDULES[name].flags for name in options.schedules},
        "notes": [
            f"{HOSTS} network namespaces of one machine; links limited each way (tc tbf)",
            f"equal shares of the processors: {how}",
            "the service and one worker are on the first host; float32, nothing compressed",
            "utilisation: the time that the counted samples take the same workers alone, over the "
            "time from the first window's commit to that of the last but one",
            "bytes_per_sample: over the second host's link, both ways, headers included, over the "
            "samples of both workers",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=_speeds, default=[10.0, 50.0, 200.0], help="10,50,200")
    parser.add_argument("--batch", type=int, default=16, help="a worker's part of a batch")
    parser.add_argument("--cores", type=float, default=0.4, help="a worker's part of a core")
    parser.add_argument("--phase-s", type=float, default=8, help="half of the time alone")
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
