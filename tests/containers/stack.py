"""The project's Compose files on the tests' daemon, and what can be seen of them from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from containers.engine import Engine
from containers.machine import run, wait_until

__all__ = ["CPU", "TLS", "Container", "Stack"]

ROOT = Path(__file__).resolve().parents[2]
CPU = ("docker-compose.yml", "docker-compose.cpu.yml", "tests/containers/compose.yml")
TLS = (*CPU, "docker-compose.tls.yml")
SCRIPTS = Path(__file__).with_name("line")
"""The folder that trainers have as /srv/andon/code."""
METRICS = "http://127.0.0.1:9400/metrics"
PROMETHEUS = "http://127.0.0.1:9090/api/v1"

_PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container as the daemon describes it."""

    id: str
    service: str
    state: dict[str, Any]
    restarts: int

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return bool(self.state["Running"])

    @property
    def health(self) -> str:
        """What its health check said last."""
        return str(self.state.get("Health", {}).get("Status", "none"))

    @property
    def main(self) -> int:
        """The host's number of its program, which is the child of its init."""
        init = self.state["Pid"]
        children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        return int(children[0])


@dataclass(slots=True, kw_only=True)
class Stack:
    """One project of Compose."""

    engine: Engine
    name: str = "andon"
    files: tuple[str, ...] = CPU
    variables: dict[str, str] = field(default_factory=lambda: {"ANDON_CODE": str(SCRIPTS)})
    """What its user would export, such as ANDON_RUN_ID."""

    def compose(self, *words: str) -> str:
        """What a command of Compose prints."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        tool = shutil.which("docker-compose", path=path)
        assert tool is not None, "no docker-compose: run `make install`"
        files = [word for file in self.files for word in ("--file", str(ROOT / file))]
        command = [tool, "--ansi=never", "--project-name", self.name, *files, *words]
        return run(command, env={**self.engine.env, **self.variables})

    def config(self) -> dict[str, Any]:
        """What Compose makes of its files."""
        made: dict[str, Any] = json.loads(self.compose("config", "--format", "json"))
        return made

    def up(self, *words: str, **variables: str) -> None:
        """`docker compose up` in the background, with variables that stay set from now on."""
        self.variables |= variables
        self.compose("up", "--detach", "--no-build", "--pull", "never", *words)

    def down(self, *words: str) -> None:
        """`docker compose down`."""
        self.compose("down", *words)

    # What runs.

    def containers(self, service: str) -> list[Container]:
        """The containers of a service by their numbers, also those that have ended."""
        label = "label=com.docker.compose."
        listed = self.engine.docker(
            "ps", "--all", "--quiet", "--no-trunc",
            "--filter", f"{label}project={self.name}", "--filter", f"{label}service={service}",
        ).split()  # fmt: skip
        found = [self.engine.inspect(each) for each in listed]
        found.sort(key=lambda each: each["Name"])
        return [
            Container(
                id=each["Id"], service=service, state=each["State"], restarts=each["RestartCount"]
            )
            for each in found
        ]

    def only(self, service: str) -> Container:
        """The only container of a service."""
        (container,) = self.containers(service)
        return container

    def log(self, container: Container, since: str = "") -> list[str]:
        """The lines that a container wrote, to both of its outputs, from a moment on."""
        command = ["docker", "logs", *(["--since", since] if since else []), container.id]
        text = run(["sh", "-c", '"$@" 2>&1', "sh", *command], env=self.engine.env)
        return text.splitlines()

    def exec(self, service: str, *words: str) -> str:
        """What a command in a service's container prints."""
        return self.compose("exec", "--no-TTY", service, *words)

    def kill(self, container: Container) -> None:
        """Kills its program, as the kernel does for want of memory, and waits for the restart.

        Not `docker kill`: the daemon takes that for a person's wish, and starts nothing again.
        """
        os.kill(container.main, signal.SIGKILL)
        self.wait(
            lambda: any(
                each.id == container.id and each.running and each.restarts > container.restarts
                for each in self.containers(container.service)
            ),
            f"{container.service} to be started again",
        )

    def trainers_ended(self) -> bool:
        """Whether there are trainers, and none of them runs."""
        trainers = self.containers("trainer")
        return bool(trainers) and not any(each.running for each in trainers)

    def volume(self, name: str) -> Path:
        """A volume's folder, as the host has it."""
        (volume,) = json.loads(self.engine.docker("volume", "inspect", f"{self.name}_{name}"))
        return Path(volume["Mountpoint"])

    # What it says of itself.

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the service's series with these labels; 0 if it does not answer."""
        try:
            text = self.engine.inside.get(METRICS).decode()
        except OSError:
            return 0.0
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def step(self) -> int:
        """The line's committed steps, as its metrics say."""
        return int(self.metric("andon_step"))

    def state(self, name: str) -> bool:
        """Whether the line is in a state, as its metrics say."""
        return self.metric("andon_line_state", state=name) == 1

    def status(self) -> dict[str, Any]:
        """`andon status`, in the service's container."""
        said: dict[str, Any] = json.loads(self.exec("andon", "andon", "status", "--format", "json"))
        return said

    def prometheus(self, query: str) -> list[tuple[dict[str, str], float]]:
        """The series of a query, with their values; none if Prometheus does not answer."""
        try:
            answer = self.engine.inside.get(
                f"{PROMETHEUS}/query?{urllib.parse.urlencode({'query': query})}"
            )
        except OSError:
            return []
        found = json.loads(answer)["data"]["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def targets(self) -> list[tuple[str, str, str]]:
        """What Prometheus asks: each one's worker ("" is the service), health and last error."""
        try:
            answer = json.loads(self.engine.inside.get(f"{PROMETHEUS}/targets?state=active"))
        except OSError:
            return []
        return sorted(
            (each["labels"].get("worker", ""), each["health"], each["lastError"])
            for each in answer["data"]["activeTargets"]
        )

    # Waiting.

    def wait(
        self,
        true: Callable[[], object],
        what: str | Callable[[], str],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Returns once `true` is.

        Raises:
            AssertionError: if that takes too long.
        """
        wait_until(true, what if callable(what) else lambda: what, patience_s)

    def wait_for_steps(self, more: int = 10) -> int:
        """Waits until the line has made `more` steps from now on; where it is then."""
        goal = self.step() + more
        self.wait(lambda: self.step() >= goal, f"step {goal}")
        return self.step()

    def said(self) -> str:
        """What runs, and the end of each log of the line, for a test that fails."""
        try:
            listed = self.compose("ps", "--all")
            logs = self.compose("logs", "--no-color", "--tail", "40", "andon", "trainer")
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            return str(error)
        return f"{listed}\n{logs}"
