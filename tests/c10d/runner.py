"""Runs PyTorch's own distributed tests with the backend "andon", in forked processes.

`python runner.py RANKS AS NAME...` prints a line of JSON for each test: its name, `passed`,
`skipped` or `failed`, and why. Without names it prints the names of all tests.

PyTorch's tests know which backend can do what, by its name. So they are imported as tests of
another backend (`AS`: gloo, or mpi for all-to-all on CPUs), and run with this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any


def main(ranks: str, backend: str, names: list[str]) -> None:
    """Runs tests, or lists them."""
    with tempfile.TemporaryDirectory(prefix="andon-c10d-") as folder:
        for each in ("barrier", "test_dir", "init_dir"):
            Path(folder, each).mkdir()
        os.environ |= {
            "BACKEND": backend,
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "TEMP_DIR": folder,
            "TMPDIR": folder,  # PyTorch's tests leave files.
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",
            "OMP_NUM_THREADS": "1",
        }
        tempfile.tempdir = folder
        cases = _cases()
        if not names:
            found = sorted(each for each in dir(cases) if each.startswith("test_"))
            sys.stdout.write("".join(f"{name}\n" for name in found))
            return
        # Tests of some groups are skipped below eight ranks, except for this one.
        os.environ["BACKEND"] = "mpi"
        with _service(Path(folder)) as address:
            os.environ["ANDON_ADDRESS"] = address
            results = sys.stdout
            with redirect_stdout(sys.stderr):  # PyTorch's tests print.
                for name in names:
                    results.write(json.dumps([name, *_outcome(cases, name)]) + "\n")
                    results.flush()


def _cases() -> Any:
    """The class of PyTorch's tests, with this backend and processes that are forked."""
    import torch.multiprocessing
    from torch.testing._internal.distributed import distributed_test

    import andon_torch.groups  # noqa: F401 - here, and not in every process

    class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]  # it has none
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    distributed_test.BACKEND = "andon"
    return Forked


@contextmanager
def _service(folder: Path) -> Iterator[str]:
    """A coordinator for all tests in turn: each forms a session of its own."""
    command = [
        *(sys.executable, "-m", "andon_cli", "serve", "--port", "0", "--metrics-port", "0"),
        *("--announce", "--parent-pid", str(os.getpid())),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
        process.terminate()


def _outcome(cases: Any, name: str) -> tuple[str, str]:
    result = unittest.TestResult()
    cases(name).run(result)
    failures = [*result.errors, *result.failures]
    if failures:
        return "failed", failures[0][1]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
