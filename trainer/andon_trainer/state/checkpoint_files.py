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
from pathlib import Path
from typing import Any, Protocol

from andon.host.manifest import MANIFEST, CheckpointDamaged, CheckpointFacts, Manifest
from andon_trainer.state.trees import join_tree, pack_tensors, split_tree, unpack_tensors

__all__ = ["Stateful", "load_checkpoint", "remove_checkpoint", "save_checkpoint"]


class Stateful(Protocol):
    """An optimizer, a scheduler, or anything else with a state."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: tensors, numbers, strings, lists, tuples and dicts."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Loads a state that `state_dict` returned."""


def save_checkpoint(folder: Path, trees: Mapping[str, Any], facts: CheckpointFacts) -> Path:
    """Writes a checkpoint into `folder`, replacing an older one.

    Each tree becomes two files, safetensors for its tensors and JSON for everything else;
    `state.json` is the manifest. If anything fails, `folder` is as it was before.

    Args:
        folder: its parents are created.
        trees: nested dicts, lists and tuples of tensors and plain values, by name.
        facts: step, position, digest and run plan of the state.

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
    files[MANIFEST] = Manifest.of(facts, files).to_bytes()

    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    draft = _hidden(folder)
    try:
        draft.mkdir()
        for name, data in files.items():
            _write(draft / name, data)
        _sync_folder(draft)
        _move(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _sync_folder(folder.parent)
    return folder


def load_checkpoint(folder: Path, names: tuple[str, ...]) -> tuple[CheckpointFacts, dict[str, Any]]:
    """Reads what `save_checkpoint` wrote, and verifies every digest.

    Returns:
        The facts, and the trees of these names.

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
    return manifest.facts, trees


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint; never leaves half of it under its name."""
    old = _hidden(folder)
    try:
        folder.rename(old)
    except FileNotFoundError:
        return  # Another worker has removed it.
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
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
