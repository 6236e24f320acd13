"""Forks: children of a worker that is on a line, such as the processes of a second loader."""

from __future__ import annotations

import subprocess
import sys

import pytest

from integration.harness import clean_environment

pytestmark = pytest.mark.integration

_SCRIPT = """
import gc, os, threading
from andon_trainer.exchange.channels import open_channel

call = open_channel("127.0.0.1:1").unary_unary("/andon.v1.Coordinator/GetStatus")

calls = threading.Semaphore(0)

def busy():
    while True:
        calls.release()
        try:
            call(b"", timeout=0.01)
        except Exception:
            pass

for _ in range(2):
    threading.Thread(target=busy, daemon=True).start()
codes = []
for _ in range(100):
    calls.acquire()
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(0)
    codes.append(os.waitpid(child, 0)[1])
print(codes.count(0), "GRPC_ENABLE_FORK_SUPPORT" in os.environ, flush=True)
os._exit(0)
"""


def test_children_that_are_forked_while_grpc_is_busy_live_and_grpc_takes_no_notice() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stdout == "100 False\n"
    # gRPC's handlers write a line for each fork, and abort some of the children.
    assert "fork" not in done.stderr
