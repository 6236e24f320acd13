"""A checkpoint's files: trees of state in a folder, written completely or not at all, no pickle.

Theory of operation. The files are written into a hidden folder beside the final one, synced to
disk, and renamed into place; only then is the parent folder synced. So a crash at any moment leaves
either the old checkpoint or the new one under the name, and at worst a hidden folder, which the
next checkpoint removes. The process that writes has the hidden folder locked. The lock ends with
the process, so a folder that can be locked is of a dead one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from andon.host.manifest import MANIFEST, CheckpointDamaged, CheckpointFacts, Manifest
from andon.host.private_files import make_folder, open_private
from andon_trainer.state.trees import join_tree, packed_parts, split_tree, unpack_tensors

__all__ = [
    "BaseFile",
    "Draft",
    "Stateful",
    "load_checkpoint",
    "remove_checkpoint",
    "save_checkpoint",
]

_BASE = "base-"
_BASE_DIGITS = 16
_PIECE_BYTES = 16 * 2**20
_SYNC_BYTES = 32 * 2**20
"""So much of a file is written before it is synced to disk."""
_QUIET_S = 600.0
"""A draft to which nothing was written for so long is a dead process's, where locks don't tell."""


@dataclass(frozen=True, slots=True)
class BaseFile:
    """The parameters that are not trained, for a file that checkpoints of a run share."""

    digest: str
    """Of the tensors, hexadecimal; the file is named after it."""
    tensors: Mapping[str, torch.Tensor]

    @property
    def name(self) -> str:
        """The file's name: `base-` and 16 digits of the digest."""
        return f"{_BASE}{self.digest[:_BASE_DIGITS]}.safetensors"


class Stateful(Protocol):
    """An optimizer, a scheduler, or anything else with a state."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: tensors, numbers, strings, lists, tuples and dicts."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Loads a state that `state_dict` returned."""


class Draft:
    """A checkpoint that is being written, in a hidden folder beside its own."""

    def __init__(self, folder: Path) -> None:
        """Makes the hidden folder, and removes those that killed processes left.

        Raises:
            OSError: the disk is full or missing.
        """
        self._folder = folder
        self._linked: dict[str, tuple[int, str]] = {}
        for each in (folder.parent.parent, folder.parent):  # the run's, and that of its checkpoints
            make_folder(each)
        _sweep(folder)
        while True:
            self._path = _hidden(folder)
            make_folder(self._path)
            self._lock, _ = _open_locked(self._path)
            if self._lock is not None:
                break
            # Another process sweeps at this moment, and took it for a dead one's.

    def link(self, base: BaseFile) -> bool:
        """Links to a file of the base that an earlier checkpoint has; False if there is none."""
        self._linked = _link(base.name, self._folder.parent, self._path)
        return bool(self._linked)

    def finish(
        self, trees: Mapping[str, Any], facts: CheckpointFacts, base: BaseFile | None
    ) -> None:
        """Writes everything, and gives the folder its name. If anything fails, nothing is left.

        Raises:
            TypeError, ValueError: a tree holds what can't be kept without pickle.
            OSError: the disk is full or missing.
        """
        try:
            files = dict(self._linked)
            for name, tree in trees.items():
                skeleton, tensors = split_tree(tree)
                for file, parts in (
                    (f"{name}.safetensors", packed_parts(tensors)),
                    (f"{name}.json", [json.dumps(skeleton).encode()]),
                ):
                    files[file] = _write(self._path / file, parts)
            if base is not None and not self._linked:
                files[base.name] = _write(self._path / base.name, packed_parts(base.tensors))
            _write(self._path / MANIFEST, [Manifest(facts, files).to_bytes()])
            _sync_folder(self._path)
            _move(self._path, self._folder)
        except BaseException:
            self.discard()
            raise
        self._unlock()
        _sync_folder(self._folder.parent)

    def discard(self) -> None:
        """Removes it."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def save_checkpoint(
    folder: Path, trees: Mapping[str, Any], facts: CheckpointFacts, base: BaseFile | None = None
) -> Path:
    """Writes a checkpoint into `folder`, replacing an older one.

    Each tree becomes two files, safetensors for its tensors and JSON for everything else;
    `state.json` is the manifest. The base is a link to the file of an earlier checkpoint beside
    `folder`, if one has the same, and is not written then. If anything fails, `folder` is as it was
    before.

    Args:
        folder: its parents are created.
        trees: nested dicts, lists and tuples of tensors and plain values, by name.
        facts: step, position, digest and run plan of the state.
        base: what is not trained; None: there is no such file.

    Returns:
        The folder.

    Raises:
        TypeError: a tree holds what can't be kept without pickle.
        OSError: the disk is full or missing.
    """
    draft = Draft(folder)
    try:
        if base is not None:
            draft.link(base)
    except BaseException:
        draft.discard()
        raise
    draft.finish(trees, facts, base)
    return folder


def load_checkpoint(
    folder: Path, names: tuple[str, ...]
) -> tuple[CheckpointFacts, dict[str, Any], dict[str, torch.Tensor]]:
    """Reads what `save_checkpoint` wrote, and verifies every digest.

    Returns:
        The facts, the trees of these names, and the tensors of the base.

    Raises:
        FileNotFoundError: there is no checkpoint in `folder`.
        CheckpointDamaged: a file is not as it was written; the error names the first.
    """
    manifest = Manifest.read(folder)
    trees: dict[str, Any] = {}
    for name in names:
        data = manifest.load(folder, f"{name}.safetensors")
        skeleton = manifest.load(folder, f"{name}.json")
        try:
            trees[name] = join_tree(json.loads(skeleton), unpack_tensors(data))
        except ValueError as error:
            raise CheckpointDamaged(folder / f"{name}.json", f"can't be read ({error})") from error
    base: dict[str, torch.Tensor] = {}
    for name in manifest.files:
        if name.startswith(_BASE):
            try:
                base |= unpack_tensors(manifest.load(folder, name))
            except CheckpointDamaged:
                raise
            except ValueError as error:
                raise CheckpointDamaged(folder / name, f"can't be read ({error})") from error
    return manifest.facts, trees, base


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint; never leaves half of it under its name."""
    old = _hidden(folder)
    try:
        folder.rename(old)
    except FileNotFoundError:
        return  # Another worker has removed it.
    shutil.rmtree(old, ignore_errors=True)


