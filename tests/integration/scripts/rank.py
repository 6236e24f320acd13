"""One rank of a session: usage `rank.py ADDRESS RANK WORLD_SIZE MODE`.

It says `formed`, and at the end `over: ...`. MODE: `wait` waits for the end of the session, `hold`
leaves after it has held the interpreter's lock for four seconds, which is two leases.
"""

from __future__ import annotations

import ctypes
import sys
import threading

from andon.protocol.sessions import RankReport
from andon_trainer.errors import SessionEnded
from andon_trainer.peers.attending import AttendSettings, attend


def say(text: str) -> None:
    """One line for the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Attends, and does what the mode says."""
    address, rank, size, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    attending = attend(AttendSettings(address=address, rank=rank, world_size=size))
    over = threading.Event()
    attending.watch(lambda _: over.set())
    attending.report_from(lambda: RankReport(steps=2, bytes=64))
    say(f"formed {attending.formed.key}")
    if mode == "hold":
        ctypes.PyDLL(None).sleep(4)  # Unlike CDLL, it keeps the lock.
        attending.leave(done=True)
        say(f"left {attending.over}")
        return
    over.wait(60)
    assert attending.over is not None
    say(f"over: {attending.over.message}")
    raise SessionEnded(attending.over)


if __name__ == "__main__":
    main()
