"""The metrics endpoint's answers: the registry, the targets to scrape, and nothing else."""

from __future__ import annotations

import json
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from prometheus_client import CollectorRegistry, Gauge

from andon.host.metrics import MetricsApp, MetricsGuard
from andon.host.web_names import listed_names, own_names
from andon_server.board.app import starting

GUARD = MetricsGuard(names=own_names("andon", "andon.example"))


def ask(
    app: MetricsApp, path: str, *, host: str = "andon:9400", method: str = "GET", shown: str = ""
) -> tuple[str, dict[str, str], str]:
    environment: dict[str, Any] = {
        **{"PATH_INFO": path, "HTTP_HOST": host, "REQUEST_METHOD": method}
    }
    if shown:
        environment["HTTP_AUTHORIZATION"] = shown
    setup_testing_defaults(environment)
    answer: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], *_: Any) -> Any:
        answer.extend((status, dict(headers)))

    body = b"".join(app(environment, start_response))
    return answer[0], answer[1], body.decode()


def app_with(**workers: str) -> MetricsApp:
    app = MetricsApp(CollectorRegistry(), GUARD)
    app.discover("7f3a", lambda: {int(name[1:]): address for name, address in workers.items()})
    return app


def test_metrics_are_the_registry() -> None:
    registry = CollectorRegistry()
    Gauge("andon_thing", "A thing", registry=registry).set(3)

    status, _, body = ask(MetricsApp(registry, GUARD), "/metrics")

    assert status == "200 OK"
    assert "andon_thing 3.0" in body


def test_what_is_to_be_mounted_is_answered_for_until_it_is() -> None:
    app = MetricsApp(CollectorRegistry(), GUARD, starting)

    status, headers, body = ask(app, "/board/api/live")

    assert status == "503 Service Unavailable"
    assert headers["Retry-After"] == "1"
    assert json.loads(body) == {"error": "the line is starting: ask again in a moment"}
    assert ask(app, "/metrics")[0] == "200 OK"


def test_discovery_lists_the_service_where_it_was_asked_and_the_others_where_they_said() -> None:
    workers = {1: "10.0.0.8:9402", 0: "[fe80::1]:9401"}
    app = MetricsApp(CollectorRegistry(), GUARD)
    app.discover("7f3a", lambda: workers, lambda: {"beta:7071": "beta:9401"})

    status, headers, body = ask(app, "/sd", host="andon.example:9400")

    assert (status, headers["Content-Type"]) == ("200 OK", "application/json; charset=utf-8")
    assert json.loads(body) == [
        {"targets": ["andon.example:9400"], "labels": {"run": "7f3a"}},
        {"targets": ["[fe80::1]:9401"], "labels": {"run": "7f3a", "worker": "0"}},
        {"targets": ["10.0.0.8:9402"], "labels": {"run": "7f3a", "worker": "1"}},
        {"targets": ["beta:9401"], "labels": {"run": "7f3a", "reducer": "beta:7071"}},
    ]


@pytest.mark.parametrize(
    "address", ["", "nowhere", "host:port", "host:1/path", "http://host:1", "a b:1", "h:1\n"]
)
def test_what_is_no_address_is_not_listed(address: str) -> None:
    _, _, body = ask(app_with(w0=address), "/sd", host="")

    assert json.loads(body) == []


def test_discovery_before_there_is_a_line_lists_the_service_alone() -> None:
    _, _, body = ask(MetricsApp(CollectorRegistry(), GUARD), "/sd")

    assert json.loads(body) == [{"targets": ["andon:9400"], "labels": {"run": ""}}]


@pytest.mark.parametrize("path", ["/", "/sd/", "/metrics/x", "/favicon.ico"])
def test_anything_else_is_not_found(path: str) -> None:
    app = app_with()

    status, _, body = ask(app, path)

    assert status == "404 Not Found"
    assert "/metrics and /sd" in body


def test_discovery_is_only_read() -> None:
    status, headers, _ = ask(app_with(), "/sd", method="POST")

    assert (status, headers["Allow"]) == ("405 Method Not Allowed", "GET")


@pytest.mark.parametrize("path", ["/metrics", "/sd"])
@pytest.mark.parametrize(
    ("host", "admitted"),
    [
        ("andon:9400", True), ("ANDON", True), ("andon.:9400", True), ("127.0.0.1:9400", True),
        ("[::1]:9400", True), ("10.1.2.3:9400", True), ("localhost", True), ("", True),
        ("rebound.example:9400", False), ("andon.rebound.example", False), ("[::1", False),
        ("andon:9400@rebound.example", False), ("127.0.0.1.rebound.example", False),
    ],
)  # fmt: skip
def test_metrics_are_told_under_this_hosts_names_and_addresses_only(
    path: str, host: str, *, admitted: bool
) -> None:
    status, _, body = ask(app_with(), path, host=host)

    assert status == ("200 OK" if admitted else "403 Forbidden")
    assert ("--metrics-hosts" in body) is not admitted


@pytest.mark.parametrize("path", ["/metrics", "/sd"])
def test_with_a_token_metrics_are_told_to_those_who_show_it(path: str) -> None:
    app = MetricsApp(CollectorRegistry(), MetricsGuard(token=b"a-token-of-metrics"))

    none, headers, _ = ask(app, path, host="localhost")
    wrong, _, _ = ask(app, path, host="localhost", shown="Bearer another-token-of-it")
    right, _, _ = ask(app, path, host="localhost", shown="Bearer a-token-of-metrics")

    assert (none, wrong, right) == ("401 Unauthorized", "401 Unauthorized", "200 OK")
    assert headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("names", ["a b", "http://x", "a,,b/", "*"])
def test_what_is_no_name_of_a_host_is_refused(names: str) -> None:
    with pytest.raises(ValueError, match="names of hosts"):
        listed_names(names)
