"""Which link does each path fill, and on how many cores? Processor seconds a GiB and host.

A link of the machine at hand is slower than those of a data centre, so this measures what does not
depend on the link: how much processor time a host spends on an exchange, and how many bytes cross
its link. Four hosts are simulated as in `hosts.py`, with links that nothing limits. Each case runs
in turns with Gloo's ring all-reduce of the same float32 numbers.

From both follows how many cores a host needs so that the link is the limit, and how long an
exchange takes then. `--table` writes that as Markdown, with what it assumes.

It needs root and iproute2.

    sudo python benchmarks/line_rates.py --json benchmarks/results/line-rates.json
    python benchmarks/line_rates.py --table benchmarks/results/line-rates.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hosts import figures_of
from hosts_line import HOSTS, PATHS, WARM_UP, Case, exchange_between
from hosts_network import CONGESTION, NoNetwork, network
from machine import describe_machine
from schedules import chosen_from, write_rows

LINKS_GBIT = (1, 10, 25, 100)
_ENCODINGS = ("float32", "bfloat16", "int8", "int4")
_NAMES = {
    "reducers": "a reducer on each host",
    "star": "one reducer",
    "ring": "ring",
    "shared-memory": "shared memory, one host",
}
_ASSUMPTIONS = (
    "Processor time is what the kernel charges to a host's worker and, if it has one, its service. "
    f"Of {HOSTS} hosts the one that spends most counts: with one reducer, the reducer's.",
    "Time and bytes grow in proportion to the model, and its threads use as many cores as the "
    "table says. A connection has one thread at each end, so above some cores more connections "
    "would be needed.",
    "A virtual link stands in for a network card. Neither that nor a card with offloading makes "
    "the processor segment or check packets; a card's driver and interrupts come on top.",
    "The cores are those of the machine in the JSON. What encodes and averages is limited by the "
    "memory too, which many cores share.",
    "Nothing else needs the cores: backward runs on a GPU, or before the exchange.",
)


def main() -> int:
    """Measures each requested case, or prints the table of an earlier measurement."""
    options = _arguments()
    if options.table:
        print(table_of(json.loads(options.table.read_text())["rows"]))
        return 0
    machine = {**describe_machine(), **_circumstances(options)}
    rows: list[dict[str, Any]] = []
    try:
        with network(HOSTS, None, options.congestion) as hosts:
            for case in _cases_of(options):
                sides = exchange_between(hosts, case, options.pairs)
                rows.append({**asdict(case), **figures_of(sides, case.mib * 2**20)})
                print(_line(rows[-1]), flush=True)
    except NoNetwork as error:
        print(f"line_rates.py: {error}", file=sys.stderr)
        return 1
    print(table_of(rows))
    if options.json:
        write_rows(options.json, machine, rows)
    return 0


def _cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """All combinations that exist: memory that is shared is neither encoded, sent nor encrypted."""
    for path in options.paths:
        if path == "shared-memory":
            yield Case(path=path, encoding="float32", mib=options.mib)
            continue
        for encoding, transport, tls in itertools.product(
            options.encodings, options.transports, options.tls
        ):
            yield Case(
                path=path, encoding=encoding, mib=options.mib, transport=transport, tls=tls == "on"
            )


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown: cost of a GiB of the model, and the cores for each link."""
    links = "".join(f" {rate} Gbit/s |" for rate in LINKS_GBIT)
    lines = [
        "| path | encoding | transport | TLS | processor s a GiB and host "
        f"| GiB over the link, each way | GiB/s a core |{links}",
        "|---|---|---|---|---:|---:|---:|" + "---:|" * len(LINKS_GBIT),
    ]
    gloo: list[tuple[float, float]] = []
    for row in rows:
        cost, link = _costs(row, "ours")
        words = (
            _NAMES[row["path"]],
            row["encoding"],
            "memory" if row["path"] == "shared-memory" else _TRANSPORTS[row["transport"]],
            "yes" if row["tls"] else "no",
        )
        lines.append(_table_row(words, cost, link))
        if row["path"] != "shared-memory":
            gloo.append(_costs(row, "gloo"))
    if gloo:
        costs, bytes_ = (sorted(each)[len(gloo) // 2] for each in zip(*gloo, strict=True))
        lines.append(_table_row(("Gloo's ring", "float32", "TCP", "no"), costs, bytes_))
    head = (
        "A GiB is one of the model in float32. The last columns are the cores that a host needs to "
        "fill its link, and in brackets the seconds of a GiB's exchange at the full rate."
    )
    assumed = (f"- {each}" for each in _ASSUMPTIONS)
    return "\n".join((head, "", *lines, "", "Assumptions:", "", *assumed))


_TRANSPORTS = {"tcp": "TCP lane", "grpc": "gRPC"}


def _costs(row: Mapping[str, Any], side: str) -> tuple[float, float]:
    """Processor seconds of the busiest host, and GiB over the busiest link, for a GiB of model."""
    model_gib = row["mib"] / 1024
    on_one_host = row["path"] == "shared-memory"
    cost = (sum if on_one_host else max)(row[f"{side}_cpu_s"]) / model_gib
    return cost, max(*row[f"{side}_sent"], *row[f"{side}_received"])


def _table_row(words: Sequence[str], cost: float, link: float) -> str:
    """One line: `cost` in processor seconds, `link` in GiB over the link, for a GiB of model."""
    cells = [*words, f"{cost:.2f}"]
    if link < _NO_LINK:
        cells += ["-", f"{1 / cost:.2f}", *["-"] * len(LINKS_GBIT)]
        return f"| {' | '.join(cells)} |"
    cells += [f"{link:.2f}", f"{link / cost:.2f}"]
    for rate in LINKS_GBIT:
        seconds = link * 2**30 * 8 / (rate * 1e9)
        cells.append(f"{cost / seconds:.1f} ({seconds:.2g} s)")
    return f"| {' | '.join(cells)} |"


_NO_LINK = 0.01
"""Below this, what crossed the link was control messages."""


def _line(row: Mapping[str, Any]) -> str:
    (ours, link), (gloo, _) = _costs(row, "ours"), _costs(row, "gloo")
    missed = row["path"] in ("reducers", "star") and row["transport"] == "tcp" and not row["by_tcp"]
    lane = "  over gRPC: no lane was opened" if missed else ""
    return (
        f"{row['path']:14}{row['encoding']:10}{row['transport']:6}{'TLS' if row['tls'] else '':5}"
        f"{ours:8.2f} s/GiB, Gloo {gloo:.2f}   {link:.2f} GiB over the link"
        f"   {row['ratio']:.2f} of Gloo's speed{lane}"
    )


def _circumstances(options: argparse.Namespace) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "pairs": options.pairs,
        "warm_up_pairs": WARM_UP,
        "congestion": options.congestion,
        "notes": [
            f"{HOSTS} network namespaces of one machine, links not limited",
            "cpu_s: of each host's worker and service, medians of processor seconds an exchange",
            "sent, received: over each host's link, headers included, of the model in float32",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "paths": (PATHS, PATHS),
        "encodings": (_ENCODINGS, _ENCODINGS[:3]),
        "transports": (("tcp", "grpc"), ("tcp", "grpc")),
        "tls": (("off", "on"), ("off", "on")),
    }
    for name, (names, default) in known.items():
        chosen: Callable[[str], list[str]] = chosen_from(dict.fromkeys(names))
        text = f"of: {','.join(names)} (default: {','.join(default)})"
        parser.add_argument(f"--{name}", type=chosen, default=list(default), help=text)
    parser.add_argument("--mib", type=int, default=64, help="the model in float32 (default: 64)")
    parser.add_argument("--pairs", type=int, default=5, help="exchanges of each side that count")
    parser.add_argument(
        "--congestion", default=CONGESTION, help=f"control of TCP (default: {CONGESTION})"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--table", type=Path, help="print the table of these figures, and end")
    options = parser.parse_args()
    if options.pairs < 1 or options.mib < 1:
        parser.error("--pairs and --mib must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
