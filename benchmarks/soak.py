"""`make soak`: what `make test` does in seconds, for hours; every part runs, whatever fails before.

    python benchmarks/soak.py [--only PART ...] [--json FILE]

Writes how many tests of each part passed, failed and were skipped, the names of those that failed,
and the time. Processes of a part leave core dumps where the system keeps any, and print the stacks
of their threads if they crash. A variable that is set already overrides a part's own, so
`ANDON_STORMS=2 make soak` runs two storms under each schedule.

Ends with 1 if a test failed, or a part ran none.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from pathlib import Path

from machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some tests, and what makes them long."""

    tests: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """What the part's processes get; what the caller has set goes first."""
        return self.variables | {"PYTHONFAULTHANDLER": "1"} | dict(os.environ)


PARTS = {
    "random": Part(
        tests=(
            "tests/unit/andon",
            "tests/unit/andon_coordinator/test_core_faults.py",
            "tests/unit/andon_coordinator/test_implausible_messages.py",
            "tests/unit/andon_reducer/test_implausible_messages.py",
            "tests/fuzz",
        ),
        variables={"ANDON_SEEDS": "1000", "ANDON_EXAMPLES": "1000"},
    ),
    "storms": Part(
        tests=("tests/chaos/test_storm.py", "-k", "not under_tls"), variables={"ANDON_STORMS": "10"}
    ),
    "tls": Part(
        tests=("tests/chaos/test_storm.py", "-k", "under_tls"), variables={"ANDON_STORMS": "10"}
    ),
    "learners": Part(
        tests=("tests/chaos/test_learning_storm.py",), variables={"ANDON_STORMS": "10"}
    ),
    "same-bits": Part(
        tests=("tests/chaos/test_same_bits_storm.py",), variables={"ANDON_SAME_BITS_STORMS": "10"}
    ),
    "peers": Part(tests=("tests/chaos/test_peer_storm.py",), variables={"ANDON_STORMS": "10"}),
    "conformance": Part(
        tests=("tests/conformance",),
        variables={"ANDON_CONFORMANCE": "1", "ANDON_JUDGED": "100"},
    ),
    "attacks": Part(
        tests=("tests/hostile",),
        variables={
            "ANDON_ATTACK_SECONDS": "10",
            "ANDON_ATTACK_CONNECTIONS": "5000",
            "ANDON_REPLAYS": "30",
        },
    ),
    "search": Part(tests=("tests/search", "-s"), variables={"ANDON_SEARCH_STATES": "600000"}),
    "upgrades": Part(tests=("tests/upgrade",), variables={"ANDON_UPGRADES": "all"}),
    "audit": Part(tests=("tests/integration/test_audit.py",), variables={"ANDON_AUDIT": "1"}),
    "plain": Part(
        tests=("tests/integration/test_plain_scripts.py",), variables={"ANDON_RAY": "all"}
    ),
    "benchmarks": Part(
        tests=tuple(
            str(each.relative_to(ROOT))
            for each in sorted((ROOT / "tests/integration").glob("test_benchmarks*.py"))
        ),
        variables={"ANDON_BENCHMARKS": "1"},
    ),
    "large": Part(
        tests=("tests/integration/andon_trainer/test_large.py",), variables={"ANDON_LARGE": "1"}
    ),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a part."""

    passed: int
    skipped: int
    failed: list[str]
    exit_code: int
    minutes: float
    variables: dict[str, str]

    @property
    def is_sound(self) -> bool:
        """Whether tests ran, and none failed."""
        return self.exit_code == 0 and self.passed > 0


def run(part: Part) -> Outcome:
    """Runs a part with pytest, in a process of its own."""
    environment = part.environment()
    with tempfile.TemporaryDirectory(prefix="andon-soak-") as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--timeout", "3600"]
        began_at = time.monotonic()
        done = subprocess.run(
            [*command, f"--junitxml={report}", *part.tests],
            cwd=ROOT,
            env=environment,
            preexec_fn=_leave_cores,
            check=False,
        )
        minutes = (time.monotonic() - began_at) / 60
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Outcome(
        passed=len(cases) - skipped - len(failed),
        skipped=skipped,
        failed=failed,
        exit_code=done.returncode,
        minutes=round(minutes, 1),
        variables={name: environment[name] for name in part.variables},
    )


def _leave_cores() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def main() -> int:
    """Runs the parts, and writes the file after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/soak.json")
    arguments = parser.parse_args()
    machine, parts, sound = describe_machine(), {}, True
    for name in arguments.only:
        print(f"soak: {name}", flush=True)
        outcome = run(PARTS[name])
        sound &= outcome.is_sound
        parts[name] = asdict(outcome)
        found = {"commit": _commit(), "machine": machine, "parts": parts}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"soak: {name}: {'passed' if outcome.is_sound else 'FAILED'}", flush=True)
    return 0 if sound else 1


def _commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
