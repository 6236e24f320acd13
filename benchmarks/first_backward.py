"""Is the first concurrent backward of a process right? Many processes, under load.

A test of a host's mean (`test_f_dp_005_...[2-whole]`) was once off by 5e-5 of the value in all
elements. It was the first concurrent backward of its process. Here that test's body is the first
thing that a process computes, in many processes at once:

- `cold`, or `warm`: after one other concurrent backward;
- with MKL's default, or with `MKL_CBWR=COMPATIBLE` (its conditional numerical reproducibility).

A new interpreter imports torch for seconds, so most processes are forks of a parent that has
imported everything and computed nothing. MKL and torch's pools of threads are then not initialised;
the parent refuses to begin if it has a second thread. A part is new interpreters nevertheless.

MKL's VML chooses a function's kernel by a processor type that its first call finds. MKL 2024.2
stores the type, and translates it then; on processors with AVX-512 another thread that reads it in
between takes a kernel of less accuracy (https://github.com/pytorch/pytorch/issues/188792).
`--avx512` has a processor with AVX2 pass for one with AVX-512: torch finds the latter's type, and
gets AVX2's accurate kernels for it. The kernel that the race takes is AVX2's in any case. `tanh` is
that function alone, by several threads; `imitated` is what that kernel makes of the mean.

    python benchmarks/first_backward.py --json benchmarks/results/first-backward.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from unit.andon_trainer.host_bench import HostBench  # tests/ is not a package
from unit.andon_trainer.test_hosts import samples

_SELF = Path(__file__)
_MOST_KEPT = 20
_THREADS = 8
_TABLES = ("mkl_vml_kernel_sTanh_ttab", "mkl_vml_kernel_sExp_ttab")
"""Deviations of a cell that are kept whole."""
_POSITIONS = samples(*range(7))
_AVX512, _AVX512_HERE, _AVX2_ROW, _AVX512_ROW = 9, 5, 9, 11
"""The type of AVX-512, what it is translated to, and rows of the table of accurate kernels."""


def body(tanh: torch.nn.Module | None = None) -> list[dict[str, Any]]:
    """What the test does; returns each block that was not as plain PyTorch's, with both.

    One process of the host takes `tanh`, if that is given.
    """
    bench = HostBench(warm=False)
    if tanh is not None:
        bench.processes[1].model.register_module("1", tanh)
    bench.assign((0, 7))
    assert bench.run() == [None, None]
    sent, expected, again = bench.sent[0], bench.mean(_POSITIONS), bench.mean(_POSITIONS)
    return [
        {
            "block": block,
            "sent": sent[block].tolist(),
            "expected": mean.tolist(),
            "again": again[block].tolist(),
            "ratios": ratios(sent[block], mean),
        }
        for block, mean in expected.items()
        if not torch.allclose(sent[block], mean, rtol=1e-6, atol=1e-8)
        or not torch.equal(mean, again[block])
    ]


def ratios(sent: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """What each element is off by, of its value."""
    return [
        float(f"{is_ / should - 1:.1e}") if should else is_
        for is_, should in zip(sent.tolist(), expected.tolist(), strict=True)
    ]


def warm_up() -> None:
    """Another concurrent forward and backward, without the line."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    with ThreadPoolExecutor(2) as threads:
        for loss in threads.map(lambda _: model(torch.ones(4, 3)).square().mean(), range(2)):
            loss.backward()


def cold() -> list[dict[str, Any]]:
    """The life of one process."""
    return body()


def warm() -> list[dict[str, Any]]:
    """Likewise, after a concurrent backward."""
    warm_up()
    return body()


def tanh() -> list[dict[str, Any]]:
    """The race alone: tanh by several threads as the first function of a process."""
    torch.set_num_threads(_THREADS)
    values = torch.linspace(-2, 2, 5000 * _THREADS)
    first, again = torch.tanh(values), torch.tanh(values)
    if torch.equal(first, again):
        return []
    off = (first / again - 1).abs()
    largest = [float(f"{off.max():.1e}")]
    return [{"elements": int((off > 0).sum()), "expected": 0, "again": 0, "ratios": largest}]


def tanh_after_exp() -> list[dict[str, Any]]:
    """Likewise, after one thread has called another function."""
    torch.ones(8).exp()
    return tanh()


_LIVES = {each.__name__: each for each in (cold, warm, tanh, tanh_after_exp)}


