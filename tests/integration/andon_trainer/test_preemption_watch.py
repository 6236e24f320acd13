"""A file or a URL that tells of this machine's end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from andon_trainer.process.preemption import PreemptionWatch, notice_at

pytestmark = pytest.mark.integration


class _Metadata(BaseHTTPRequestHandler):
    """Answers by path, and never asks for anything."""

    def do_GET(self) -> None:
        status, body = {
            "/preempted": (200, b"TRUE\nsoon\x1b[31m" + b"x" * 100_000),
            "/not": (200, b"FALSE"),
            "/moved": (302, b"TRUE"),
        }.get(self.path, (404, b"no notice"))
        self.send_response(status)
        self.send_header("Location", "/preempted")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_answer_of_200_with_a_text_is_a_notice_of_one_short_line(server: str) -> None:
    said = notice_at(f"{server}/preempted")

    assert said.startswith(f"{server}/preempted says TRUE")
    assert len(said) < 300
    assert said.isprintable()


@pytest.mark.parametrize("path", ["not", "moved", "missing"])
def test_any_other_answer_is_no_notice(server: str, path: str) -> None:
    assert notice_at(f"{server}/{path}") == ""


def test_a_file_that_appears_is_told_once(tmp_path: Path) -> None:
    file, told, here = tmp_path / "preempted", list[str](), threading.Event()

    def tell(said: str) -> None:
        told.append(said)
        here.set()

    file.touch()
    watch = PreemptionWatch(str(file), tell)

    assert here.wait(30)
    watch.stop()
    assert told == [f"the file {file} is there"]
