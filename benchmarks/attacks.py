"""Measures what each attack on a service costs its line of two workers.

Usage: attacks.py [--seconds S] [--connections N] [--json FILE]. For each attack it reports the
steps committed during the attack, the longest pause between two steps, and the service's memory
before the attack and at its peak.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from hostile.attacks import ATTACKS, Attack, Scale  # tests/ is not a package
from hostile.rig import MIB, Target, attacked, many_descriptors  # likewise


def main() -> None:
    """Runs all attacks on one line, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    given = parser.parse_args()
    scale = Scale(given.seconds, given.connections)
    machine = describe_machine()
    with (
        TemporaryDirectory() as folder,
        many_descriptors(given.connections + 500),
        attacked(Path(folder)) as target,
    ):
        rest = target.attack("none", lambda target: target.rest(given.seconds))
        for name, attack in ATTACKS.items():
            target.attack(name, partial(_attacked_with, attack, scale))
            print(json.dumps(target.done[-1].row()), flush=True)  # the script's output
        steps = target.finish()
    told = {
        "machine": machine,
        "seconds": given.seconds,
        "connections": given.connections,
        "steps": steps,
        "undisturbed_steps_per_second": round(rest.steps / rest.seconds, 1),
        "attacks": [
            {
                "attack": each.attack,
                "seconds": round(each.seconds, 1),
                "steps": each.steps,
                "longest_gap_s": round(each.longest_gap_s, 2),
                "before_mib": each.before_bytes // MIB,
                "peak_mib": each.peak_bytes // MIB,
                "told": each.told,
            }
            for each in target.done[1:]
        ],
    }
    if given.json is not None:
        given.json.write_text(json.dumps(told, indent=2) + "\n")


def _attacked_with(attack: Attack, scale: Scale, target: Target) -> dict[str, Any]:
    return attack(target, scale)


if __name__ == "__main__":
    main()
