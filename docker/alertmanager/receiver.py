"""An example of a webhook for Alertmanager: prints alerts as lines, and may pass them on to ntfy.

It needs nothing but Python, so it is also the place to start from for a receiver of your own:

    python3 docker/alertmanager/receiver.py
    python3 docker/alertmanager/receiver.py --ntfy https://ntfy.sh/a-topic-that-nobody-guesses

What Alertmanager sends: https://prometheus.io/docs/alerting/latest/configuration/#webhook_config
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGEST_BYTES = 4 << 20
"""A notification is some kilobytes; more than this is none."""
AGAIN_S = 1800.0
"""An alert that was told is not told again for so long; Alertmanager reminds less often."""
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert of a notification. The texts are empty where it has none."""

    firing: bool
    key: tuple[str, ...]
    """The same for as long as it is the same alert, and fires or is resolved for the same time."""
    name: str
    severity: str
    summary: str
    description: str
    runbook: str

    @classmethod
    def all_of(cls, body: bytes) -> list[Alert]:
        """The alerts of a notification.

        Raises:
            ValueError: the body is not what Alertmanager sends.
        """
        try:
            return [cls._of(each) for each in json.loads(body)["alerts"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no notification of Alertmanager: {error!r}") from error

    @classmethod
    def _of(cls, alert: dict[str, Any]) -> Alert:
        labels, annotations = alert["labels"], alert.get("annotations", {})
        return cls(
            firing=alert["status"] == "firing",
            key=tuple(str(alert.get(name)) for name in ("status", "fingerprint", "startsAt")),
            name=_line(labels["alertname"]),
            severity=_line(labels.get("severity", "")),
            summary=_line(annotations.get("summary", "")),
            description=_line(annotations.get("description", "")),
            runbook=_line(annotations.get("runbook_url", "")),
        )

    def __str__(self) -> str:
        """One line; what to do about it only while it fires."""
        if not self.firing:
            return f"RESOLVED {self.name}: {self.summary}"
        texts = (f"{self.summary}." if self.summary else "", self.description, self.runbook)
        return " ".join(["FIRING", self.severity, f"{self.name}:", *filter(None, texts)])


class Memory:
    """What was told lately: a group is sent as a whole whenever one of its alerts changes."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._told_at: dict[tuple[str, ...], float] = {}

    def news(self, alerts: Sequence[Alert], now: float) -> list[Alert]:
        """Those that were not told within `AGAIN_S`."""
        told = self._told_at.items()
        self._told_at = {key: at for key, at in list(told) if now - at < AGAIN_S}
        return [alert for alert in alerts if alert.key not in self._told_at]

    def told(self, alert: Alert, now: float) -> None:
        """An alert was told."""
        self._told_at[alert.key] = now


def pass_on(alert: Alert, topic: str) -> None:
    """Publishes an alert to an ntfy topic, which shows it on telephones."""
    request = urllib.request.Request(
        topic,
        data=(alert.description if alert.firing else f"Resolved: {alert.summary}").encode(),
        headers={
            "Title": alert.summary.encode("ascii", "replace").decode(),
            "Priority": "urgent" if alert.firing and alert.severity == "critical" else "default",
            "Tags": "rotating_light" if alert.firing else "white_check_mark",
        },
    )
    urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()


class Receiver(ThreadingHTTPServer):
    """Takes notifications from Alertmanager."""

    daemon_threads = True

    def __init__(self, host: str, port: int, topic: str = "") -> None:
        """Listens; port 0 is any free one. `topic` is an ntfy topic's address, or empty."""
        super().__init__((host, port), _Request)
        self.topic = topic
        self._memory = Memory()
        self._lock = threading.Lock()

    def take(self, body: bytes) -> None:
        """Prints what is new in a notification, and passes it on.

        Raises:
            ValueError: the body is not what Alertmanager sends.
            OSError: the topic could not be reached; Alertmanager will try again.
        """
        alerts = Alert.all_of(body)
        with self._lock:  # Each notification has a thread.
            for alert in self._memory.news(alerts, time.monotonic()):
                if self.topic:
                    pass_on(alert, self.topic)
                print(f"{datetime.now():%H:%M:%S} {alert}", flush=True)
                self._memory.told(alert, time.monotonic())


class _Request(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server: Receiver

    def do_POST(self) -> None:
        """Takes one notification."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_BYTES:
            self.send_error(413, "a notification says its length, and is shorter")
            return
        try:
            self.server.take(self.rfile.read(int(length)))
        except ValueError as error:
            self.send_error(400, "not a notification", str(error))
        except OSError as error:
            # 5xx makes Alertmanager try again.
            self.send_error(502, "the topic does not answer", str(error))
        else:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the alerts are the output."""


def _line(text: object) -> str:
    """A text without what would break a line or colour a terminal."""
    return "".join(each if each.isprintable() else " " for each in str(text))


def main(arguments: list[str]) -> None:
    """Receives until it is ended."""
    parser = argparse.ArgumentParser(description="Prints the alerts that Alertmanager sends.")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=9095, help="0: any free one")
    parser.add_argument("--ntfy", default="", metavar="URL", help="a topic to pass alerts on to")
    chosen = parser.parse_args(arguments)
    with Receiver(chosen.host, chosen.port, chosen.ntfy) as receiver:
        print(f"waiting for alerts on http://{chosen.host}:{receiver.server_port}/", flush=True)
        with suppress(KeyboardInterrupt):
            receiver.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
