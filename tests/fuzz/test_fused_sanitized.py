"""The compiled functions with hostile buffers: as built, and with sanitizers.

The number of calls is thirty times `ANDON_EXAMPLES`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import andon
from andon.protocol.encoding import fused

CALLS = 30 * int(os.environ.get("ANDON_EXAMPLES") or 60)
SCRIPT = Path(__file__).with_name("fused_calls.py")
SOURCE = Path(andon.__file__).parent / "protocol/_fused.c"
SANITIZERS = "-fsanitize=address,undefined"


def make_calls(module: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, module, str(CALLS), "1"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_buffers_that_do_not_fit_are_refused_and_nothing_else_happens() -> None:
    if fused is None or fused.__file__ is None:
        pytest.skip("Andon was installed without a C compiler: apt-get install gcc")

    ended = make_calls(Path(fused.__file__))

    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("portable", [(), ("-DANDON_PORTABLE",)], ids=["avx", "portable"])
def test_sanitizers_find_nothing(tmp_path: Path, portable: tuple[str, ...]) -> None:
    compiler, headers = shutil.which("gcc"), Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").exists():
        pytest.skip("there is no C compiler: apt-get install gcc")
    module = tmp_path / "_fused.so"
    flags = ["-O1", "-g", "-ffp-contract=off", "-shared", "-fPIC", SANITIZERS, *portable]
    built = subprocess.run(
        [compiler, *flags, "-fno-sanitize-recover=all", f"-I{headers}", SOURCE, "-o", module],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"the compiler has no sanitizers: {built.stderr[-200:]}")
    runtimes = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]

    ended = make_calls(
        module,
        LD_PRELOAD=" ".join(runtimes),
        ASAN_OPTIONS="detect_leaks=0:handle_segv=0",
        PYTHONMALLOC="malloc",
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
