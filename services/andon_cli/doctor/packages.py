"""Packages: whether what Andon needs is installed, at versions that it works with."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from importlib import metadata

from andon.protocol.encoding import fused as compiled
from andon_cli.doctor.findings import Finding, fail, ok, warn

__all__ = ["check_mean", "check_packages", "fits"]

_TOLD = ("torch", "grpcio", "protobuf", "numpy")
"""Whose versions are told; what else is missing or wrong is told, too."""
_TRAINER = ("torch", "safetensors")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*\(?([^;)]*)\)?\s*(;.*)?")
_CLAUSE = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9A-Za-z.]*)")


def check_packages(
    requirements: Sequence[str] | None = None, version_of: Callable[[str], str] = metadata.version
) -> list[Finding]:
    """Compares what is installed with what Andon asks for.

    Args:
        requirements: as in a package's metadata; None: those of the installed `andon`.
        version_of: raises PackageNotFoundError for what is not installed.
    """
    problems: list[Finding] = []
    installed: dict[str, str] = {}
    needed = _required() if requirements is None else requirements
    for requirement in needed:
        match = _REQUIREMENT.match(requirement)
        if match is None:
            continue
        name, bounds, marker = match.group(1), match.group(2).strip(), match.group(3) or ""
        if "extra" in marker and name not in _TRAINER:
            continue
        try:
            installed[name] = version = version_of(name)
        except metadata.PackageNotFoundError:
            if name not in _TRAINER:
                problems.append(
                    fail("packages", f"{name} is not installed", f"pip install '{name}{bounds}'")
                )
            continue
        if not fits(version, bounds):
            problems.append(
                fail(
                    "packages",
                    f"{name} is {version}, and Andon needs {bounds}",
                    f"pip install '{name}{bounds}'",
                )
            )
    told = [f"{name} {installed[name]}" for name in _TOLD if name in installed]
    findings = [ok("packages", ", ".join([f"python {platform.python_version()}", *told]))]
    if absent := [name for name in _TRAINER if name not in installed]:
        findings.append(
            warn(
                "packages",
                f"no {' and no '.join(absent)}",
                "this host can serve and watch a line, not train: pip install 'andon[trainer]'",
            )
        )
    return [*problems, *findings]


def check_mean(*, fused: bool | None = None) -> Finding:
    """How gradients are averaged here; `fused` None: looks."""
    if compiled is not None if fused is None else fused:
        return ok("mean", "one pass over memory, compiled")
    return warn(
        "mean",
        "NumPy averages, in several passes: no C compiler was there when Andon was installed",
        "install gcc and Python's headers (apt-get install gcc python3-dev), then Andon again "
        "(training works, with slower exchanges on one host)",
    )


def fits(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `<8,>=5.29`, by the numbers of its release."""
    have = _release(version)
    for sign, text in _CLAUSE.findall(bounds):
        want = _release(text)
        length = max(len(have), len(want))
        here, there = _padded(have, length), _padded(want, length)
        holds = {
            ">=": here >= there,
            "<=": here <= there,
            "==": here == there,
            "!=": here != there,
            "<": here < there,
            ">": here > there,
        }
        if not holds[sign]:
            return False
    return True


def _required() -> Sequence[str]:
    try:
        return metadata.requires("andon") or ()
    except metadata.PackageNotFoundError:  # run from its sources
        return _TOLD


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _padded(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return numbers + (0,) * (length - len(numbers))
