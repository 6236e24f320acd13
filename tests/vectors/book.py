"""The book of vectors: golden messages with what a receiver must do, as files and an index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

__all__ = ["Vector", "accepted", "files_of", "refused", "rows"]

_GENERATED_CODE = {True: "reads", False: "refuses"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """One message as bytes."""

    name: str
    message: type[Message]
    """The type that a receiver takes it for."""
    data: bytes
    shows: str
    """What it is there for."""
    why: str = ""
    """Why a receiver must refuse it; empty: it must accept it."""
    fields: dict[str, Any] | None = None
    """The message as protobuf JSON has it; None: there is no such message."""
    note: str = ""
    """What JSON can't say."""

    @property
    def full_name(self) -> str:
        """The type's name, with its package."""
        return str(self.message.DESCRIPTOR.full_name)

    @property
    def generated_code(self) -> str:
        """Whether protobuf's own code gives a message for the bytes, right or wrong."""
        try:
            self.message.FromString(self.data)
        except DecodeError:
            return _GENERATED_CODE[False]
        return _GENERATED_CODE[True]


def accepted(
    name: str, message: Message, shows: str, *, data: bytes | None = None, note: str = ""
) -> Vector:
    """A message that must be accepted; `data` are its bytes if they are not the usual ones."""
    return Vector(
        name=name,
        message=type(message),
        data=message.SerializeToString(deterministic=True) if data is None else data,
        shows=shows,
        fields=_fields(message),
        note=note,
    )


def refused(
    name: str, message: type[Message] | Message, shows: str, why: str, *, data: bytes | None = None
) -> Vector:
    """A message, or bytes that are none, that must be refused."""
    if isinstance(message, Message):
        data = message.SerializeToString(deterministic=True) if data is None else data
        return Vector(
            name=name,
            message=type(message),
            data=data,
            shows=shows,
            why=why,
            fields=_fields(message),
        )
    assert data is not None, "bytes of no message must be given"
    note = f"The bytes are no legal message: {why}."
    return Vector(name=name, message=message, data=data, shows=shows, why=why, note=note)


def _fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = json_format.MessageToDict(message)
    return fields


def files_of(vectors: Iterable[Vector], folder: str) -> dict[str, bytes]:
    """The vectors' files and their index, by path below conformance/."""
    files: dict[str, bytes] = {}
    entries = []
    for vector in vectors:
        path = f"{folder}/{vector.name}.binpb"
        assert path not in files, f"two vectors are called {vector.name}"
        files[path] = vector.data
        files[f"{folder}/{vector.name}.json"] = _text(_readable(vector))
        entries.append(
            {
                "name": vector.name,
                "type": vector.full_name,
                "file": path,
                "sha256": hashlib.sha256(vector.data).hexdigest(),
                "size": len(vector.data),
                "shows": vector.shows,
                "verdict": "refuse" if vector.why else "accept",
                **({"why": vector.why} if vector.why else {}),
                "generated_code": vector.generated_code,
            }
        )
    about = (
        "Golden messages of andon.v1; README.md says how to use them. A receiver of this type must "
        "do what the verdict says; generated_code tells if protobuf's own code already does."
    )
    rows = ",\n    ".join(json.dumps(entry) for entry in entries)
    index = f'{{\n  "description": {json.dumps(about)},\n  "vectors": [\n    {rows}\n  ]\n}}\n'
    files["index.json"] = index.encode()
    return files


def _readable(vector: Vector) -> dict[str, Any]:
    readable: dict[str, Any] = {"type": vector.full_name}
    if vector.fields is not None:
        readable["message"] = vector.fields
    if vector.note:
        readable["note"] = vector.note
    return readable


def _text(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def rows(name: str, about: str, cases: Sequence[dict[str, Any]]) -> bytes:
    """A file of cases, one a line."""
    lines = ",\n    ".join(json.dumps(case) for case in cases)
    text = f'{{\n  "description": {json.dumps(about)},\n  "{name}": [\n    {lines}\n  ]\n}}\n'
    return text.encode()
