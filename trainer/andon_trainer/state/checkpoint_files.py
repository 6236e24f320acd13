"""A checkpoint's files: trees of state in a folder, written completely or not at all, no pickle.

Theory of operation. The files are written into a hidden folder beside the final one, synced to
disk, and renamed into place; only then is the parent folder synced. So a crash at any moment leaves
either the old checkpoint or the new one under the name, and at worst a hidden folder, which the
next checkpoint removes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from andon.host.manifest import MANIFEST, CheckpointDamaged, CheckpointFacts, Manifest
from andon.host.private_files import make_folder, open_private
from andon_trainer.state.trees import join_tree, pack_tensors, split_tree, unpack_tensors

__all__ = ["BaseFile", "Stateful", "load_checkpoint", "remove_checkpoint", "save_checkpoint"]

_BASE = "base-"
_BASE_DIGITS = 16


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


def save_checkpoint(
    folder: Path, trees: Mapping[str, Any], facts: CheckpointFacts, base: BaseFile | None = None
) -> Path:
    """Writes a checkpoint into `folder`, replacing an older one.

    Each tree becomes two files, safetensors for its tensors and JSON for everything else;
    `state.json` is the manifest. The base is a link to the file of an earlier checkpoint beside
    `folder`, if one has the same, and is neither packed nor written then. If anything fails,
    `folder` is as it was before.

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
    files: dict[str, bytes] = {}
    for name, tree in trees.items():
        skeleton, tensors = split_tree(tree)
        files[f"{name}.safetensors"] = pack_tensors(tensors)
        files[f"{name}.json"] = json.dumps(skeleton).encode()

    for each in (folder.parent.parent, folder.parent):  # the run's, and that of its checkpoints
        make_folder(each)
    _sweep(folder)
    draft = _hidden(folder)
    try:
        make_folder(draft)
        linked = {} if base is None else _link(base.name, folder.parent, draft)
        if base is not None and not linked:
            files[base.name] = pack_tensors(base.tensors)
        manifest = Manifest.of(facts, files)
        files[MANIFEST] = Manifest(facts, {**manifest.files, **linked}).to_bytes()
        for name, data in files.items():
            _write(draft / name, data)
        _sync_folder(draft)
        _move(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _sync_folder(folder.parent)
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
        except OSError:  # A file system without links, or too many of them.
            with path.open("rb") as whole:
                _write(draft / name, whole)
        return {name: entry}
    return {}


def _write(path: Path, data: bytes | BinaryIO) -> None:
    with open(path, "wb", opener=open_private) as file:
        if isinstance(data, bytes):
            file.write(data)
        else:
            shutil.copyfileobj(data, file)
        file.flush()
        os.fsync(file.fileno())


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
        shutil.rmtree(old)
    else:
        draft.rename(folder)


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")


def _sweep(folder: Path) -> None:
    """Removes hidden folders that killed processes left.

    None of them is in use: a run's checkpoints are written one at a time.
    """
    for draft in (*folder.parent.glob(".step-*"), *folder.parent.glob(f".{folder.name}.*")):
        shutil.rmtree(draft, ignore_errors=True)
