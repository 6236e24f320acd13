"""A Docker daemon with the project's images for the tests; skipped where the machine has none.

`ANDON_CONTAINERS_REPORT=FILE` also writes the seconds of everything as JSON.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from containers.engine import Engine, engine
from containers.images import make_images
from containers.machine import Missing, require
from containers.report import Report
from containers.stack import Stack

_REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REPORT] = Report()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        projects = [each for each in item.funcargs.values() if isinstance(each, Stack)]
        if report.failed:
            report.sections += [(f"containers of {each.name}", each.said()) for each in projects]
        name = item.name.removeprefix("test_").replace("_", " ")
        item.config.stash[_REPORT].add(name, report.outcome, report.duration)
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    report = config.stash[_REPORT]
    if not report.scenarios_s:
        return
    terminalreporter.section("containers: seconds of each scenario")
    for line in report.lines():
        terminalreporter.write_line(line)
    if file := os.environ.get("ANDON_CONTAINERS_REPORT"):
        report.write(Path(file))


@pytest.fixture(scope="session")
def daemon(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A daemon with every image that the form for CPUs names."""
    report = request.config.stash[_REPORT]
    # A run that is told to end removes what it made.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        require()
        with engine() as started:
            make_images(started, Stack(engine=started).config(), report)
            yield started
    except Missing as missing:
        pytest.skip(str(missing))
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def stack(daemon: Engine) -> Iterator[Stack]:
    """A project on the daemon, which is removed in the end with its volumes."""
    made = Stack(engine=daemon)
    yield made
    made.down("--volumes", "--timeout", "5")
