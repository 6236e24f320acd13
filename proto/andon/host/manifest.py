"""Manifests: which files a checkpoint has, with their digests.

The format of a checkpoint, for workers that write and load them and for commands that choose one: a
folder `step-00000100` with `state.json`, the manifest. It has the facts, the size and SHA-256 of
every other file, and a SHA-256 of itself. So a file that was changed, truncated or removed is found
and named.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.protocol.arithmetic import Arithmetic, in_order
from andon.protocol.records import Cursor, Key, PositionRange
from andon.protocol.run_settings import RunPlan

__all__ = [
    "MANIFEST",
    "CheckpointDamaged",
    "CheckpointFacts",
    "Manifest",
    "checkpoint_folder",
    "checkpoints_in",
    "newest_whole",
    "step_of",
]

log = logging.getLogger(__name__)

MANIFEST = "state.json"
"""The manifest's name in a checkpoint's folder."""

_FORMAT = 2


class CheckpointDamaged(ValueError):
    """A checkpoint is not as it was written: `what` is wrong with `file`; with the remedy."""

    def __init__(self, file: Path, what: str) -> None:
        """`what` says what is wrong with `file`."""
        super().__init__(
            f"{file} {what}: restore it from a copy, or go on from an earlier checkpoint "
            "(andon run --resume RUN --resume-step STEP)"
        )
        self.file = file
        self.what = what


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Which state of the run a checkpoint holds."""

    head: Key
    """The last record that was applied to these weights."""
    step: int
    """Steps committed."""
    cursor: Cursor
    """The first position that is not yet committed."""
    digest: str
    """SHA-256 of the weights, hexadecimal; see docs/protocol-data.md."""
    plan: RunPlan
    """What the script intends to do."""
    pacing: bytes = b""
    """What the coordinator knew of its workers' speed; the next one reads it, and nobody else."""
    arithmetic: Arithmetic = ()
    """What decided the bits of its writer's results; empty: the run has no same bits."""

    def to_json(self) -> dict[str, Any]:
        """The facts as values of JSON."""
        facts = {
            "head": {"term": self.head.term, "round": self.head.round},
            "step": self.step,
            "cursor": {"epoch": self.cursor.epoch, "position": self.cursor.position},
            "digest": self.digest,
            "plan": self.plan.to_json(),
        }
        if self.cursor.owed:
            facts["owed"] = [[each.start, each.stop] for each in self.cursor.owed]
        if self.pacing:
            facts["pacing"] = base64.b64encode(self.pacing).decode()
        if self.arithmetic:
            facts["arithmetic"] = dict(self.arithmetic)
        return facts

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CheckpointFacts:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or illegal.
        """
        owed = tuple(PositionRange(*each) for each in fields.get("owed", ()))
        return cls(
            head=Key(fields["head"]["term"], fields["head"]["round"]),
            step=fields["step"],
            cursor=Cursor(fields["cursor"]["epoch"], fields["cursor"]["position"], owed),
            digest=fields["digest"],
            plan=RunPlan.from_json(fields["plan"]),
            # Checkpoints from before there was one have none.
            pacing=base64.b64decode(fields.get("pacing", ""), validate=True),
            arithmetic=in_order(dict(fields.get("arithmetic", {}))),
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's facts, and its files as (size in bytes, SHA-256 in hexadecimal) by name."""

    facts: CheckpointFacts
    files: dict[str, tuple[int, str]]

    @classmethod
    def of(cls, facts: CheckpointFacts, files: Mapping[str, bytes]) -> Manifest:
        """The manifest of these files, by name."""
        return cls(
            facts,
            {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()},
        )

    def to_bytes(self) -> bytes:
        """The content of the manifest's file."""
        fields = {
            "format": _FORMAT,
            "facts": self.facts.to_json(),
            "files": {
                name: {"bytes": size, "sha256": digest}
                for name, (size, digest) in sorted(self.files.items())
            },
        }
        return (json.dumps({**fields, "sha256": _own_digest(fields)}, indent=2) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in a checkpoint's folder.

        Raises:
            FileNotFoundError: there is no checkpoint in `folder`.
            CheckpointDamaged: the file is not a manifest, was changed, or can't be read.
        """
        path = folder / MANIFEST
        data = _content(path)
        try:
            fields = json.loads(data)
            digest = fields.pop("sha256")
            # First the format: another one may define its digest in another way.
            if fields["format"] != _FORMAT:
                raise CheckpointDamaged(path, "has a format that this version can't read")
            if digest != _own_digest(fields):
                raise CheckpointDamaged(path, "was changed since it was written")
            files = {
                name: (int(each["bytes"]), str(each["sha256"]))
                for name, each in fields["files"].items()
            }
            if any(Path(name).name != name for name in files):
                raise CheckpointDamaged(path, "names a file outside its folder")
            return cls(CheckpointFacts.from_json(fields["facts"]), files)
        except CheckpointDamaged:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointDamaged(path, f"is not a checkpoint's manifest ({error})") from error

    def load(self, folder: Path, name: str) -> bytes:
        """The content of a file, after its size and digest were compared.

        Raises:
            CheckpointDamaged: it is missing or differs.
        """
        path = folder / name
        if name not in self.files:
            raise CheckpointDamaged(folder / MANIFEST, f"does not list {name}")
        try:
            data = _content(path)
        except FileNotFoundError:
            raise CheckpointDamaged(path, "is missing") from None
        self._compare(path, len(data), hashlib.sha256(data).hexdigest())
        return data

    def verify(self, folder: Path) -> None:
        """Compares every file, without loading a whole file into memory.

        Raises:
            CheckpointDamaged: one is missing or differs.
        """
        for name in self.files:
            path = folder / name
            try:
                with _opened(path) as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    size = file.tell()
            except FileNotFoundError:
                raise CheckpointDamaged(path, "is missing") from None
            self._compare(path, size, digest)

    def _compare(self, path: Path, size: int, digest: str) -> None:
        wanted_size, wanted = self.files[path.name]
        if size != wanted_size:
            raise CheckpointDamaged(path, f"has {size} bytes and was written with {wanted_size}")
        if digest != wanted:
            raise CheckpointDamaged(
                path, f"holds other bytes: SHA-256 {digest[:12]}..., written as {wanted[:12]}..."
            )


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """The folder for the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def checkpoints_in(run_dir: Path) -> list[Path]:
    """A run's checkpoints, newest first. A folder gets its name once it is complete."""
    found = (run_dir / "checkpoints").glob("step-*")
    return sorted((path for path in found if _named(path)), key=step_of, reverse=True)


def newest_whole(run_dir: Path) -> Path | None:
    """A run's newest checkpoint that is as it was written; None if there is none.

    The one with the greatest key is the newest. Its step need not be the greatest: steps from
    before the run was rolled back may lie beside it.
    """
    manifests: list[tuple[Key, Path, Manifest]] = []
    for folder in checkpoints_in(run_dir):
        try:
            manifest = Manifest.read(folder)
            manifests.append((manifest.facts.head, folder, manifest))
        except (FileNotFoundError, CheckpointDamaged) as error:
            log.warning("%s is left out: %s", folder, error)
    for _, folder, manifest in sorted(manifests, key=lambda each: each[0], reverse=True):
        try:
            manifest.verify(folder)
        except (FileNotFoundError, CheckpointDamaged) as error:
            log.warning("%s is left out: %s", folder, error)
        else:
            return folder
    return None


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("step-"))


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """A file of a checkpoint, open for reading. A pipe or a device is not waited for.

    Raises:
        FileNotFoundError: it is missing.
        CheckpointDamaged: it can't be read.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise CheckpointDamaged(path, "is no file")
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointDamaged(path, f"can't be read ({error.strerror})") from error


def _content(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read()


def _named(path: Path) -> bool:
    return path.name.removeprefix("step-").isdecimal() and path.is_dir()


def _own_digest(fields: Mapping[str, Any]) -> str:
    # One text for the same content, whatever the order and spacing in the file.
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