def _link(name: str, checkpoints: Path, draft: Path) -> dict[str, tuple[int, str]]:
    """Links to a file that an earlier checkpoint has; its entry of the manifest, if one has it."""
    for path in sorted(checkpoints.glob(f"step-*/{name}"), reverse=True):
        try:
            entry = Manifest.read(path.parent).files[name]
            if path.stat().st_size != entry[0]:
                continue
        except (KeyError, OSError, CheckpointDamaged):
            continue
        try:
            os.link(path, draft / name)
        except OSError:  # A file system without links, or too many of them: it is written again.
            return {}
        return {name: entry}
    return {}


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Writes a file durably; returns its size and its SHA-256.

    In pieces, so that a thread that does this holds nothing up for long: hashing and writing let
    others run meanwhile, and what others write to this disk waits for one piece, not for the file.
    """
    digest, size, unsynced = hashlib.sha256(), 0, 0
    with open(path, "wb", opener=open_private) as file:
        for part in parts:
            whole = memoryview(part)
            for at in range(0, len(whole), _PIECE_BYTES):
                piece = whole[at : at + _PIECE_BYTES]
                digest.update(piece)
                file.write(piece)
                size, unsynced = size + len(piece), unsynced + len(piece)
                if unsynced >= _SYNC_BYTES:
                    file.flush()
                    os.fdatasync(file.fileno())
                    unsynced = 0
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Makes the folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(draft: Path, folder: Path) -> None:
    if folder.exists():
        # A folder can't be renamed over one that is not empty. A crash between the two renames
        # leaves only the hidden old one: the run then resumes from the checkpoint before it.
        old = _hidden(folder)
        folder.rename(old)
        draft.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        draft.rename(folder)


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")


def _open_locked(path: Path) -> tuple[int | None, bool]:
    """Opens a folder and locks it, for as long as this process lives and keeps it open.

    Returns:
        The number of the open folder, or None if another process has locked or removed it; and
        whether that is known: on some file systems (NFS) folders can't be locked.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, True
    knows = True
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        return None, True
    except OSError:
        knows = False
    if path.exists():  # Else it was removed between the two lines above.
        return number, knows
    os.close(number)
    return None, True


def _sweep(folder: Path) -> None:
    """Removes hidden folders that killed processes left.

    A writer that lives may be at work there: one that the line has lost, and another took over.
    """
    for path in {*folder.parent.glob(".step-*"), *folder.parent.glob(f".{folder.name}.*")}:
        number, knows = _open_locked(path)
        if number is None:
            continue
        if knows or _is_quiet(path):
            shutil.rmtree(path, ignore_errors=True)
        os.close(number)


def _is_quiet(draft: Path) -> bool:
    """Whether nobody has written to a draft for a while."""
    times = []
    for each in (draft, *draft.glob("*")):
        with suppress(FileNotFoundError):
            times.append(each.stat().st_mtime)
    return max(times, default=0.0) < time.time() - _QUIET_S
