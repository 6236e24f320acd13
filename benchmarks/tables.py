"""Writes the tables of figures in the documents anew, from the JSON in `results`.

A table stands between two comments, `<!-- figures: NAME -->` and `<!-- end of figures -->`. One
whose JSON is not there stays as it is.

    python benchmarks/tables.py            # after a benchmark wrote its --json
    python benchmarks/tables.py --check    # exit code 1 if a table is not what its JSON says
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from line_rates import table_of

__all__ = ["TABLES", "rewritten"]

_HERE = Path(__file__).parent
_DOCS = _HERE.parent / "docs"
_DOCUMENTS = (_HERE / "README.md", _DOCS / "performance.md", _DOCS / "kill-table.md")
_FIGURES = re.compile(
    r"(<!-- figures: ([a-z0-9-]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL
)

Row = Mapping[str, Any]


def main() -> int:
    """Rewrites the documents, or compares them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    stale = []
    for document in _DOCUMENTS:
        text = document.read_text()
        new = rewritten(text, _HERE / "results")
        if new != text:
            stale.append(document.name)
            if not check:
                document.write_text(new)
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    return 1 if check and stale else 0


def rewritten(text: str, results: Path) -> str:
    """A document with its tables as the JSON files in `results` have them.

    Raises:
        ValueError: it names a table that there is not.
    """

    def table(found: re.Match[str]) -> str:
        begin, name, old, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}, only {', '.join(TABLES)}")
        files, make = TABLES[name]
        rows = [row for file in files for row in _rows(results / file)]
        return f"{begin}\n{make(rows)}\n\n{end}" if rows else begin + old + end

    return _FIGURES.sub(table, text)


def _rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return rows


