"""Skips the modules that need PyTorch where there is none (`make test-core`), and hears Ctrl-C.

It also orders the modules, shares out their compilation, and keeps the garbage collector from what
lives until the end.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

# A shell without job control starts `make test &` with SIGINT ignored, and nohup ignores SIGHUP.
# Every process of a test would inherit that, and the tests' own signals would not reach it.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


# MKL reads it when it first computes, and some tests make a Line of same bits after others did.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

_UNIT = Path(__file__).parent / "unit"
_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without the garbage collector: it would visit all tests so far again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Lets each process of pytest-xdist begin at another place of a folder.

    In a fresh clone every module is compiled first, which takes longer than all else of collecting.
    Beginning at the same place, the processes would compile each module at the same time; so, each
    finds what the others have compiled.
    """
    report = yield
    if _PROCESSES > 1 and isinstance(collector, pytest.Directory) and report.result:
        first = len(report.result) * _PROCESS // _PROCESSES
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts unit tests last: their modules are short, so the processes of `make test` end alike."""
    items.sort(key=lambda item: (item.path.is_relative_to(_UNIT), item.path))


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """Keeps what was imported and collected so far out of every later look at all objects.

    It is a million objects. The garbage collector would visit them again and again, and so would
    `line.prepare`, which looks for schedulers that it was not given.
    """
    gc.collect()
    gc.freeze()


class _WithoutTorch(pytest.Module):
    """A module of tests where PyTorch is not installed: skipped if it imports it."""

    def collect(self) -> Sequence[pytest.Item | pytest.Collector]:
        try:
            return list(super().collect())
        except self.CollectError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and missing.name == "torch":
                pytest.skip("needs PyTorch: make install", allow_module_level=True)
            raise


if find_spec("torch") is None:

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return _WithoutTorch.from_parent(parent, path=module_path)
