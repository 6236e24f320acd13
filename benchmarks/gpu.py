"""Everything that needs a GPU: the tests, two workers end to end, and the figures, in one JSON.

    make gpu                                     # on a machine with CUDA
    python benchmarks/gpu.py --device cpu ...    # the same script on the CPU, as its stand-in

On a machine without CUDA it says so and ends with 0. Where there is a GPU it runs all tests that
are marked `cuda`, and measures:

- a training step of two workers on one GPU, and on two if there are two: on the line, with
  DistributedDataParallel over Gloo, over NCCL (which wants a GPU for each worker), and alone; and
  how much of the exchange backward hides;
- what `Line` costs a script that runs alone, and how often each of the two waits for the GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import overhead
import torch
import training
from machine import describe_machine

_ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Runs the tests and measures; exits with 1 if a test failed."""
    options = _arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"make gpu: PyTorch {torch.__version__} sees no CUDA device, so nothing ran. It takes "
            "an NVIDIA GPU with its driver, and a build of PyTorch for CUDA (pip install torch)"
        )
        return
    figures: dict[str, Any] = {"machine": {**describe_machine(), "gpus": _gpus(options.device)}}
    if options.tests:
        figures["tests"] = _run_tests(options.tests)
    figures["training"] = [
        {"devices": devices, **_trained(options, devices)} for devices in _placements(options)
    ]
    effort = overhead.Effort(rounds=options.rounds, pairs=options.pairs, block=options.block)
    figures["overhead"] = [
        overhead.measure(work, effort, device=options.device)
        for work in overhead.WORKS
        if work.model in options.models
    ]
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if figures.get("tests", {}).get("failed"):
        sys.exit(1)


def _gpus(device: str) -> list[dict[str, object]]:
    """The devices' names and memory."""
    if device == "cpu":
        return []
    facts = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())]
    return [
        {"name": each.name, "memory_gib": round(each.total_memory / 2**30, 1)} for each in facts
    ]


def _placements(options: argparse.Namespace) -> list[list[str]]:
    """The workers' devices of each row."""
    if options.device == "cpu":
        return [["cpu"]]
    found = [["cuda:0"]]
    if torch.cuda.device_count() > 1:
        found.append(["cuda:0", "cuda:1"])
    return found


def _trained(options: argparse.Namespace, devices: list[str]) -> dict[str, Any]:
    shape = training.Shape(
        layers=options.layers,
        width=options.width,
        context=options.context,
        samples=options.samples,
    )
    return training.measure(shape, 2, options.steps, devices)


def _run_tests(paths: list[str]) -> dict[str, Any]:
    """Runs the tests there that are marked `cuda`; returns how they ended."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", "-m", "cuda"]
        subprocess.run([*command, f"--junitxml={report}", *paths], cwd=_ROOT, check=False)
        return _ends_in(report)


def _ends_in(report: Path) -> dict[str, Any]:
    """How the tests of a report in JUnit's format ended."""
    ends: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        end = "failed" if kinds & {"failure", "error"} else "passed"
        name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
        ends["skipped" if "skipped" in kinds else end].append(name)
    return {**ends, "passed": len(ends["passed"])}


def _arguments() -> argparse.Namespace:
    models = [work.model for work in overhead.WORKS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="where; none: figures only")
    parser.add_argument("--steps", type=int, default=20, help="of each side that count")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=512, help="letters of a sample")
    parser.add_argument("--samples", type=int, default=8, help="a worker's share of a step")
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="of overhead")
    parser.add_argument("--rounds", type=int, default=3, help="of overhead: pairs of processes")
    parser.add_argument("--pairs", type=int, default=5, help="of overhead: blocks in a round")
    parser.add_argument("--block", type=int, help="of overhead: steps of a block")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
