"""The images: bases that are made on the spot, and the project's own, by its Dockerfiles.

No registry is asked. Debian's packages make a stand-in for `python:3.11-slim-bookworm`, and its
Prometheus and Alertmanager have the names of the images that Compose starts. Grafana is in no
package, so it is left out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from containers.engine import GATEWAY, Engine
from containers.machine import Missing
from containers.origin import CERTIFICATES, PROXIES, Origin, has_cpu_build, origin
from containers.report import Report
from containers.stack import SCRIPTS

__all__ = ["fetch_base", "make_images"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUITE = "bookworm"
PYTHON = "3.11"
PYTHON_IMAGE = "python:3.11-slim-bookworm"
WATCHERS = ("prometheus", "alertmanager")
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv", "libpython3.11-dev")
"""What the official image has that the Dockerfiles use: headers, and a pip that may install."""

_BASE_S = 300.0
_BUILD_S = 900.0


def make_images(engine: Engine, composed: dict[str, Any], report: Report) -> None:
    """Makes every image that Compose's configuration names, the slow ones side by side.

    Raises:
        Missing: if Debian's packages can't be fetched.
        AssertionError: if a build fails, or the base image takes too long.
    """
    with origin(engine.inside, GATEWAY) as packages:
        with report.timed("base image, from Debian's packages"):
            _import_base(engine, packages)
        services = composed["services"]
        builds = {each["image"]: each["build"] for each in services.values() if "build" in each}
        arguments = _arguments(packages)

        def build(image: str) -> None:
            with report.timed(f"image {image}"):
                _build(engine, image, builds[image], arguments)

        def watchers() -> None:
            with report.timed("stand-ins for Prometheus and Alertmanager"):
                for name in WATCHERS:
                    _build_watcher(engine, name, services[name]["image"], packages)

        pool = ThreadPoolExecutor()
        try:
            jobs = [*(pool.submit(build, image) for image in builds), pool.submit(watchers)]
            for job in as_completed(jobs):
                job.result()
        finally:
            # If one fails, or a person interrupts, the others end with their daemon.
            pool.shutdown(wait=False, cancel_futures=True)


def _import_base(engine: Engine, packages: Origin) -> None:
    """Debian with Python from Debian's mirrors, and with this machine's settings of pip."""
    conf = engine.folder / "pip.conf"
    conf.write_text(packages.pip_conf, "utf-8")
    hooks = [
        f'cp {conf} "$1/etc/pip.conf"',
        'ln -s python3 "$1/usr/bin/python"',
        f'rm "$1/usr/lib/python{PYTHON}/EXTERNALLY-MANAGED"',
    ]
    if packages.certificates:
        hooks.append(f'cp {packages.certificates.resolve()} "$1{CERTIFICATES}"')
    archive = engine.folder / "rootfs.tar"
    command = [
        "mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}",
        '--aptopt=Acquire::Languages "none"', '--aptopt=Acquire::Retries "3"',
        "--dpkgopt=force-unsafe-io", "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
        *(f"--customize-hook={hook}" for hook in hooks), SUITE, str(archive),
    ]  # fmt: skip
    fetch_base(command, engine.folder / "mmdebstrap.log", _BASE_S)
    engine.docker("import", "--change", 'CMD ["python3"]', str(archive), PYTHON_IMAGE)
    archive.unlink()


def fetch_base(command: list[str], log: Path, limit_s: float) -> None:
    """Runs the command that makes the base's archive from Debian's packages.

    Raises:
        Missing: if it fails: there is no mirror that this machine can reach.
        AssertionError: if it takes longer than `limit_s`. Skipped tests would hide that.
    """
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            said = log.read_text()[-300:].strip()
            raise AssertionError(f"no base image after {limit_s:.0f} s: {said}") from None
        finally:
            # As by Ctrl-C, also at what it has started: then it removes what it made.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait()
    if code != 0:
        raise Missing(
            f"Debian's packages can't be had here ({log.read_text()[-300:].strip()}): "
            f"try mmdebstrap --variant=minbase {SUITE} /dev/null"
        )


def _arguments(packages: Origin) -> dict[str, str]:
    """Build arguments besides those of Compose's files."""
    version = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version is not None
    arguments = dict(packages.proxies)
    # PyTorch's own index is asked only where this machine's pip finds no build for CPUs without it.
    if has_cpu_build(version.group(), PYTHON):
        arguments["TORCH_INDEX"] = ""
    return arguments


def _build(engine: Engine, image: str, build: dict[str, Any], more: dict[str, str]) -> None:
    """Builds an image as Compose's configuration says."""
    context = Path(build["context"])
    dockerfile = context / build["dockerfile"]
    arguments = dict(build.get("args") or {})
    arguments |= {
        name: text
        for name, text in more.items()
        if name in PROXIES or re.search(rf"^ARG {name}\b", dockerfile.read_text(), re.MULTILINE)
    }
    words = [word for item in arguments.items() for word in ("--build-arg", "=".join(item))]
    engine.docker(
        "build", "--tag", image, "--file", str(dockerfile), *words, str(context),
        timeout_s=_BUILD_S,
    )  # fmt: skip


def _build_watcher(engine: Engine, name: str, image: str, packages: Origin) -> None:
    """Debian's Prometheus or Alertmanager, under the name of the image that Compose starts."""
    words = [f"--build-arg={each}={text}" for each, text in packages.proxies]
    engine.docker(
        "build", "--tag", image, "--target", name, "--file", str(HERE / "watchers.Dockerfile"),
        *words, str(SCRIPTS),
    )  # fmt: skip
