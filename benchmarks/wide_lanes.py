"""What part of a link does a TCP lane fill where the network limits each connection by itself?

Two hosts, which are network namespaces, train on a line with one reducer: the first host's worker
shares memory with it, and the second one's sends and receives the whole model over its lane. What
lies between them is simulated (`wide_network.py`): a cap for each flow, a long way, or losses. Each
row has one setting of `--connections`; Gloo exchanges the same numbers in turns where that takes
less than minutes.

`of_link` is the part of the time for which the busier direction of the link would have to run at
its full rate. Ours is a whole step: assignment, value gate, averages, durable record, commit. Over
a long way that alone takes several round trips, whatever carries the chunks.

It needs root, iproute2 and a C compiler.

    sudo python benchmarks/wide_lanes.py --json benchmarks/results/wide-lanes.json
    sudo python benchmarks/wide_lanes.py --cases cap-8,cap-8-tls --json -
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hosts_line import Case, Runs, exchange_between
from hosts_network import NoNetwork
from machine import describe_machine
from wide_network import Distance, wide_network

__all__ = ["CASES", "WideCase", "measured"]

_HOSTS = 2
_CAP = Distance(mbit=1000, flow_mbit=200)
_FAR = Distance(mbit=1000, round_trip_ms=100)
_LOSSY = Distance(mbit=100, round_trip_ms=20, loss=0.001)
_FLAT = Distance(mbit=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideCase:
    """A row: what lies between the hosts, and the lane's setting."""

    distance: Distance
    connections: str
    mib: int
    tls: bool = False
    gloo: bool = False
    warm_up: int = 2
    """Exchanges before the first one that counts. With `auto` lanes grow during them."""


def _cases() -> dict[str, WideCase]:
    cases: dict[str, WideCase] = {}
    for name, distance, mib in (
        ("cap", _CAP, 128),
        ("far", _FAR, 512),
        ("lossy", _LOSSY, 32),
        ("flat", _FLAT, 128),
    ):
        for connections in ("1", "8", "16", "auto"):
            warm_up = 8 if connections == "auto" else 2
            cases[f"{name}-{connections}"] = WideCase(
                distance=distance, connections=connections, mib=mib, warm_up=warm_up
            )
    for name in ("cap-8", "flat-1"):
        cases[f"{name}-tls"] = WideCase(**{**_fields(cases[name]), "tls": True})
        cases[f"{name}-gloo"] = WideCase(**{**_fields(cases[name]), "gloo": True})
    return cases


def _fields(case: WideCase) -> dict[str, Any]:
    return {name: getattr(case, name) for name in WideCase.__slots__}


CASES = _cases()
_DEFAULT = [
    *("cap-1", "cap-8-gloo", "cap-auto", "far-1", "far-16"),
    *("lossy-1", "lossy-16", "flat-auto"),
]


def main() -> int:
    """Measures each requested case, and prints a row for it."""
    options = _arguments()
    rows = []
    print("case                of the link      ours      Gloo   processor time of the far host")
    try:
        for name in options.cases:
            rows.append(row := measured(name, CASES[name], options.pairs))
            gloo = f"{row['gloo_s']:8.2f} s" if row["gloo_s"] is not None else "         -"
            print(
                f"{name:16}{row['of_link']:15.1%}{row['ours_s']:8.2f} s{gloo}{row['cpu_s']:8.2f} s",
                flush=True,
            )
    except NoNetwork as error:
        print(f"wide_lanes.py: {error}", file=sys.stderr)
        return 1
    machine = {**describe_machine(), "pairs": options.pairs, "notes": _NOTES}
    figures = json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n"
    if options.json == "-":
        sys.stdout.write(figures)
    elif options.json:
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(figures)
    return 0


_NOTES = [
    "two network namespaces of one machine; what lies between them is a process in user space",
    "ours is a whole step with control messages, value gate and durable record",
    "one lane, to the second host; the first host's worker shares memory with the reducer",
]


def measured(name: str, case: WideCase, pairs: int) -> dict[str, Any]:
    """Runs one case; returns its row. Medians, of the slower of both hosts."""
    exchange = Case(
        path="star",
        encoding="float32",
        mib=case.mib,
        tls=case.tls,
        connections=case.connections,
        gloo=case.gloo,
        warm_up=case.warm_up,
    )
    with wide_network(_HOSTS, case.distance) as hosts:
        sides = exchange_between(hosts, exchange, pairs)
    ours_s = statistics.median(_slowest(sides["ours"]))
    far = sides["ours"][1]
    most = max(statistics.median(run[way] for run in far) for way in ("sent", "received"))
    return {
        "case": name,
        **asdict(case.distance),
        "connections": case.connections,
        "tls": case.tls,
        "mib": case.mib,
        "ours_s": round(ours_s, 4),
        "gloo_s": round(statistics.median(_slowest(sides["gloo"])), 4) if case.gloo else None,
        "of_link": round(most * 8 / (case.distance.mbit * 1e6 * ours_s), 4),
        "cpu_s": round(statistics.median(run["cpu_s"] for run in far), 4),
        "by_tcp": any(run["by_tcp"] > 0 for run in far),
    }


def _slowest(workers: list[Runs]) -> list[float]:
    return [max(run["seconds"] for run in runs) for runs in zip(*workers, strict=True)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3, help="exchanges that count (default: 3)")
    parser.add_argument(
        "--cases",
        type=_names,
        default=_DEFAULT,
        help=f"of: {','.join(CASES)} (default: {','.join(_DEFAULT)})",
    )
    parser.add_argument("--json", help="write the figures here; -: to the standard output")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    if os.geteuid() != 0:
        parser.error("network namespaces need root: run this with sudo")
    return options


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"{name!r} is not among {', '.join(CASES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
