"""The replica: everything that must be the same on all workers, as bytes, files and a digest."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from andon.host.audit_files import WeightApart
from andon.host.manifest import CheckpointDamaged, CheckpointFacts
from andon.protocol.capabilities import COORDINATOR_CAPABILITIES, HASHED_BASE
from andon.protocol.records import Key
from andon_trainer.core.reports import Digest
from andon_trainer.errors import CheckpointRefused, StateCorrupt
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.model.layout import ModelPlan
from andon_trainer.state.apart import first_weight_apart
from andon_trainer.state.base import Base
from andon_trainer.state.checkpoint_files import (
    BaseFile,
    Draft,
    Stateful,
    load_checkpoint,
    save_checkpoint,
)
from andon_trainer.state.snapshot import CopyRooms, Snapshot, is_ample, large_bytes_of
from andon_trainer.state.trees import (
    elements_of,
    join_tree,
    packed_parts,
    require_keepable,
    split_tree,
    unpack_tensors,
)
from andon_trainer.state.weights import (
    DigestPart,
    base_beside,
    check_tensors,
    digest_and_prefixes,
    digest_of,
    digest_parts,
    named_state,
    write_tensors,
)

__all__ = ["CheckpointCut", "Replica", "ReplicaCut"]

_LENGTH_BYTES = 8
_OUTER = "andon.outer"
_PARTS = ("model", "optimizers", "registered")
_FROZEN = "frozen"
_WORTH_GETTING_BYTES = 2**26
"""To get less memory takes a moment, also if an optimizer waits for it."""


@dataclass(frozen=True, slots=True)
class CheckpointCut:
    """The state of a moment, and the draft of the checkpoint that it is to become."""

    draft: Draft
    snapshot: Snapshot
    facts: CheckpointFacts
    digest: Sequence[DigestPart]
    base: BaseFile | None

    def write(self, copied: Callable[[], None] = lambda: None) -> bool:
        """Writes the checkpoint; False: the snapshot is torn, and there is none.

        Args:
            copied: called once the snapshot is complete, so that nobody waits any more.

        Raises:
            TypeError, ValueError: a state holds what can't be kept without pickle.
            OSError: it can't be written; an older one is still there.
        """
        try:
            if not self.snapshot.complete():
                self.draft.discard()
                return False
            copied()
            trees = dict(self.snapshot.tree)
            frozen = trees.pop(_FROZEN)
            digest = digest_of(self.digest, trees["model"]).hex()
        except BaseException:
            self.draft.discard()
            raise
        base = None if self.base is None else replace(self.base, tensors=frozen)
        self.draft.finish(trees, replace(self.facts, digest=digest), base)
        return True


@dataclass(slots=True)
class ReplicaCut:
    """The state of one moment for a worker that learns; it is packed while training goes on.

    A `StateCut` of the transfers.
    """

    snapshot: Snapshot
    frozen: tuple[str, ...]
    """The names of the tensors of the base."""

    def complete(self) -> bool:
        """Copies what is left; False: it is torn."""
        return self.snapshot.complete()

    def packed(self) -> PackedState:
        """What `Replica.packed` would have returned at the cut."""
        return _packed(self.snapshot.tree, self.frozen)

    def close(self) -> None:
        """Optimizers wait no more; only for the thread that cut it."""
        # Perhaps nobody needs a state again.
        self.snapshot.close(keeps_room=is_ample(self.snapshot.large_bytes))


def _packed(tree: Any, frozen_names: Collection[str]) -> PackedState:
    """A state: the JSON's length, JSON, and safetensors, with the base last."""
    skeleton, tensors = split_tree(tree)
    text = json.dumps(skeleton).encode()
    frozen = {name: tensors.pop(name) for name in frozen_names}
    length = len(text).to_bytes(_LENGTH_BYTES, "little")
    base_bytes = sum(tensor.nbytes for tensor in frozen.values())
    return PackedState((length, text, *packed_parts(tensors, last=frozen)), base_bytes)


