"""Clients on a line with mutual TLS. With several reducers the judge plays a line for them."""

from __future__ import annotations

import asyncio
import queue
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clients.languages import LANGUAGES
from clients.rig import mixed_line

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    *(mark for language in LANGUAGES.values() for mark in language.marks),
]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="apt-get install openssl")
def test_clients_speak_tls_and_show_their_certificates(tmp_path: Path) -> None:
    folder = _certificates(tmp_path / "tls")
    with mixed_line(tmp_path, 3, 10) as line, _behind_tls(folder, line.port) as port:
        for slot, language in enumerate(LANGUAGES):
            where = {"ANDON_ADDRESS": f"localhost:{port}", "ANDON_TLS_DIR": str(folder)}
            line.start(slot, language, **where)
        line.ended_alike()

    line.judge()


def _certificates(folder: Path) -> Path:
    """A CA, and one certificate from it for all processes on this host."""
    folder.mkdir()
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    new = ("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout")
    for command in (
        (*new, "ca.key", "-x509", "-days", "1", "-subj", "/CN=authority", "-out", "ca.crt"),
        (*new, "tls.key", "-subj", "/CN=localhost", "-out", "request"),
        (
            *("openssl", "x509", "-req", "-days", "1", "-in", "request", "-CA", "ca.crt"),
            *("-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-out", "tls.crt"),
        ),
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@contextmanager
def _behind_tls(folder: Path, port: int) -> Iterator[int]:
    """A TLS proxy in front of a plaintext port. It requires client certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    listening: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()
    relay = _relay(context, port, listening, over)
    thread = threading.Thread(target=loop.run_until_complete, args=(relay,))
    thread.start()
    try:
        yield listening.get(timeout=30)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


async def _relay(
    context: ssl.SSLContext, port: int, listening: queue.SimpleQueue[int], over: asyncio.Event
) -> None:
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, plain_writer), _copy(plain_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    listening.put(server.sockets[0].getsockname()[1])
    await over.wait()
    server.close()
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one end has closed
    finally:
        writer.close()
