"""The malformed messages among the conformance vectors, which every client must refuse."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from andon.host.errors import UsageError
from andon.protocol.records import Key

__all__ = ["Vector", "malformed"]

_HERE = Path(__file__).parents[1] / "vectors"
"""In an installed package."""
_SOURCE = Path(__file__).parents[2]
"""In the source tree."""

_TERM = 7323331019669504007
_HEAD, _PRESENT, _NEXT = (Key(_TERM, number) for number in (8, 9, 10))
"""The keys that the vectors use for the head, the current round, and the round after it."""

_MAY_READ = {"ReduceResponse.bad.group"}
"""Generated code reads these as messages with an unknown field, so a worker may do so too."""


@dataclass(frozen=True, slots=True)
class Vector:
    """One malformed message."""

    name: str
    data: bytes
    why: str
    """Why it must be refused."""

    def of(self, head: Key, key: Key) -> bytes:
        """Its bytes, with `head` and `key` in place of the head and round that it names.

        It then belongs to the current round, so that no client may ignore it as stale.
        """
        data, after = self.data, Key(key.term, key.round + 1)
        for old, new in ((_HEAD, head), (_PRESENT, key), (_NEXT, after)):
            data = data.replace(_encoded(old), _encoded(new))
        return data


def malformed(kind: str) -> list[Vector]:
    """The malformed messages of type `kind`, such as `TrainResponse`.

    Raises:
        UsageError: the vectors are not there, or are not what their index says.
    """
    folder = _HERE if _HERE.is_dir() else _SOURCE
    try:
        index = json.loads((folder / "index.json").read_text("utf-8"))["vectors"]
        return [
            _read(folder, entry)
            for entry in index
            if entry["type"] == f"andon.v1.{kind}"
            and entry["verdict"] == "refuse"
            and entry["name"] not in _MAY_READ
        ]
    except OSError as error:
        raise UsageError(
            f"the conformance vectors can't be read ({error}): reinstall andon-conformance, or "
            "run this in a checkout"
        ) from None


def _read(folder: Path, entry: dict[str, str]) -> Vector:
    data = (folder / entry["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise UsageError(
            f"{folder / entry['file']} does not match its index: reinstall andon-conformance"
        )
    return Vector(entry["name"], data, entry["why"])


def _encoded(key: Key) -> bytes:
    """A Key as bytes: two fields of fixed length."""
    return struct.pack("<BQBQ", 0x09, key.term, 0x11, key.round)
