"""Packages: whether what Andon needs is installed, at versions that it works with."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from importlib import metadata

from packaging.requirements import Requirement

from andon.protocol.encoding import fused as compiled
from andon_cli.commands.doctor.findings import Finding, fail, ok, warn

__all__ = ["check_mean", "check_packages"]

_SHOWN = ("torch", "grpcio", "protobuf", "numpy")
"""The packages whose versions are shown; the others only if something is wrong with them."""
_TRAINER = ("torch", "safetensors")
"""Packages that a host without training can do without."""


def check_packages(
    requirements: Sequence[str] | None = None, version_of: Callable[[str], str] = metadata.version
) -> list[Finding]:
    """Compares what is installed with what Andon needs.

    Args:
        requirements: as in a package's metadata; None: those of the installed `andon`.
        version_of: raises PackageNotFoundError for what is not installed.
    """
    problems: list[Finding] = []
    installed: dict[str, str] = {}
    needed = _required() if requirements is None else requirements
    for requirement in map(Requirement, needed):
        name = requirement.name
        if "extra" in str(requirement.marker or "") and name not in _TRAINER:
            continue
        remedy = f"pip install '{name}{requirement.specifier}'"
        try:
            installed[name] = version = version_of(name)
        except metadata.PackageNotFoundError:
            if name not in _TRAINER:
                problems.append(fail("packages", f"{name} is not installed", remedy))
            continue
        # A build of one's own, such as 2.6.0a0+git, counts as its release.
        if not requirement.specifier.contains(version, prereleases=True):
            fact = f"{name} is {version}, and Andon needs {requirement.specifier}"
            problems.append(fail("packages", fact, remedy))
    shown = [f"{name} {installed[name]}" for name in _SHOWN if name in installed]
    findings = [ok("packages", ", ".join([f"python {platform.python_version()}", *shown]))]
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
    """How gradients are averaged here. With `fused` None it looks for the compiled part itself."""
    if compiled is not None if fused is None else fused:
        return ok("mean", "one pass over memory, compiled")
    return warn(
        "mean",
        "NumPy averages, in several passes: no C compiler was there when Andon was installed",
        "install gcc and Python's headers (apt-get install gcc python3-dev), then Andon again "
        "(training works, with slower exchanges on one host)",
    )


def _required() -> Sequence[str]:
    try:
        return metadata.requires("andon") or ()
    except metadata.PackageNotFoundError:  # run from its sources
        return _SHOWN
