"""How long does an exchange between hosts with slow links take, compared with Gloo's ring?

It makes four hosts on this machine: network namespaces, each with a link of 1 Gbit/s each way to a
switch (`tc tbf`). Each host has one worker. Either each host has a reducer and they share the
model, or one reducer on the first host averages all of it. Workers alternate between an Andon
exchange and `all_reduce` of the same numbers over Gloo (float32, its ring algorithm), in the same
namespaces: ours, theirs, ours, theirs. Ours is a whole step: assignment, value gate, averages,
durable record, commit. Bytes on the wire are the interfaces' own counters, headers included, for
each link and direction.

A process group may have several ranks on a host (`--ranks-per-host`). Those of ours share memory,
and a sum crosses each link once for all of them; Gloo's ring goes through all ranks.

Both sides use the congestion control that `--congestion` names: TCP's fairness among the flows of
a link decides as much as the links' speed, and kernels differ in it.

It needs root and iproute2.

    sudo python benchmarks/hosts.py --json benchmarks/results/hosts.json
    sudo python benchmarks/hosts.py --mbit 300 --json benchmarks/results/hosts-300.json
    sudo python benchmarks/hosts.py --cases c10d-float32 --json benchmarks/results/c10d-hosts.json
    sudo python benchmarks/hosts.py --cases c10d-float32 --keep-windows --pairs 9
    sudo python benchmarks/hosts.py --cases c10d-float32 --hosts 2 --ranks-per-host 2
    sudo python benchmarks/hosts.py --transport grpc --congestion bbr    # another kernel's TCP
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hosts_line import GROUPS, HOSTS, WARM_UP, Case, Runs, exchange_between
from hosts_network import CONGESTION, Network, NoNetwork, network
from machine import describe_machine

__all__ = ["figures_of"]


def main() -> int:
    """Measures each requested case, and prints a row for it."""
    options = _arguments()
    rows: list[dict[str, Any]] = []
    machine = {**describe_machine(), **_circumstances(options)}
    print(f"{'path':8}  {'encoding':10}{'MiB':>5}{'Mbit/s':>8}{'ours':>11}{'Gloo':>11}", end="")
    print(f"{'ratio':>7}  of single pairs   sent a link (of D)   cores busy", flush=True)
    try:
        with network(
            options.hosts, options.mbit, options.congestion, keep_windows=options.keep_windows
        ) as hosts:
            for name in options.cases:
                path, encoding = CASES[name]
                case = Case(
                    path=path,
                    encoding=encoding,
                    ranks_per_host=options.ranks_per_host,
                    mib=options.mib,
                    transport=options.transport,
                )
                rows.append(measure(hosts, case, options))
                print(_line(rows[-1]), flush=True)
    except NoNetwork as error:
        print(f"hosts.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"machine": machine, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


CASES = {
    **{f"reducers-{name}": ("reducers", name) for name in ("float32", "bfloat16", "int8", "int4")},
    **{f"ring-{name}": ("ring", name) for name in ("float32", "bfloat16", "int8")},
    "star-float32": ("star", "float32"),
    **{f"{path}-float32": (path, "float32") for path in ("c10d", "gloo")},
}
_DEFAULT_CASES = [name for name in CASES if name.startswith("reducers-")]


def measure(hosts: Network, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one case; returns its row: see `figures_of`.

    `of_line` is the part of the time for which the busiest link and direction would have to run at
    its full rate.
    """
    sides = exchange_between(hosts, case, options.pairs)
    row = {
        **asdict(case),
        "hosts": hosts.count,
        "mbit": options.mbit,
        **figures_of(sides, case.mib * 2**20),
    }
    for side in sides:
        most = max(*row[f"{side}_sent"], *row[f"{side}_received"]) * case.mib * 2**20
        row[f"{side}_of_line"] = round(most * 8 / (options.mbit * 1e6 * row[f"{side}_s"]), 4)
    return row


