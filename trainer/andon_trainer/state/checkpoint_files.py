"""A checkpoint: trees of state in a folder, written whole or not at all, read without pickle."""

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
    """An optimizer, a scheduler, or whatever else has a state."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes over a state."""


def save_checkpoint(folder: Path, trees: Mapping[str, Any], facts: CheckpointFacts) -> Path:
    """Writes `folder`: under another name first, on disk, then renamed into place.

    Each tree becomes a pair of files, safetensors for its tensors and JSON for all else;
    `state.json` is the manifest. A checkpoint of this name is replaced. If anything fails, what
    was there before still is, and nothing else.

    Args:
        folder: its parents are made.
        trees: nested dicts, lists and tuples of tensors and plain values, by name.
        facts: where the state stands.

    Returns:
        The folder.

    Raises:
        TypeError: a tree holds what can't be kept without pickle.
        OSError: it can't be written: the disk is full, or is not there.
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
        _sync(draft)
        _move(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _sync(folder.parent)
    return folder


def load_checkpoint(folder: Path, names: tuple[str, ...]) -> tuple[CheckpointFacts, dict[str, Any]]:
    """Reads what `save_checkpoint` wrote, bit for bit, and compares every digest.

    Returns:
        The facts, and the trees of these names.

    Raises:
        FileNotFoundError: there is no checkpoint in `folder`.
        CheckpointDamaged: it is not what was written; the first file that differs is named.
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
    """Removes a checkpoint; never leaves half of one under its name."""
    old = _hidden(folder)
    try:
        folder.rename(old)
    except FileNotFoundError:
        return  # another worker was quicker
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes the folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(draft: Path, folder: Path) -> None:
    if folder.exists():
        # A folder can't be renamed over a full one: for a moment only the old one's new name is.
        old = _hidden(folder)
        folder.rename(old)
        draft.rename(folder)
        shutil.rmtree(old)
    else:
        draft.rename(folder)


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")


def _sweep(folder: Path) -> None:
    """Removes drafts that killed processes left: a run's checkpoints are written one at a time."""
    for draft in (*folder.parent.glob(".step-*"), *folder.parent.glob(f".{folder.name}.*")):
        shutil.rmtree(draft, ignore_errors=True)
