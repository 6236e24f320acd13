"""How much does encryption slow an exchange over the wire?

Each worker process is on two lines of one machine, one in plaintext and one over mTLS with
certificates from `andon certs`. It runs whole steps without a model on them alternately: plaintext,
mTLS, plaintext, mTLS.

    python benchmarks/security.py --mib 64 --json benchmarks/results/security.json
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from service import serving
from two_lines import WARM_UP, Side, compare, figures_of

from andon_cli.commands.authority import Authority


def main() -> None:
    """Measures each requested size, and prints a row for it."""
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
    """Runs both services and the workers; `ratio` is the time over mTLS divided by plaintext's."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        now, certs = datetime.now(UTC), folder / "certs"
        Authority.in_folder(folder / "ca", now)[0].certify("localhost", certs, now=now, days=1)
        (folder / "clear").mkdir()
        (folder / "mtls").mkdir()
        clear = stack.enter_context(serving(folder / "clear", workers))
        mtls = stack.enter_context(serving(folder / "mtls", workers, ["--tls", str(certs)]))
        sides = (
            Side(address=clear.address, run_id=clear.run_id, pid=clear.pid),
            Side(address=mtls.address, run_id=mtls.run_id, pid=mtls.pid, certs=str(certs)),
        )
        times = compare(sides, folder, mib=mib, workers=workers, pairs=pairs)
    figures = figures_of(*times, ("clear", "mtls"))
    moved = 2 * workers * mib
    return {
        "workers": workers,
        "mib": mib,
        "pairs": pairs,
        **figures,
        "clear_mib_per_s": round(moved / figures["clear_s"], 1),
        "mtls_mib_per_s": round(moved / figures["mtls_s"], 1),
    }


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
