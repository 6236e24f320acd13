"""Builds what a release consists of, and tries it: `make dist`.

Two wheels of Andon (with the C part, for this platform; and without, for any), its source, and the
same of the conformance suite. They are built from what git knows of the checkout: the source first,
and the wheels from the source, as pip would build them. Then the wheels are installed into a clean
environment, and two workers train there. Only if all of that works are they put into `dist/`.
"""

from __future__ import annotations

import email.parser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("proto/andon", "services/andon_coordinator", "services/andon_reducer"),
    *("services/andon_server", "services/andon_cli", "trainer/andon_trainer"),
    "trainer/andon_torch",
)
_MODULE = "andon/protocol/_fused.abi3.so"
_C_SOURCES = ("_fused.c", "_neighbours.h", "_strips.h", "_strips_avx2.h", "_tree.h", "_trimmed.h")


def version() -> str:
    """The version that the sources name.

    Raises:
        SystemExit: Andon and its conformance suite name different ones.
    """
    text = (ROOT / "proto/andon/__init__.py").read_text("utf-8")
    [named] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    text = (ROOT / "conformance/pyproject.toml").read_text("utf-8")
    [suite] = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    if suite != named:
        raise SystemExit(
            f"dist: proto/andon/__init__.py names version {named}, and conformance/pyproject.toml "
            f"{suite}: they are released together"
        )
    return str(named)


def build(source: Path, folder: Path) -> list[Path]:
    """Builds everything from `source` into `folder`; returns the files."""
    [andon] = _hatch(source, "sdist", folder)
    [suite] = _hatch(source / "conformance", "sdist", folder)
    files = [andon, suite]
    with tempfile.TemporaryDirectory(prefix="andon-sdist-") as scratch:
        tree = _unpacked(andon, Path(scratch))
        if shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]):
            files += _hatch(tree, "wheel", folder, ANDON_C_PART="required")
        else:
            print(
                "dist: this machine has no C compiler: there is only the wheel without the C part"
            )
        files += _hatch(tree, "wheel", folder, ANDON_C_PART="off")
        files += _hatch(_unpacked(suite, Path(scratch)), "wheel", folder)
    return files


def inspect(files: Iterable[Path], source: Path, wanted: str) -> None:
    """Checks what is in the files.

    Raises:
        SystemExit: something is missing, is there by mistake, or has another version.
    """
    for file in files:
        if file.suffix == ".whl":
            _inspect_wheel(file, source, wanted)
        else:
            _inspect_source(file, wanted)


def rehearse(files: Iterable[Path], folder: Path, wanted: str) -> None:
    """Installs each wheel into a clean environment, with what it needs, and trains there.

    Raises:
        SystemExit: a command failed.
    """
    built = [each for each in files if each.suffix == ".whl"]
    [suite] = (each for each in built if each.name.startswith("andon_conformance-"))
    wheels = [each for each in built if each != suite]
    venv.create(folder / "venv", with_pip=True)
    with_c = [each for each in wheels if "abi3" in each.name]
    for number, wheel in enumerate(wheels):
        # The second wheel has the same dependencies as the first.
        more = (f"{wheel}[trainer]", str(suite)) if number == 0 else ()
        again = ("--force-reinstall", "--no-deps", str(wheel)) if number else ()
        _run(folder, "python", "-m", "pip", "install", "--quiet", "-c",
             str(ROOT / "constraints.txt"), *more, *again)  # fmt: skip
        _run(folder, "python", "-m", "pip", "check")
        said = _run(folder, "andon", "--version").strip()
        if said != f"andon {wanted}":
            raise SystemExit(f"dist: {wheel.name} says {said!r} and not version {wanted}")
        found = "is not None" if wheel in with_c else "is None"
        probe = f"import importlib.util as u; assert u.find_spec('andon.protocol._fused') {found}"
        _run(folder, "python", "-c", probe)
        script = str(ROOT / "release" / "tiny.py")
        said = _run(folder, "andon", "run", "--workers", "2", "--output", "all", script)
        if "all workers at digest" not in said:
            raise SystemExit(f"dist: two workers did not train with {wheel.name}:\n{said}")
        print(f"dist: {wheel.name} installs, and trains with two workers")
    _run(folder, "andon", "conformance", "--help")


