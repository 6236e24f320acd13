"""A real Prometheus, a real Alertmanager and the receiver: configured as in Compose, in a hurry.

Nothing is a copy: the files of docker/ are read, durations in rules and routes are divided by
`HURRY`, and addresses are replaced.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import yaml

from integration.harness import Service

__all__ = ["DOCS", "HURRY", "MISSING", "Rule", "Vector", "Watchers", "hurried_rules"]

HURRY = 60
"""A minute of the rules is a second here."""
DOCS = "https://docs.example/"
"""Where the documentation is said to be published."""
PROGRAMS = ("prometheus", "prometheus-alertmanager")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
"""What this machine lacks."""

_DOCKER = Path(__file__).resolve().parents[2] / "docker"
_DURATION = re.compile(r"(?<![\w.])(\d+)(ms|s|m|h|d)\b")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PATIENCE_S = 40.0
_EVERY = "1s"

Vector = list[tuple[dict[str, str], float]]
"""Labels and value of each series that a query returns."""


@dataclass(frozen=True)
class Rule:
    """A rule, as Prometheus has it."""

    name: str
    expression: str
    health: str
    error: str


def in_a_hurry(text: str) -> str:
    """A text with its durations divided by `HURRY`."""
    return _DURATION.sub(
        lambda found: f"{max(1, int(found[1]) * _UNIT_MS[found[2]] // HURRY)}ms", text
    )


def hurried_rules() -> dict[str, Any]:
    """The alerts, with short durations in expressions and in `for`."""
    rules = _loaded("prometheus/alerts.yml")
    for group in rules["groups"]:
        for rule in group["rules"]:
            for key in {"expr", "for"} & rule.keys():
                rule[key] = in_a_hurry(rule[key])
    return rules


def hurried_routes(webhook: str) -> dict[str, Any]:
    """Alertmanager's configuration, with short durations and the webhook's address."""
    config = _loaded("alertmanager/alertmanager.yml")
    for route in (config["route"], *config["route"]["routes"]):
        for key in {"group_wait", "group_interval", "repeat_interval"} & route.keys():
            route[key] = in_a_hurry(route[key])
    (hook,) = config["receivers"][0]["webhook_configs"]
    hook["url"] = webhook
    return config


def prometheus_config(rules: Path, alertmanager: str, discovery: str) -> dict[str, Any]:
    """Prometheus' configuration, which scrapes every second."""
    config = _loaded("prometheus/prometheus.yml")
    config["global"]["external_labels"]["docs_url"] = DOCS
    config["global"].update(scrape_interval=_EVERY, evaluation_interval=_EVERY)
    config["rule_files"] = [str(rules)]
    (manager,) = config["alerting"]["alertmanagers"]
    manager["static_configs"] = [{"targets": [alertmanager]}]
    (job,) = config["scrape_configs"]
    job["http_sd_configs"] = [{"url": discovery, "refresh_interval": _EVERY}]
    return config


