"""Runs one target under atheris, a coverage-guided fuzzer.

Usage: run.py TARGET SECONDS SCRATCH. New inputs go to the folder SCRATCH/corpus, failing ones to
SCRATCH; the last lines on stderr say how many inputs were tried and what was reached. `make fuzz`
runs all targets; see docs/verification.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

_CORPUS = Path(__file__).with_name("corpus")
_REGRESSIONS = Path(__file__).with_name("regressions")


def main() -> None:
    """Fuzzes until the time is over or a contract is broken."""
    name, seconds, scratch = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    with atheris.instrument_imports(
        include=["andon", "andon_coordinator", "andon_reducer", "andon_trainer"]
    ):
        from fuzz.targets import TARGETS
    found = scratch / "corpus" / name
    found.mkdir(parents=True, exist_ok=True)
    folders = [found, _CORPUS / name, _REGRESSIONS / name]
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={seconds}",
            f"-artifact_prefix={scratch}/{name}-",
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-max_len=4096",
            "-print_final_stats=1",
            *(str(folder) for folder in folders if folder.exists()),
        ],
        TARGETS[name],
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