def figures_of(sides: dict[str, list[Runs]], model_bytes: int) -> dict[str, Any]:
    """What a row says of both sides' exchanges.

    `ratio` is Gloo's median over ours: above 1, ours is faster. `spread` is the smallest and the
    largest ratio of a pair. `sent` and `received` are the median numbers of bytes over each host's
    link in one exchange, as multiples of the model's size in float32. `cpu_s` is each worker's
    median of processor seconds an exchange, with those of the service on its host.
    """
    took = {side: _slowest(runs) for side, runs in sides.items()}
    ratios = [theirs / mine for mine, theirs in zip(took["ours"], took["gloo"], strict=True)]
    ours_s, gloo_s = (statistics.median(took[side]) for side in ("ours", "gloo"))
    figures: dict[str, Any] = {
        # One worker beside the only reducer may share memory with it.
        "by_tcp": any(run["by_tcp"] > 0 for runs in sides["ours"] for run in runs),
        "ours_s": round(ours_s, 4),
        "gloo_s": round(gloo_s, 4),
        "ratio": round(gloo_s / ours_s, 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
    }
    for side, runs in sides.items():
        for what, unit in (("sent", model_bytes), ("received", model_bytes), ("cpu_s", 1)):
            figures[f"{side}_{what}"] = _of_each(runs, what, unit)
        busy = [exchange["busy"] for exchange in runs[0]]
        figures[f"{side}_cores_busy"] = round(statistics.median(busy), 3)
    return figures


def _slowest(workers: Sequence[Runs]) -> list[float]:
    return [max(run["seconds"] for run in runs) for runs in zip(*workers, strict=True)]


def _of_each(workers: Sequence[Runs], what: str, unit: float) -> list[float]:
    return [round(statistics.median(run[what] for run in runs) / unit, 4) for runs in workers]


def _circumstances(options: argparse.Namespace) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    cores = len(os.sched_getaffinity(0))
    workers = options.hosts * options.ranks_per_host
    return {
        "pairs": options.pairs,
        "warm_up_pairs": WARM_UP,
        "congestion": options.congestion,
        "keep_windows": options.keep_windows,
        "notes": [
            f"{options.hosts} network namespaces of one machine, {options.mbit:g} Mbit/s each way "
            "(tc tbf)",
            "ours is a whole step with control messages, value gate and durable record; of c10d a "
            "call in a process group with ANDON_GATE=all",
            "Gloo exchanges float32 in every row",
            "a worker shares memory with the reducer of its host, if there is one a host and the "
            "encoding is float32; no folder is shared between hosts",
            f"all hosts share {cores} cores: {workers} workers with Gloo, and as many processes "
            "more with a reducer a host; where the cores are busy they are the limit, not the "
            "links",
        ],
    }


def _line(row: dict[str, Any]) -> str:
    low, high = row["spread"]
    ours, gloo = max(row["ours_sent"]), max(row["gloo_sent"])
    return (
        f"{row['path']:8}  {row['encoding']:10}{row['mib']:5}{row['mbit']:8g}"
        f"{row['ours_s'] * 1e3:8.0f} ms{row['gloo_s'] * 1e3:8.0f} ms{row['ratio']:7.2f}"
        f"  {low:.2f} to {high:.2f}      {ours:.2f}, Gloo {gloo:.2f}"
        f"      {row['ours_cores_busy']:.0%}, Gloo {row['gloo_cores_busy']:.0%}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=1000, help="of each link (default: 1000)")
    parser.add_argument(
        "--transport", choices=("tcp", "grpc"), default="tcp", help="of bulk (default: tcp)"
    )
    parser.add_argument(
        "--congestion", default=CONGESTION, help=f"control of TCP (default: {CONGESTION})"
    )
    parser.add_argument(
        "--keep-windows",
        action="store_true",
        help="hosts set net.ipv4.tcp_slow_start_after_idle=0, for both sides",
    )
    parser.add_argument("--hosts", type=int, default=HOSTS, help=f"(default: {HOSTS})")
    parser.add_argument(
        "--ranks-per-host", type=int, default=1, help="of a process group (default: 1)"
    )
    parser.add_argument("--mib", type=int, default=64, help="the model in float32 (default: 64)")
    parser.add_argument("--pairs", type=int, default=7, help="exchanges of each side that count")
    parser.add_argument(
        "--cases",
        type=_cases,
        default=_DEFAULT_CASES,
        help=f"of: {','.join(CASES)} (default: {','.join(_DEFAULT_CASES)})",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.pairs < 1 or options.mib < 1 or options.mbit <= 0:
        parser.error("--pairs and --mib must be at least 1, and --mbit above 0")
    if options.hosts < 2 or options.ranks_per_host < 1:
        parser.error("--hosts must be at least 2, and --ranks-per-host at least 1")
    lines = [name for name in options.cases if CASES[name][0] not in GROUPS]
    if options.ranks_per_host > 1 and lines:
        parser.error(
            f"{', '.join(lines)} has one worker on each host: leave --ranks-per-host out, or "
            "choose --cases c10d-float32"
        )
    return options


def _cases(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"{name!r} is not among {', '.join(CASES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
