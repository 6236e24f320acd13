"""Checkpoints: a replica in a folder, written whole or not at all, read without pickle."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from andon_trainer.state import (
    check_tensors,
    join_tree,
    named_state,
    pack_tensors,
    split_tree,
    unpack_tensors,
    write_tensors,
)

__all__ = ["Stateful", "load_checkpoint", "save_checkpoint"]

_FORMAT = 1


class Stateful(Protocol):
    """An optimizer, a scheduler, or whatever else has a state."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes over a state."""


def save_checkpoint(
    folder: Path,
    modules: Sequence[nn.Module],
    optimizers: Sequence[Stateful],
    facts: Mapping[str, object],
    registered: Mapping[str, Stateful] | None = None,
) -> Path:
    """Writes `folder`: under another name first, on disk, then renamed into place.

    It holds `model.safetensors`, and for the optimizers and for what is registered a pair of
    safetensors (tensors) and JSON (all else); `state.json` has the facts. A checkpoint of this name
    is replaced.

    Args:
        folder: its parents are made.
        modules: parameters and persistent buffers are kept, each once.
        optimizers: in the order in which they are loaded.
        facts: JSON's values: step, cursor, digest.
        registered: what else has a state, by name.

    Returns:
        The folder.

    Raises:
        TypeError: a state holds what can't be kept without pickle, or facts are not JSON's.
    """
    files: dict[str, bytes] = {"model.safetensors": pack_tensors(dict(named_state(modules)))}
    optimizer_states = [dict(optimizer.state_dict()) for optimizer in optimizers]
    registered_states = {name: dict(it.state_dict()) for name, it in (registered or {}).items()}
    for name, tree in (("optimizer", optimizer_states), ("registered", registered_states)):
        skeleton, tensors = split_tree(tree)
        files[f"{name}.safetensors"] = pack_tensors(tensors)
        files[f"{name}.json"] = json.dumps(skeleton).encode()
    about = {"format": _FORMAT, "facts": dict(facts)}
    files["state.json"] = (json.dumps(about, indent=2) + "\n").encode()

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        for name, data in files.items():
            _write(draft / name, data)
        _sync(draft)
        _move(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _sync(folder.parent)
    return folder


def load_checkpoint(
    folder: Path,
    modules: Sequence[nn.Module],
    optimizers: Sequence[Stateful],
    registered: Mapping[str, Stateful] | None = None,
) -> dict[str, Any]:
    """Restores what `save_checkpoint` wrote, bit for bit.

    Everything is read and the model compared before anything is changed.

    Returns:
        The facts.

    Raises:
        FileNotFoundError: there is no whole checkpoint in `folder`.
        ValueError: it is damaged, or of other models, optimizers or registered objects.
    """
    about = _read_json(folder / "state.json")
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise ValueError(f"{folder} is no checkpoint that this version of andon reads")
    weights = unpack_tensors((folder / "model.safetensors").read_bytes())
    optimizer_states = _read_tree(folder, "optimizer")
    registered_states = _read_tree(folder, "registered")
    others = dict(registered or {})
    if len(optimizer_states) != len(optimizers):
        raise ValueError(
            f"{folder} has {len(optimizer_states)} optimizers, the script {len(optimizers)}"
        )
    if registered_states.keys() != others.keys():
        raise ValueError(
            f"{folder} has {sorted(registered_states)} registered, the script {sorted(others)}"
        )
    check_tensors(modules, weights)

    for optimizer, state in zip(optimizers, optimizer_states, strict=True):
        optimizer.load_state_dict(state)  # refuses other groups before it changes anything
    for name, thing in others.items():
        thing.load_state_dict(registered_states[name])
    write_tensors(modules, weights)
    facts: dict[str, Any] = about["facts"]
    return facts


def _read_tree(folder: Path, name: str) -> Any:
    tensors: dict[str, torch.Tensor] = unpack_tensors((folder / f"{name}.safetensors").read_bytes())
    return join_tree(_read_json(folder / f"{name}.json"), tensors)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


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
        old = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        folder.rename(old)
        draft.rename(folder)
        shutil.rmtree(old)
    else:
        draft.rename(folder)