def publish(files: Iterable[Path], folder: Path) -> None:
    """Puts the files and their digests into `folder`, in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    sums = []
    for file in sorted(files):
        shutil.copy(file, folder)
        sums.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")
        print(f"dist: {folder.name}/{file.name} {file.stat().st_size / 1e6:.2f} MB")
    (folder / "SHA256SUMS").write_text("".join(sums))


def copy_sources(folder: Path) -> None:
    """Copies what git knows of the checkout, as it is: a build must not write into it."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT)
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():  # Not a file that was removed and not yet committed.
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def _hatch(source: Path, target: str, folder: Path, **variables: str) -> list[Path]:
    before = set(folder.iterdir())
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(
        command, cwd=source, env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"dist: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return sorted(set(folder.iterdir()) - before)


def _unpacked(source: Path, folder: Path) -> Path:
    with tarfile.open(source) as members:
        members.extractall(folder, filter="data")
    return folder / source.name.removesuffix(".tar.gz")


def _inspect_wheel(file: Path, source: Path, wanted: str) -> None:
    with ZipFile(file) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        _require_version(file, wheel.read(metadata).decode(), wanted)
    content = {name for name in names if ".dist-info/" not in name}
    if not file.name.startswith("andon-"):
        _require(file, {"andon_conformance/app.py"}, content)
        return
    _require(file, {f"andon-{wanted}.dist-info/licenses/LICENSE"}, names)
    due = {_MODULE} if "abi3" in file.name else set[str]()
    for package in map(PurePosixPath, PACKAGES):
        for path in (source / package).rglob("*"):
            if path.is_file() and path.suffix not in (".c", ".h"):
                due.add(str(path.relative_to(source / package.parent).as_posix()))
    if due != content:
        missing, more = sorted(due - content), sorted(content - due)
        raise SystemExit(f"dist: {file.name} lacks {missing[:5]} and should not have {more[:5]}")


def _inspect_source(file: Path, wanted: str) -> None:
    with tarfile.open(file) as members:
        top = file.name.removesuffix(".tar.gz")
        names = {name.removeprefix(f"{top}/") for name in members.getnames()}
        metadata = members.extractfile(f"{top}/PKG-INFO")
        assert metadata is not None
        _require_version(file, metadata.read().decode(), wanted)
    if compiled := sorted(name for name in names if name.endswith((".so", ".pyc"))):
        raise SystemExit(f"dist: {file.name} has files that were built: {compiled[:5]}")
    _require(file, {"pyproject.toml", "README.md", "PKG-INFO"}, names)
    if file.name.startswith("andon-"):
        sources = {f"proto/andon/protocol/{name}" for name in _C_SOURCES}
        _require(file, {"LICENSE", "hatch_build.py", *sources}, names)


def _require(file: Path, due: set[str], names: set[str]) -> None:
    if missing := sorted(due - names):
        raise SystemExit(f"dist: {file.name} lacks {', '.join(missing)}")


def _require_version(file: Path, metadata: str, wanted: str) -> None:
    found = email.parser.HeaderParser().parsestr(metadata)["Version"]
    if found != wanted:
        raise SystemExit(f"dist: {file.name} is of version {found}, and the sources of {wanted}")


def _run(folder: Path, *command: str) -> str:
    """Runs a command of the clean environment; returns its output."""
    bin_folder = folder / "venv" / "bin"
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("ANDON_", "PYTHON", "VIRTUAL_ENV"))
    }
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(bin_folder / command[0]), *command[1:]],
        cwd=folder,
        env={**kept, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"dist: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def main() -> None:
    """Builds, inspects, tries and publishes."""
    wanted = version()
    with tempfile.TemporaryDirectory(prefix="andon-dist-") as scratch:
        source, built, trial = (Path(scratch) / name for name in ("source", "built", "trial"))
        for folder in (source, built, trial):
            folder.mkdir()
        copy_sources(source)
        files = build(source, built)
        inspect(files, source, wanted)
        rehearse(files, trial, wanted)
        publish(files, ROOT / "dist")


if __name__ == "__main__":
    main()