def _table(head: Iterable[str], sides: str, rows: Iterable[Iterable[str]]) -> str:
    """`sides` has a letter a column: l for left, r for right."""
    line = {"l": "---", "r": "---:"}
    lines = [head, (line[side] for side in sides), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _exchange(rows: Iterable[Row]) -> str:
    """All rows of an exchange on one host."""
    head = ("path", "workers", "size", "encoding", "ours", "Gloo", "ratio", "of single pairs",
            "of memory")  # fmt: skip
    cells = (
        (
            row["path"],
            str(row["workers"]),
            _size(row["kib"]),
            row["encoding"],
            f"{row['ours_s'] * 1e3:.1f} ms",
            f"{row['gloo_s'] * 1e3:.1f} ms",
            f"{row['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["spread"]),
            f"{row['of_memory']:.2f}",
        )
        for row in rows
    )
    return _table(head, "lrrlrrrlr", cells)


def _c10d(rows: Iterable[Row]) -> str:
    """Calls in a process group."""
    head = ("call", "ranks", "size", "ours", "Gloo", "ratio", "of single pairs",
            "processor, ours and Gloo")  # fmt: skip
    cells = (
        (
            row["call"],
            str(row["ranks"]),
            _size(row["kib"]),
            f"{row['ours_s'] * 1e3:.3g} ms",
            f"{row['gloo_s'] * 1e3:.3g} ms",
            f"{row['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["spread"]),
            f"{row['ours_cpu_s'] * 1e3:.3g} ms, {row['gloo_cpu_s'] * 1e3:.3g} ms",
        )
        for row in rows
    )
    return _table(head, "lrrrrrll", cells)


def _peer_faults(rows: Iterable[Row]) -> str:
    """Faults of ranks of a process group."""
    head = ("fault of one rank", "in", "until all others have raised", "of single times")
    cells = (
        (
            row["fault"],
            row["call"],
            f"{row['median_s']:.2f} s",
            f"{row['best_s']:.2f} to {row['worst_s']:.2f} s",
        )
        for row in rows
    )
    return _table(head, "llrl", cells)


def _ddp_step(rows: Iterable[Row]) -> str:
    """Steps of DistributedDataParallel."""
    head = ("parameters", "ranks", "over Andon", "over Gloo", "alone", "ratio", "of single pairs",
            "weights")  # fmt: skip
    cells = (
        (
            f"{row['parameters'] / 1e6:.0f} M",
            str(row["ranks"]),
            *(f"{row[side]:.3f} s" for side in ("ours_s", "gloo_s", "solo_s")),
            f"{row['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["spread"]),
            "equal to the bit" if row["weights_equal"] else "differ",
        )
        for row in rows
    )
    return _table(head, "rrrrrrll", cells)


def _expected(rows: Iterable[Row]) -> str:
    """Ratios of one host: a line for each path, encoding and number of workers."""
    kibs = (4, 1024, 16 * 1024, 256 * 1024)
    ratios: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in rows:
        case = row["path"], row["encoding"], row["workers"]
        ratios.setdefault(case, {})[row["kib"]] = row["ratio"]
    head = ("path", "encoding", "workers", *map(_size, kibs))
    cells = (
        (
            _WAYS.get(path, path),
            encoding,
            str(workers),
            *(f"{of[kib]:.2f}" if kib in of else "" for kib in kibs),
        )
        for (path, encoding, workers), of in ratios.items()
    )
    return _table(head, "llr" + "r" * len(kibs), cells)


_WAYS = {
    "shared-memory": "shared memory",
    "tcp": "one reducer, TCP lane",
    "wire": "one reducer, gRPC",
    "ring": "ring, TCP lane",
    "ring-grpc": "ring, gRPC",
}


def _hosts(rows: Iterable[Row]) -> str:
    """Exchanges between hosts."""
    head = ("path", "encoding", "Mbit/s", "ours", "Gloo", "ratio", "of single pairs",
            "sent a link, ours and Gloo", "cores busy, ours and Gloo")  # fmt: skip
    cells = (
        (
            row.get("path", "star" if row.get("reducers") == 1 else "reducers"),
            row["encoding"],
            f"{row['mbit']:g}",
            f"{row['ours_s'] * 1e3:.0f} ms",
            f"{row['gloo_s'] * 1e3:.0f} ms",
            f"{row['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["spread"]),
            f"{max(row['ours_sent']):.2f} D, {max(row['gloo_sent']):.2f} D",
            f"{row['ours_cores_busy']:.0%}, {row['gloo_cores_busy']:.0%}",
        )
        for row in rows
    )
    return _table(head, "llrrrrlll", cells)


def _storm(rows: Iterable[Row]) -> str:
    """The kill table."""
    head = ("system", "of undisturbed", "ideal", "samples/s", "undisturbed", "lost", "doubled",
            "recomputed a fault", "wasted a fault", "longest pause", "loss", "replicas at the end",
            "faults", "minutes", "load")  # fmt: skip
    cells = (
        (
            row["system"],
            f"{row['of_undisturbed']:.0%}",
            f"{row['ideal']:.0%}" if "ideal" in row else "-",
            f"{row['samples_per_s']:.0f}",
            f"{row['undisturbed_samples_per_s']:.0f}",
            str(row["samples_lost"]),
            str(row["samples_doubled"]),
            f"{row['recomputed_per_fault']:g}",
            f"{row['wasted_per_fault']:g}",
            f"{row['longest_pause_s']:.1f} s",
            _loss(row["loss_over_undisturbed"]),
            row["digest"],
            str(sum(row["faults"].values())),
            f"{row['storm_s'] / 60:.0f}",
            f"{row['load']['storm']:.0f}",
        )
        for row in rows
    )
    return _table(head, "lrrrrrrrrrllrrr", cells)


def _loss(found: Mapping[str, float] | None) -> str:
    """Loss beside that of an undisturbed run, and the samples at which they are compared."""
    return f"{found['relative']:+.1%} at {found['samples']:,}" if found else "too few samples"


def _size(kib: int) -> str:
    return f"{kib // 1024} MiB" if kib % 1024 == 0 else f"{kib} KiB"


TABLES: dict[str, tuple[tuple[str, ...], Callable[[list[Row]], str]]] = {
    "exchange": (("exchange.json",), _exchange),
    "expected": (("exchange.json",), _expected),
    "expected-xeon": (("exchange-xeon.json", "exchange-narrow.json"), _expected),
    "hosts": (("hosts.json", "hosts-300.json"), _hosts),
    "hosts-bbr": (("hosts-bbr.json",), _hosts),
    "c10d": (("c10d.json", "c10d-calls.json"), _c10d),
    "c10d-hosts": (("c10d-hosts.json", "c10d-hosts-300.json"), _hosts),
    "c10d-shared-hosts": (("c10d-shared-hosts.json", "c10d-shared-hosts-300.json"), _hosts),
    "ddp-step": (("ddp-step.json",), _ddp_step),
    "peer-faults": (("peer-faults.json",), _peer_faults),
    "line-rates": (("line-rates.json",), table_of),
    "storm": (("storm.json",), _storm),
}
"""By name: the JSON files, and what makes the table of their rows."""


if __name__ == "__main__":
    sys.exit(main())