def _rest(data: bytes | bytearray, start: int) -> bytes:
    """What is behind `start`; of a bytearray nothing is left."""
    if isinstance(data, bytes):
        return data[start:]
    del data[:start]  # Moves nothing.
    rest = bytes(data)
    data.clear()
    return rest


@dataclass(slots=True)
class Replica:
    """A worker's models and optimizers, and whatever else the script registered by name."""

    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer] = ()
    registered: dict[str, Stateful] = field(default_factory=dict)
    _early: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States that arrived before the script registered their objects."""
    outer: Optimizer | None = None
    """The optimizer of the line's own, which applies what windows of local steps changed."""
    _marked: frozenset[int] = frozenset()
    """Ids of the parameters that get a prefix in `weights`."""
    base: Base = field(default_factory=Base)
    """The parameters that are not trained; empty until the layout is known."""
    rooms: CopyRooms = field(default_factory=CopyRooms)
    """Memory for copies of the state."""
    beneath: Callable[[], dict[str, Any] | None] = lambda: None
    """The line's state, as `tree` has it, while the models hold what is computed beyond it."""

    def register(self, name: str, thing: Stateful) -> None:
        """Adds an object with a state; loads the state that has arrived for it, if any.

        Raises:
            TypeError: its state can't be kept without pickle.
            ValueError: the name is taken.
        """
        if name in self.registered:
            raise ValueError(f"{name!r} is registered already")
        # Checked now, where the script can be corrected, and not hours later on the worker that has
        # to write a checkpoint or send its state.
        try:
            require_keepable(dict(thing.state_dict()))
        except TypeError as error:
            raise TypeError(
                f"the state of {name!r} can't go into a checkpoint or to a new worker: {error}"
            ) from error
        self.registered[name] = thing
        if name in self._early:
            thing.load_state_dict(self._early.pop(name))

    def early(self, name: str) -> dict[str, Any] | None:
        """The state that has arrived for `name` before anything was registered for it, if any."""
        return self._early.get(name)

    def mark(self, plan: ModelPlan) -> None:
        """Takes the layout of `plan`: what is in it gets a prefix, what is not is the base."""
        trained = {id(part) for parameters in plan.parameters for part in parameters}
        self.base = base_beside(self.modules, trained)
        named = {id(tensor): None for _, tensor in named_state(self.modules)}
        parts = [part for parameters in reversed(plan.parameters) for part in parameters]
        self._marked = frozenset(map(id, parts))
        if [id_ for id_ in named if id_ in self._marked] != list(map(id, parts)):
            # The prefixes would be in another order than the layout's components, and the
            # coordinator could not name the parameter that differs.
            self._marked = frozenset()

    def digest(self) -> bytes:
        """SHA-256 of the weights, 32 bytes; see docs/protocol-data.md."""
        return digest_and_prefixes(self.modules, frozenset(), base=self.base)[0]

    def weights(self, coordinator_can: Collection[str] = COORDINATOR_CAPABILITIES) -> Digest:
        """The digest that workers compare, with prefixes that tell where two weights differ.

        A coordinator that can't tell the two kinds of digest apart gets the one that has the
        elements of frozen parameters: all of them are hashed again.
        """
        base = self.base if HASHED_BASE in coordinator_can else None
        digest = digest_and_prefixes(self.modules, self._marked, self.outer, base)
        return Digest(*digest, base_hashed=bool(base))

    def apart_from(self, folder: Path) -> WeightApart | None:
        """The first element in which the weights are not those of a checkpoint."""
        return first_weight_apart(self.modules, folder)

    def use_outer(self, optimizer: Optimizer) -> None:
        """Makes an outer optimizer's state part of this state and of its digest.

        Raises:
            ValueError: the script registered something under its name.
        """
        self.register(_OUTER, optimizer)
        self.outer = optimizer

    def packed(self) -> PackedState:
        """The whole state for a new worker: the JSON's length, JSON, and safetensors; no pickle.

        The elements of the base come last. It has views of the state's tensors: use it before
        anything is written to them.
        """
        return _packed(self._of_the_line()[0], self._frozen())

    def cut_state(self) -> ReplicaCut:
        """Cuts what `packed` would return now."""
        tree, is_own = self._of_the_line()
        # What lies beneath is moved by no optimizer's step, which would wait for the copies.
        snapshot = Snapshot(tree, self.written_by_steps() if is_own else (), rooms=self.rooms)
        return ReplicaCut(snapshot, tuple(self._frozen()))

    def room_ahead(self) -> Callable[[], None] | None:
        """What gets memory for the next state that is cut, on a thread of its own.

        None: it would take too much of this machine, or is got in a moment.
        """
        tree, is_own = self._of_the_line()
        size = large_bytes_of(tree)
        if size < _WORTH_GETTING_BYTES or not is_ample(size):
            return None
        on_gpu = any(tensor.is_cuda for _, tensor in named_state(self.modules))
        return self.rooms.getting(size, pinned=on_gpu and is_own)

    def _of_the_line(self) -> tuple[dict[str, Any], bool]:
        """The line's state, and whether that is this worker's own, with nothing beyond it."""
        beneath = self.beneath()
        return (self.tree(), True) if beneath is None else (beneath, False)

    def base_elements(self) -> bytes:
        """The elements of the base, with which a packed state ends; empty if there is none."""
        return elements_of(self._frozen())

    def _frozen(self) -> dict[str, torch.Tensor]:
        # By the names that the whole state has for them: they decide their order.
        named = named_state(self.modules)
        return {f"model.{name}": tensor for name, tensor in named if tensor in self.base}

    def install(self, data: bytes | bytearray) -> None:
        """Loads a state that was packed. States of objects not registered yet are kept for them.

        Of a bytearray nothing is left: it is as large as the state, which needs the memory.

        Raises:
            StateCorrupt: it can't be read; nothing was changed.
            ValueError: it is of other models or optimizers; nothing was changed.
        """
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        # Its sender gave the digest of these bytes too, so they may be anything.
        try:
            skeleton = json.loads(data[_LENGTH_BYTES:start])
            tree = join_tree(skeleton, unpack_tensors(_rest(data, start)))
        except (ValueError, RecursionError) as error:
            raise StateCorrupt(f"its sender gave what can't be read: {error}") from error
        if not isinstance(tree, dict) or not tree.keys() >= set(_PARTS):
            raise StateCorrupt(f"its sender gave a state without {', '.join(_PARTS)}")
        self._take(tree)

    def save(
        self, folder: Path, facts: CheckpointFacts, generators: dict[str, Any] | None = None
    ) -> Path:
        """Writes a checkpoint into `folder`, completely or not at all; returns the folder.

        Raises:
            TypeError: a state holds what can't be kept without pickle.
            OSError: it can't be written; an older checkpoint in `folder` is still there.
        """
        tree, base = self._apart()
        return save_checkpoint(folder, {**tree, "rng": generators or {}}, facts, base)

    def cut(
        self,
        folder: Path,
        facts: CheckpointFacts,
        generators: dict[str, Any],
        *,
        at_once: bool = False,
    ) -> CheckpointCut:
        """Cuts what `save` would write now, to be written while training goes on.

        Args:
            folder: of the checkpoint. The draft beside it is made now, so that a disk that is
                missing or read-only is noticed now.
            facts: without the digest, which is computed when it is written.
            generators: the states of the random generators.
            at_once: copies everything now.

        Raises:
            OSError: the draft can't be made.
        """
        tree, base = self._apart()
        draft = Draft(folder)
        try:
            writes_base = base is not None and not draft.link(base)
            whole = {
                **tree,
                "rng": generators,
                _FROZEN: base.tensors if writes_base and base else {},
            }
            snapshot = Snapshot(whole, () if at_once else self.written_by_steps(), rooms=self.rooms)
        except BaseException:
            draft.discard()
            raise
        digest = digest_parts(self.modules, self.base)
        return CheckpointCut(draft, snapshot, facts, digest, base)

    def large_bytes(self) -> int:
        """How much memory the copies of a cut need. That of the base is needed once, if at all."""
        tree = self.tree()
        for name in self._frozen():
            del tree["model"][name.removeprefix("model.")]
        return large_bytes_of(tree)

    def _apart(self) -> tuple[dict[str, Any], BaseFile | None]:
        """The state as a checkpoint has it: what is not trained is apart."""
        tree = self.tree()
        frozen = {name.removeprefix("model."): part for name, part in self._frozen().items()}
        for name in frozen:
            del tree["model"][name]
        if not frozen:
            return tree, None
        return tree, BaseFile(self.base.digest(list(frozen.items())).hex(), frozen)

    def written_by_steps(self) -> set[int]:
        """The ids of the tensors that the steps of optimizers write, and hardly anything else."""
        found = {
            id(tensor)
            for _, tensor in named_state(self.modules)
            if isinstance(tensor, nn.Parameter)
        }
        for optimizer in (*self.optimizers, *(() if self.outer is None else (self.outer,))):
            for state in optimizer.state.values():
                found |= {id(part) for part in state.values() if isinstance(part, torch.Tensor)}
        return found

    def load(self, folder: Path, head: Key | None = None) -> tuple[CheckpointFacts, dict[str, Any]]:
        """Loads a checkpoint. States of objects not registered yet are kept for them.

        Args:
            folder: of the checkpoint.
            head: the record that it must be of; None: any.

        Returns:
            The facts of the checkpoint, and the random generators that were saved with it.

        Raises:
            CheckpointRefused: it is missing, damaged, or of another record, other models or other
                optimizers.
        """
        try:
            facts, trees, frozen = load_checkpoint(folder, (*_PARTS, "rng"))
            if head is not None and facts.head != head:
                raise ValueError(f"it is of record {facts.head}, and {head} is wanted")
            trees["model"] |= frozen
            missing = sorted(self.registered.keys() - trees["registered"].keys())
            if missing:
                raise ValueError(
                    f"the checkpoint {folder} has no state of {', '.join(missing)}, which this "
                    "script prepares or registers"
                )
            self._take(trees)
        except FileNotFoundError as error:
            raise CheckpointRefused(f"there is no checkpoint in {folder}: {error}") from error
        except CheckpointDamaged as error:
            raise CheckpointRefused(str(error), file=error.file) from error
        except ValueError as error:
            raise CheckpointRefused(f"the checkpoint {folder} does not fit: {error}") from error
        base = Base({id(part) for name, part in named_state(self.modules) if name in frozen})
        if digest_and_prefixes(self.modules, (), base=base)[0].hex() != facts.digest:
            file = folder / "model.safetensors"
            raise CheckpointRefused(f"{file} holds other weights than its manifest says", file=file)
        return facts, trees["rng"]

    def tree(self) -> dict[str, Any]:
        """The whole state as it is now: nothing is copied."""
        return {
            "model": dict(named_state(self.modules)),
            "optimizers": [dict(optimizer.state_dict()) for optimizer in self.optimizers],
            "registered": {name: dict(it.state_dict()) for name, it in self.registered.items()},
        }

    def _take(self, tree: dict[str, Any]) -> None:
        """Loads trees; models and optimizers are compared before anything is changed."""
        check_tensors(self.modules, tree["model"])
        if len(tree["optimizers"]) != len(self.optimizers):
            raise ValueError(
                f"the state has {len(tree['optimizers'])} optimizers, this script "
                f"{len(self.optimizers)}: prepare the same ones on every worker"
            )
        for optimizer, state in zip(self.optimizers, tree["optimizers"], strict=True):
            # It refuses other groups before it changes anything. The models come last: what fails
            # up to here leaves the weights as they were.
            optimizer.load_state_dict(state)
        for name, state in tree["registered"].items():
            if name in self.registered:
                self.registered[name].load_state_dict(state)
            else:
                self._early[name] = state
        write_tensors(self.modules, tree["model"])
