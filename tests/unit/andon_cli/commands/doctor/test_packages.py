"""Packages: which versions fit, and what is said of those that do not."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest

from andon.protocol.encoding import fused
from andon_cli.commands.doctor.packages import check_mean, check_packages

REQUIREMENTS = [
    "grpcio>=1.71.2",
    "protobuf<8,>=5.29",
    "torch>=2.4; extra == 'trainer'",
    "safetensors>=0.4; extra == 'trainer'",
    "matplotlib>=3.8; extra == 'demo'",
]
FITTING = {"grpcio": "1.85.1", "protobuf": "7.36.2", "torch": "2.13.0+cpu", "safetensors": "0.5"}


def installed(versions: dict[str, str]) -> Callable[[str], str]:
    def version_of(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    return version_of


def test_versions_that_fit_are_told_in_one_line() -> None:
    [finding] = check_packages(REQUIREMENTS, installed(FITTING))

    assert finding.level == "ok"
    assert "torch 2.13.0+cpu, grpcio 1.85.1, protobuf 7.36.2" in finding.fact


def test_a_version_out_of_bounds_fails_with_the_command_that_mends_it() -> None:
    problem, _ = check_packages(REQUIREMENTS, installed({**FITTING, "protobuf": "8.0.0"}))

    assert str(problem) == (
        "fail  protobuf is 8.0.0, and Andon needs <8,>=5.29: pip install 'protobuf<8,>=5.29'"
    )


def test_a_missing_package_fails() -> None:
    problem, _ = check_packages(
        REQUIREMENTS, installed({name: FITTING[name] for name in FITTING if name != "grpcio"})
    )

    assert (problem.level, problem.fact) == ("fail", "grpcio is not installed")


def test_a_mean_without_its_compiled_module_is_a_warning_with_the_command_that_mends_it() -> None:
    slow = check_mean(fused=False)

    assert slow.level == "warn"
    assert "gcc" in slow.remedy
    assert check_mean(fused=True).level == "ok"
    assert check_mean().level == ("ok" if fused is not None else "warn")


def test_a_host_without_pytorch_may_still_serve() -> None:
    services = {"grpcio": "1.85.1", "protobuf": "7.36.2"}

    told, finding = check_packages(REQUIREMENTS, installed(services))

    assert told.level == "ok"
    assert (finding.level, finding.fact) == ("warn", "no torch and no safetensors")


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("1.71.2", ">=1.71.2", True),
        ("1.71.1", ">=1.71.2", False),
        ("8.0rc1", "<8,>=5.29", False),
        ("2.4.0", "==2.4", True),
        ("2.13.0+cpu", ">=2.4", True),
        ("2.7.0a0+ecf3bae.nv25", ">=2.4", True),
        ("a build of somebody", ">=2.4", False),
    ],
)
def test_versions_of_ones_own_builds_are_compared_too(
    version: str, bounds: str, *, fits: bool
) -> None:
    problems = check_packages([f"grpcio{bounds}"], lambda _: version)

    assert ("fail" not in [finding.level for finding in problems]) is fits
