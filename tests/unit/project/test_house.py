"""The house stands as it was drawn: who imports whom, and where no package may be."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from unit.project.documents import ROOT

TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def test_every_layer_contract_holds() -> None:
    # In a process of its own: it sets up logging, and so takes other tests' loggers away.
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(
        [*lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )

    contracts = TOOLS["importlinter"]["contracts"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(contracts)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize("folder", ["proto", "services", "trainer", "tests", "docker"])
def test_no_folder_of_packages_is_a_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), (
        f"{folder}/__init__.py would make a top-level package {folder!r}, "
        "which collides with users' own modules"
    )


def test_every_folder_with_code_is_type_checked() -> None:
    checked = TOOLS["mypy"]["files"]

    for path in ROOT.glob("*/**/*.py"):
        name = str(path.relative_to(ROOT))
        if not name.startswith((".", "proto/generate.py")):
            assert any(f"{name}/".startswith(f"{each}/") for each in checked), name


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt", "Makefile", ".ci/run"])
def test_no_test_is_tried_again_until_it_passes(file: str) -> None:
    text = (ROOT / file).read_text()

    assert not re.search(r"reruns?\b|rerunfailures|pytest-retry|\bflaky\b|--last-failed", text), (
        file
    )


def test_tests_hear_the_signals_that_their_shell_ignores(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "import signal\n"
        "def test_it():\n"
        "    ignored = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP)]\n"
        "    assert signal.SIG_IGN not in ignored\n"
    )
    own = ["-p", "no:cacheprovider", "-c", str(tmp_path / "none.ini"), "-q", str(test)]
    program = (
        "import runpy, signal, sys, pytest\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        f"runpy.run_path({str(ROOT / 'tests/conftest.py')!r})\n"
        f"sys.exit(pytest.main({own!r}))\n"
    )
    (tmp_path / "none.ini").write_text("[pytest]\n")

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100
    )

    assert done.returncode == 0, done.stdout + done.stderr