@dataclass
class Watchers:
    """Watches one run. Starts with the receiver and Alertmanager; Prometheus comes later."""

    folder: Path
    prometheus: str = ""
    """Prometheus' address, once it runs."""
    topic: list[tuple[str, str]] = field(default_factory=list)
    """Priority and title of what was published to the ntfy topic."""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        topic = self._stack.enter_context(_ntfy(self.topic))
        command = [sys.executable, str(_DOCKER / "alertmanager/receiver.py"), "--port", "0"]
        self._run("receiver", [*command, "--ntfy", topic])
        webhook = self._await_line("receiver", "waiting for alerts on ").rsplit(" ", 1)[1]
        self._manager = _free_address()
        config = self._write("alertmanager.yml", hurried_routes(webhook))
        self._run(
            "alertmanager",
            [
                *(
                    "prometheus-alertmanager",
                    f"--config.file={config}",
                    "--cluster.listen-address=",
                ),
                f"--storage.path={self.folder / 'alertmanager'}",
                f"--web.listen-address={self._manager}",
            ],
        )
        self._await_ready(self._manager, "alertmanager")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def watch(self, service: Service) -> None:
        """Starts Prometheus, which finds the run through its service."""
        self.prometheus = _free_address()
        rules = self._write("alerts.yml", hurried_rules())
        discovery = service.metrics_url.replace("/metrics", "/sd")
        config = self._write("prometheus.yml", prometheus_config(rules, self._manager, discovery))
        self._run(
            "prometheus",
            [
                *("prometheus", f"--config.file={config}"),
                f"--storage.tsdb.path={self.folder / 'prometheus'}",
                f"--web.listen-address={self.prometheus}",
                "--enable-feature=exemplar-storage",
            ],
        )
        self._await_ready(self.prometheus, "prometheus")

    def told(self) -> list[str]:
        """What the receiver has printed: a line for each alert, without the time of day."""
        lines = (self.folder / "receiver.log").read_text().splitlines()
        return [line.partition(" ")[2] for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]

    def await_told(self, *beginnings: str) -> None:
        """Waits until the receiver has printed a line with each of these beginnings."""
        deadline = time.monotonic() + _PATIENCE_S
        while missing := [
            each for each in beginnings if not any(line.startswith(each) for line in self.told())
        ]:
            assert time.monotonic() < deadline, (missing, self.told(), self._alerts())
            time.sleep(0.05)

    def await_found(self, query: str) -> None:
        """Waits until a query returns something."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.query(query):
            assert time.monotonic() < deadline, query
            time.sleep(0.05)

    def query(self, expression: str, at: float | None = None) -> Vector:
        """What an expression returns, at a time of day or now.

        Raises:
            AssertionError: Prometheus can't evaluate it.
        """
        asked = {"query": expression, **({} if at is None else {"time": f"{at:.3f}"})}
        data = self._ask(f"/api/v1/query?{urllib.parse.urlencode(asked)}")
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]

    def span(self, expression: str, since: float, until: float) -> list[dict[str, str]]:
        """The labels of each series that an expression returns between two times of day."""
        asked = {"query": expression, "start": since, "end": until, "step": _EVERY}
        data = self._ask(f"/api/v1/query_range?{urllib.parse.urlencode(asked)}")
        return [each["metric"] for each in data["result"]]

    def exemplars(self, series: str, since: float, until: float) -> list[dict[str, str]]:
        """The labels of the exemplars of a histogram's buckets between two times of day."""
        asked = {"query": series, "start": since, "end": until}
        found = self._ask(f"/api/v1/query_exemplars?{urllib.parse.urlencode(asked)}")
        return [exemplar["labels"] for each in found for exemplar in each["exemplars"]]

    def rules(self) -> list[Rule]:
        """All rules, with how their last evaluation went."""
        groups = self._ask("/api/v1/rules")["groups"]
        return [
            Rule(each["name"], each["query"], each["health"], each.get("lastError", ""))
            for group in groups
            for each in group["rules"]
        ]

    def _alerts(self) -> Any:
        return self._ask("/api/v1/alerts") if self.prometheus else "no Prometheus yet"

    def _ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://{self.prometheus}{path}", timeout=20) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from error

    def _write(self, name: str, content: dict[str, Any]) -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def _run(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self._stack.callback(_end, process)

    def _await_line(self, name: str, beginning: str) -> str:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            text = (self.folder / f"{name}.log").read_text()
            for line in text.splitlines(keepends=True):
                if line.startswith(beginning) and line.endswith("\n"):
                    return line.strip()
            assert time.monotonic() < deadline, text
            time.sleep(0.02)

    def _await_ready(self, address: str, name: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=10).close()
                return
            except OSError:
                log = (self.folder / f"{name}.log").read_text()
                assert time.monotonic() < deadline, log
                time.sleep(0.02)


@contextmanager
def _ntfy(topic: list[tuple[str, str]]) -> Iterator[str]:
    """A server that takes what is published to any of its topics."""

    class Publication(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            topic.append((self.headers["Priority"], self.headers["Title"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Publication) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/topic"
        finally:
            server.shutdown()
            thread.join()


def _loaded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((_DOCKER / name).read_text("utf-8"))
    return content


def _free_address() -> str:
    """An address on which nobody listens now; neither program tells which port it chose itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
