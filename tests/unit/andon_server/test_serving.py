"""Where a service says that others reach it, and how its server ends."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import cast

import grpc.aio
import pytest

from andon.host.errors import UsageError
from andon_cli.app import read_config
from andon_server.serving import advertised, end, warn_of_other_name
from andon_server.settings import ServeConfig
from unit.andon.certificates import certify

OPEN = ("--bind", "0.0.0.0", "--insecure")


def place_of(*argv: str) -> str:
    config = read_config(["serve", *argv], {})
    assert isinstance(config, ServeConfig)
    return advertised(config, 7070)


def test_a_line_on_loopback_is_reached_there() -> None:
    assert place_of() == "127.0.0.1:7070"


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", "[::]"])
def test_a_line_on_every_address_is_reached_by_the_name_of_its_host(everywhere: str) -> None:
    assert place_of("--bind", everywhere, "--insecure") == f"{socket.gethostname()}:7070"


@pytest.mark.parametrize(
    ("place", "reached"),
    [
        ("alpha", "alpha:7070"),
        ("alpha.example", "alpha.example:7070"),
        ("alpha:99", "alpha:99"),
        ("10.0.0.7", "10.0.0.7:7070"),
        ("fe80::1", "[fe80::1]:7070"),
        ("[fe80::1]:99", "[fe80::1]:99"),
    ],
)
def test_others_are_told_what_is_advertised(place: str, reached: str) -> None:
    assert place_of(*OPEN, "--advertise", place) == reached


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("http://alpha", "HOST or HOST:PORT"),
        ("alpha beta", "HOST or HOST:PORT"),
        ("alpha:port", "HOST or HOST:PORT"),
        ("alpha:99999", "HOST or HOST:PORT"),
        ("0.0.0.0", "every address"),
        ("0.0.0.0:7070", "every address"),
        ("::", "every address"),
        ("[::]:7070", "every address"),
    ],
)
def test_what_nobody_can_dial_is_not_advertised(place: str, says: str) -> None:
    with pytest.raises(UsageError, match=rf"--advertise.*{says}"):
        place_of(*OPEN, "--advertise", place)


def test_a_service_warns_if_its_certificate_is_not_for_the_name_that_it_tells_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = certify(tmp_path / "ca", tmp_path / "alpha")
    config = read_config(["serve", "--bind", "0.0.0.0", "--tls", str(folder)], {})
    assert isinstance(config, ServeConfig)

    warn_of_other_name(config, "alpha:7070")
    warn_of_other_name(config, "127.0.0.1:7070")
    assert caplog.messages == []
    warn_of_other_name(config, "beta:7070")

    (said,) = caplog.messages
    assert "is not for beta" in said
    assert "--advertise" in said


def test_a_containers_environment_names_it() -> None:
    config = read_config(["serve", *OPEN], {"ANDON_ADVERTISE": "andon"})

    assert isinstance(config, ServeConfig)
    assert advertised(config, 7070) == "andon:7070"


def test_a_call_that_comes_as_a_server_stops_has_begun_at_its_end() -> None:
    begun = asyncio.Event()

    async def call() -> None:
        begun.set()

    class Stopping:
        """Takes a call in the moment that it stops."""

        async def stop(self, _grace_s: float) -> None:
            self.call = asyncio.create_task(call())

    async def has_begun() -> bool:
        await end(cast(grpc.aio.Server, Stopping()))
        return begun.is_set()

    assert asyncio.run(has_begun())
