"""The two versions that are tested beside each other, each installed from a wheel of its own.

There is no release yet. The earlier version is the commit at which the protocol was frozen: the
first that speaks what `proto/released/proto-v1.binpb` says. Once there is a tag, `EARLIER` is the
newest one.

An environment has one version's wheel and nothing else of its own: PyTorch, gRPC and the other
packages come from the environment that the tests run in, so nothing is downloaded.
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
    """Why the versions can't be built here, with the remedy; empty if they can."""
    if importlib.util.find_spec("hatchling") is None:
        return "hatchling, which builds the wheels, is not installed: make install"
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
        """The interpreter with this version; the first call builds and installs its wheel.

        Skips the test if that can't be done on this machine.
        """
        if reason := why_not():
            pytest.skip(reason)
        home = self.folder / version
        python = home / "bin" / "python"
        if not python.exists():
            _install(self.wheel(version), home)
        return python

    def wheel(self, version: Version) -> Path:
        """This version's wheel; the first call builds it."""
        wheels = self.folder / f"{version}-wheels"
        if not wheels.exists():
            source = self.folder / f"{version}-source"
            source.mkdir()
            (_unpack_earlier if version == "earlier" else _copy_current)(source)
            _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
        [wheel] = wheels.glob("andon-*.whl")
        return wheel


def _unpack_earlier(folder: Path) -> None:
    archive = subprocess.check_output(["git", "archive", "--format=tar", EARLIER], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        members.extractall(folder, filter="data")


def _copy_current(folder: Path) -> None:
    """Copies what git knows or could know, as it is now: a build must not touch the checkout."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT
    )
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


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
