"""The two versions that are tested beside each other: this checkout, and an earlier one's wheel.

There is no release yet. The earlier version is the commit at which the protocol was frozen: the
first that speaks what `proto/released/proto-v1.binpb` says. Once there is a tag, `EARLIER` is the
newest one.

The current version runs in the environment of the tests; `make dist` tries its wheel. The earlier
one has an environment with its wheel and nothing else of its own: PyTorch, gRPC and the other
packages come from that of the tests, so nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from integration.harness import clean_environment

__all__ = ["EARLIER", "Version", "Versions"]

EARLIER = "886493fd2febb4007bccb1c4518840c967b4c6bb"
"""The earlier version: a commit, or a tag."""

ROOT = Path(__file__).resolve().parents[2]

Version = Literal["earlier", "current"]


@cache
def why_not() -> str:
    """Why the earlier version can't be built here, with the remedy; empty if it can."""
    if importlib.util.find_spec("hatchling") is None:
        return "hatchling, which builds the wheel, is not installed: make install"
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return "the earlier version is built from the history: clone the repository with git"
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{EARLIER}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    if known.returncode != 0:
        return f"this clone does not have the earlier version: git fetch origin {EARLIER}"
    return ""


@dataclass(frozen=True)
class Versions:
    """Both versions' environments."""

    folder: Path

    def python(self, version: Version) -> Path:
        """The interpreter with this version; the first call builds the earlier one's wheel.

        Skips the test if that can't be done on this machine.
        """
        if version == "current":
            return Path(sys.executable)
        if reason := why_not():
            pytest.skip(reason)
        home = self.folder / version
        python = home / "bin" / "python"
        if not python.exists():
            source, wheels = self.folder / "source", self.folder / "wheels"
            source.mkdir()
            _unpack_earlier(source)
            _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
            [wheel] = wheels.glob("andon-*.whl")
            _install(wheel, home)
        return python


def _unpack_earlier(folder: Path) -> None:
    archive = subprocess.check_output(["git", "archive", "--format=tar", EARLIER], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        members.extractall(folder, filter="data")


def _install(wheel: Path, home: Path) -> None:
    venv.create(home, with_pip=False, symlinks=True)
    _pip("--python", str(home), "install", "--no-deps", "--no-index", str(wheel))
    # After the wheel: pip would find the checkout's own Andon there, and install nothing. A folder
    # that is named here is searched for packages, but its own .pth files are not read: the checkout
    # itself, which is installed editable, stays out of sight.
    [site] = home.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = subprocess.check_output(
        [home / "bin/python", "-P", "-c", "import andon, andon_trainer; print(andon.__file__)"],
        text=True,
        env=clean_environment(),
    )
    assert found.startswith(str(home)), found


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
