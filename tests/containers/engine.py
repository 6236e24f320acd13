"""A Docker daemon of the tests' own, beside any that runs already."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from containers.machine import NAMESERVER, Missing, Namespace, end, namespace, run

__all__ = ["GATEWAY", "Engine", "engine"]

GATEWAY = "172.17.0.1"
"""The host's address for containers on the daemon's default bridge, on which images are built."""

_START_S = 60.0
_STOP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A daemon that runs."""

    folder: Path
    inside: Namespace

    @property
    def env(self) -> dict[str, str]:
        """The environment of its clients, with nothing that this machine's user has set up."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "DOCKER_HOST": f"unix://{self.folder}/docker.sock",
            # What Debian's daemon builds with, and what needs no plugin.
            "DOCKER_BUILDKIT": "0",
        }

    def docker(self, *words: str, timeout_s: float = 600.0) -> str:
        """What a docker command prints."""
        return run(["docker", *words], env=self.env, timeout_s=timeout_s)

    def inspect(self, container: str) -> dict[str, Any]:
        """What the daemon knows of a container."""
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", container))
        return found[0]


@contextmanager
def engine() -> Iterator[Engine]:
    """Starts a daemon; in the end, it is stopped with all that it runs, and its files are removed.

    Raises:
        Missing: if it does not start on this machine.
    """
    # Not in pytest's folder: the paths of sockets may not be long.
    folder = Path(tempfile.mkdtemp(prefix="andon-docker-"))
    try:
        with namespace(folder.name, folder / "slirp4netns.log") as inside:
            log = folder / "dockerd.log"
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*inside.prefix, "dockerd",
                     "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec",
                     "--host", f"unix://{folder}/docker.sock", "--pidfile", f"{folder}/pid",
                     "--bip", f"{GATEWAY}/16", "--dns", NAMESERVER],
                    stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
            started = Engine(folder=folder, inside=inside)
            try:
                _await(started, process, log)
                yield started
                _remove_containers(started)
            finally:
                end(process, _STOP_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _await(started: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns once the daemon answers."""
    deadline = time.monotonic() + _START_S
    while True:
        asked = subprocess.run(
            ["docker", "version"], env=started.env, capture_output=True, check=False, timeout=30
        )
        if asked.returncode == 0:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = " ".join(log.read_text("utf-8").splitlines()[-3:])
            raise Missing(
                f"dockerd does not start here ({tail[-500:]}): try `dockerd` as root, "
                "outside of any container"
            )
        time.sleep(0.2)


def _remove_containers(started: Engine) -> None:
    """Removes what still runs, at once: the daemon would give each its time to end."""
    left = started.docker("ps", "--all", "--quiet").split()
    if left:
        started.docker("rm", "--force", "--volumes", *left)
