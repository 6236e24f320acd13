"""The two versions that are tested beside each other: this checkout, and an earlier commit.

There is no release yet. The earlier version is the commit at which the protocol was frozen: the
first that speaks what `proto/released/proto-v1.binpb` says. Once there is a tag, `EARLIER` is the
newest one.

The current version runs in the environment of the tests; `make dist` tries its wheel. The earlier
one has an environment with its packages and nothing else of its own: PyTorch, gRPC and the other
packages come from that of the tests, so nothing is downloaded.
"""

from __future__ import annotations

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
    """Why the earlier version can't be had here, with the remedy; empty if it can."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return "the earlier version comes from the history: clone the repository with git"
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
        """The interpreter with this version; the first call makes the earlier one's environment.

        Skips the test if that can't be done on this machine.
        """
        if version == "current":
            return Path(sys.executable)
        if reason := why_not():
            pytest.skip(reason)
        home = self.folder / version
        python = home / "bin" / "python"
        if not python.exists():
            _unpack_earlier(self.folder / "source")
            _make_environment(home, self.folder / "source")
        return python


def _unpack_earlier(folder: Path) -> None:
    archive = subprocess.check_output(["git", "archive", "--format=tar", EARLIER], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        members.extractall(folder, filter="data")


def _make_environment(home: Path, source: Path) -> None:
    venv.create(home, with_pip=False, symlinks=True)
    # A folder that is named here is searched for packages, but its own .pth files are not read: the
    # checkout itself, which is installed editable, stays out of sight.
    folders = [source / name for name in ("proto", "services", "trainer", "conformance")]
    [site] = home.glob("lib/python*/site-packages")
    # The first of this name that is found: it hides that of the checkout.
    (site / "andon-0.dist-info").mkdir()
    (site / "andon-0.dist-info/METADATA").write_text("Name: andon\nVersion: 0\n")
    (site / "earlier.pth").write_text(
        "".join(f"{each}\n" for each in (*folders, sysconfig.get_path("purelib")))
    )
    found = subprocess.check_output(
        [home / "bin/python", "-P", "-c", "import andon, andon_trainer; print(andon.__file__)"],
        text=True,
        env=clean_environment(),
    )
    assert found.startswith(str(source)), found
