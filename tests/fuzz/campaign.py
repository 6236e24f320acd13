"""Fuzzes every target (or the named ones) for SECONDS each, and prints a summary.

Usage: campaign.py SECONDS [TARGET ...], in an environment with atheris: `make fuzz`. New inputs go
to .fuzz/corpus, failing ones to .fuzz. Once a failing input is fixed, it belongs in regressions/.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent
_FIGURES = (r"number_of_executed_units: (\d+)", r"cov: (\d+)", r" ft: (\d+)")
_ROOTS = ("proto", "services", "trainer", "tests")
sys.path[:0] = [str(_ROOT / each) for each in _ROOTS]

from fuzz.targets import TARGETS  # noqa: E402  # the roots are not packages


def main() -> int:
    """Runs the targets one after another; returns 1 if one of them failed."""
    seconds, names = int(sys.argv[1]), sys.argv[2:] or list(TARGETS)
    scratch = _ROOT / ".fuzz"
    scratch.mkdir(exist_ok=True)
    failed = 0
    _say(f"{'target':10} {'inputs':>10} {'edges':>6} {'features':>8} {'crashes':>7}")
    for name in names:
        ended = subprocess.run(
            [sys.executable, _HERE / "run.py", name, str(seconds), scratch],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        output = ended.stdout + ended.stderr
        crashed = ended.returncode != 0
        failed += crashed
        inputs, edges, features = (_last(pattern, output) for pattern in _FIGURES)
        _say(f"{name:10} {inputs:>10} {edges:>6} {features:>8} {int(crashed):>7}")
        if crashed:
            _say(output[-3000:])
    return int(failed > 0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _last(pattern: str, text: str) -> str:
    found = re.findall(pattern, text)
    return str(found[-1]) if found else "-"


if __name__ == "__main__":
    sys.exit(main())
