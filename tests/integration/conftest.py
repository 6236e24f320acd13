"""Runs tests that are coroutines, each in its own event loop and for 40 seconds at most.

It also has a command for what starts `python` itself, as `andon audit` does.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pytest

from integration.nursery import nursery
from integration.served import run

_RELAY = Path(__file__).with_name("fixtures") / "relay.py"
_PATIENCE_S = 100.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def forked_python() -> Iterator[list[str]]:
    """A command in place of `python`: the process is forked from the nursery with PyTorch."""
    nursery("trainer")  # Only this thread may start it.
    with (
        TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
    ):
        address = f"{folder}/relay"
        server.bind(address)
        server.listen()
        forking = Thread(target=_fork_what_is_asked_for, args=(server,))
        forking.start()
        yield [sys.executable, "-I", "-S", str(_RELAY), address]
        server.shutdown(socket.SHUT_RDWR)
        forking.join()


def _fork_what_is_asked_for(server: socket.socket) -> None:
    while True:
        try:
            asked, _ = server.accept()
        except OSError:
            return  # The test is over.
        with asked:
            data, (output,), *_ = socket.recv_fds(asked, 2**20, 1)
            request = json.loads(data)
            assert request["folder"] == os.getcwd()
            child = nursery("trainer").start(
                request["arguments"], request["environment"], Path(f"/proc/self/fd/{output}")
            )
            os.close(output)
            code = child.wait(_PATIENCE_S) & 0xFF
            with suppress(BrokenPipeError):  # Whoever asked has heard enough of it.
                asked.send(b"%d" % code)
