"""The house stands as it was drawn: who imports whom, and where no package may be."""

from __future__ import annotations

import subprocess
import sys
import tomllib

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
