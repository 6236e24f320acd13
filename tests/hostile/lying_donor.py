"""A PyTorch worker that trains rightly, and lies when it is to give its state to a newcomer.

Usage: lying_donor.py SPEC.json OUT.json, as train.py, which it runs. `lies` in the spec is a file
of lies, one a line: each transfer takes the first one. Without one it is honest.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from andon.protocol.limits import STATE_PIECE_BYTES
from andon.protocol.records import Key
from andon.v1 import reducer_pb2 as pb
from andon.v1.reducer_pb2_grpc import ReducerStub
from andon.wire import conversion
from andon_trainer.errors import StateCorrupt
from andon_trainer.exchange.channels import open_channel
from andon_trainer.exchange.control import giving, transfer
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.exchange.control.transfer import Progress, Ticket, Watch
from integration.harness import SCRIPTS

__all__ = ["LIES"]

Honest = Callable[[Ticket, PackedState, Progress, Watch], None]


def _say(ticket: Ticket, watch: Watch, state: bytes, size: int, digest: bytes) -> None:
    """Announces a state of this size and digest, and sends `state`, whatever it is."""

    def said() -> Iterator[pb.PutStateRequest]:
        yield pb.PutStateRequest(
            run_id=ticket.run_id,
            worker=ticket.worker,
            session_token=ticket.session_token,
            transfer_id=ticket.transfer_id,
            head=conversion.key_to_proto(ticket.head),
            size_bytes=size,
            sha256=digest,
        )
        for at in range(0, len(state), STATE_PIECE_BYTES):
            yield pb.PutStateRequest(payload=state[at : at + STATE_PIECE_BYTES])

    with open_channel(ticket.address, ticket.tls) as channel:
        call = ReducerStub(channel).PutState(said())
        watch(call.cancel)
        try:
            for _ in call:
                pass
        finally:
            watch(None)


def _sha(state: bytes) -> bytes:
    return hashlib.sha256(state).digest()


def _refuse() -> None:
    raise StateCorrupt("a lie: it will not give it")


LIES: dict[str, Callable[[Ticket, Watch, bytes], None]] = {
    "another digest": lambda to, by, s: _say(to, by, s, len(s), bytes(32)),
    "one bit": lambda to, by, s: _say(to, by, s[:-1] + bytes([s[-1] ^ 1]), len(s), _sha(s)),
    "too small a size": lambda to, by, s: _say(to, by, s, len(s) - 1, _sha(s)),
    "too large a size": lambda to, by, s: _say(to, by, s, len(s) + 1, _sha(s)),
    "cut short, and says so": lambda to, by, s: _say(to, by, s[:999], 999, _sha(s[:999])),
    "cut short": lambda to, by, s: _say(to, by, s[: len(s) // 2], len(s), _sha(s)),
    "more than announced": lambda to, by, s: _say(to, by, s + bytes(2**21), len(s), _sha(s)),
    "noise": lambda to, by, s: _say(to, by, bytes(len(s)), len(s), _sha(bytes(len(s)))),
    "empty": lambda to, by, s: _say(to, by, b"", 0, _sha(b"")),
    "another head": lambda to, by, s: _say(
        replace(to, head=Key(to.head.term, to.head.round + 1)), by, s, len(s), _sha(s)
    ),
    "another transfer": lambda to, by, s: _say(
        replace(to, transfer_id=to.transfer_id + 1), by, s, len(s), _sha(s)
    ),
    "a failure": lambda *_: _refuse(),
}
"""What a donor does in place of sending its state."""


def _lying(honest: Honest, file: Path) -> Honest:
    def send(ticket: Ticket, state: PackedState, progress: Progress, watch: Watch) -> None:
        lies = file.read_text().splitlines() if file.exists() else []
        if not lies:
            return honest(ticket, state, progress, watch)
        file.write_text("\n".join(lies[1:]))
        return LIES[lies[0]](ticket, watch, bytes(state))

    return send


def main() -> None:
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    # This process alone is a liar: the others have the real function.
    for sender in (transfer, giving):
        vars(sender)["send_state"] = _lying(transfer.send_state, Path(spec["lies"]))
    runpy.run_path(str(SCRIPTS / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
