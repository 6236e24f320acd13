"""The clients in other languages: their requirements, and how to build and start them."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

__all__ = ["CLIENTS", "LANGUAGES", "Language", "built", "every_language"]

CLIENTS = Path(__file__).resolve().parents[2] / "clients"
_BUILD_S = 540


@dataclass(frozen=True)
class Language:
    """One client."""

    name: str
    programs: Sequence[str]
    """Programs that it needs on the PATH, to build and to run."""
    supplied_by: str
    """The command that installs them."""
    build: Sequence[str]
    run: Sequence[str]
    check: Sequence[str]
    has_libraries: Callable[[], bool] = lambda: True

    @property
    def is_here(self) -> bool:
        """Whether this machine has all that it needs."""
        return all(map(shutil.which, self.programs)) and self.has_libraries()

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Its pytest marks, with the reason for a skip."""
        missing = pytest.mark.skipif(not self.is_here, reason=self.supplied_by)
        return [getattr(pytest.mark, self.name), missing]


def _is_new_node() -> bool:
    said = subprocess.run(["node", "--version"], check=False, capture_output=True, text=True)
    return said.returncode == 0 and int(said.stdout.lstrip("v").partition(".")[0]) >= 18


def _has_grpc_go() -> bool:
    grpc = Path("/usr/share/gocode/src/google.golang.org/grpc")
    return grpc.is_dir() and Path("/usr/include/xxhash.h").is_file()


def _has_grpc_cpp() -> bool:
    packages = ["pkg-config", "--exists", "grpc++", "protobuf", "libcrypto", "libxxhash"]
    found = subprocess.run(packages, check=False, capture_output=True).returncode == 0
    return found and Path("/usr/include/boost/crc.hpp").is_file()


LANGUAGES = {
    "node": Language(
        name="node",
        programs=("node", "npm"),
        supplied_by="apt-get install nodejs npm (Node.js 18 or newer)",
        build=("npm", "ci", "--prefix", str(CLIENTS / "node")),
        run=("node", str(CLIENTS / "node/logistic.js")),
        check=("npm", "--prefix", str(CLIENTS / "node"), "test"),
        has_libraries=_is_new_node,
    ),
    "go": Language(
        name="go",
        programs=("go", "gcc", "protoc", "protoc-gen-go", "make"),
        supplied_by="apt-get install golang-go gcc golang-google-grpc-dev protobuf-compiler "
        "protoc-gen-go-1-3 libxxhash-dev",
        build=("make", "-s", "-C", str(CLIENTS / "go")),
        run=(str(CLIENTS / "go/build/logistic"), "-data", str(CLIENTS / "data/samples.csv")),
        check=("make", "-s", "-C", str(CLIENTS / "go"), "check"),
        has_libraries=_has_grpc_go,
    ),
    "cpp": Language(
        name="cpp",
        programs=("g++", "protoc", "grpc_cpp_plugin", "pkg-config", "make"),
        supplied_by="apt-get install g++ pkg-config protobuf-compiler protobuf-compiler-grpc "
        "libgrpc++-dev libprotobuf-dev libssl-dev libxxhash-dev libboost-dev",
        build=("make", "-s", "-j2", "-C", str(CLIENTS / "cpp"), "OPTIMIZE=-O0"),
        run=(str(CLIENTS / "cpp/build/logistic"), "--data", str(CLIENTS / "data/samples.csv")),
        check=("make", "-s", "-C", str(CLIENTS / "cpp"), "OPTIMIZE=-O0", "check"),
        has_libraries=_has_grpc_cpp,
    ),
}

every_language = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=it.marks) for name, it in LANGUAGES.items()]
)


@cache
def built(name: str) -> Language:
    """Builds the client, once per process and only if its files changed."""
    lock = CLIENTS / name / "build/lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another pytest process may build at the same time
        return _built(LANGUAGES[name])


def _built(language: Language) -> Language:
    modules = CLIENTS / "node/node_modules/.package-lock.json"
    lock = CLIENTS / "node/package-lock.json"
    fresh = modules.exists() and modules.stat().st_mtime >= lock.stat().st_mtime
    if language.name == "node" and fresh:
        return language
    done = subprocess.run(
        language.build, check=False, capture_output=True, text=True, timeout=_BUILD_S
    )
    if language.name == "node" and done.returncode:
        pytest.skip(f"npm ci could not get the client's packages: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return language