def forks(count: int, at_once: int, life: Callable[[], object]) -> Iterator[Any]:
    """What `life` returned in each of `count` children, some of them at once.

    Raises:
        RuntimeError: this process has threads, or a child died.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads: something was computed before the fork")
    running: dict[int, int] = {}
    begun = 0
    while begun < count or running:
        while begun < count and len(running) < at_once:
            read, write = os.pipe()
            begun += 1
            if pid := os.fork():
                os.close(write)
                running[pid] = read
                continue
            os.write(write, json.dumps(life()).encode())  # Less than a pipe holds.
            os._exit(0)
        pid, status = os.wait()
        with open(running.pop(pid), "rb") as pipe:
            if status:
                raise RuntimeError(f"a child ended with status {status}")
            yield json.load(pipe)


def interpreters(count: int, at_once: int, life: str) -> Iterator[Any]:
    """What a life returned in each of `count` new interpreters."""

    def one(_number: int) -> Any:
        return _itself("--life", life, "--processes", "0")

    with ThreadPoolExecutor(at_once) as threads:
        yield from threads.map(one, range(count))


def summary(found: Iterator[Any]) -> dict[str, Any]:
    """How many processes deviated, by how much at most, and the first of them whole."""
    began = time.monotonic()
    processes, deviations, largest, wrong_reference = 0, [], 0.0, 0
    for blocks in found:
        processes += 1
        if blocks:
            deviations.append(blocks)
            wrong_reference += any(each["expected"] != each["again"] for each in blocks)
            largest = max(largest, *(abs(off) for each in blocks for off in each["ratios"]))
    return {
        "processes": processes,
        "deviations": len(deviations),
        "of_the_expectation": wrong_reference,
        "largest": largest,
        "kept": deviations[:_MOST_KEPT],
        "seconds": round(time.monotonic() - began),
    }


class Vml:
    """Places in torch's copy of MKL 2024.2 that say which kernel tanh gets."""

    def __init__(self) -> None:
        """Finds them by the names that torch's library has.

        Raises:
            LookupError: it has no such names.
        """
        library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        listed = subprocess.run(["nm", str(library)], capture_output=True, text=True).stdout
        places = {
            name: int(place, 16)
            for place, _kind, name in (
                line.split() for line in listed.splitlines() if line[0] != " "
            )
            if "vml_cpu_type" in name or name in ("vmsTanh", *_TABLES)
        }
        if len(places) != 6:
            raise LookupError(f"{library} has other names: {sorted(places)}")
        here = ctypes.cast(ctypes.CDLL(str(library)).vmsTanh, ctypes.c_void_p).value
        assert here is not None
        self._moved = here - places["vmsTanh"]
        self._places = places

    def type(self, name: str) -> ctypes.c_int32:
        """A processor type that was found, or -1."""
        return ctypes.c_int32.from_address(self._moved + self._places[name])

    @property
    def used(self) -> ctypes.c_int32:
        """The type that a function's kernel is chosen by."""
        return self.type("mkl_vml_serv_cpu_detect.vml_cpu_type")

    def pass_for_avx512(self) -> None:
        """Call it before the first function: then all goes as on AVX-512, in AVX2's kernels."""
        for table in _TABLES:
            rows = (ctypes.c_void_p * 18).from_address(self._moved + self._places[table])
            rows[_AVX512_ROW] = rows[_AVX2_ROW]
        self.type("mkl_vml_cpu_type").value = _AVX512


class Inaccurate(torch.nn.Module):
    """Tanh by the kernel that the race takes."""

    def __init__(self, vml: Vml) -> None:
        """Uses `vml`, which passes for AVX-512."""
        super().__init__()
        self._vml = vml

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In place of the accurate result, which backward uses too."""
        out = torch.tanh(x)
        right, self._vml.used.value = self._vml.used.value, _AVX512
        out.data.copy_(torch.tanh(x.detach()))
        self._vml.used.value = right
        return out


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each cell."""
    cells = [(life, "default", True) for life in reversed(_LIVES)] if options.avx512 else []
    cells += [(life, mkl, False) for life in ("cold", "warm") for mkl in ("default", "COMPATIBLE")]
    for life, mkl, avx512 in cells:
        arguments = ["--life", life, "--at-once", str(options.at_once)]
        kinds = {"forks": options.processes, "interpreters": 0 if avx512 else options.fresh}
        for kind, count in kinds.items():
            if count:
                more = ["--processes", str(count), f"--{kind}", *(["--avx512"] * avx512)]
                row = _itself(*arguments, *more, mkl=mkl)
                cell = {"life": life, "mkl_cbwr": mkl, "as_avx512": avx512, "processes_are": kind}
                yield {**cell, **row}


def main() -> None:
    """Measures all cells and prints a row for each; or is one of their processes."""
    options = _arguments()
    if options.life:
        print(json.dumps(_part(options)))
        return
    figures: dict[str, Any] = {"machine": {**describe_machine(), "notes": options.note}}
    if options.avx512:
        figures["imitated"] = _itself("--life", "imitated")
    figures["rows"] = []
    for row in measure(options):
        figures["rows"].append(row)
        shown = {name: value for name, value in row.items() if name != "kept"}
        print(", ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
        if options.json:  # After each row: all take an hour.
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _part(options: argparse.Namespace) -> Any:
    if options.life == "imitated":
        vml = Vml()
        vml.pass_for_avx512()
        return body(Inaccurate(vml))
    life = _LIVES[options.life]
    if not options.processes:
        return life()
    if options.interpreters:
        return summary(interpreters(options.processes, options.at_once, options.life))
    if options.avx512:
        Vml().pass_for_avx512()
    return summary(forks(options.processes, options.at_once, life))


def _itself(*arguments: str, mkl: str = "default") -> Any:
    # OpenBLAS, which is NumPy's, starts its threads when it is imported.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    if mkl != "default":
        environment["MKL_CBWR"] = mkl
    command = [sys.executable, str(_SELF), *arguments]
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(ran.stdout)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=5000, help="forks for each cell")
    parser.add_argument("--fresh", type=int, default=100, help="new interpreters for each cell")
    parser.add_argument("--at-once", type=int, default=6, help="processes at a time (default: 6)")
    parser.add_argument("--avx512", action="store_true", help="as if this were AVX-512, too")
    parser.add_argument("--note", action="append", default=[], help="about the circumstances")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--life", choices=[*_LIVES, "imitated"], help=argparse.SUPPRESS)
    parser.add_argument("--forks", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--interpreters", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
