"""The layout: which blocks a step exchanges, in which order, and how they divide into chunks."""

from __future__ import annotations

import enum
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "Block",
    "BlockKind",
    "Chunk",
    "Component",
    "DType",
    "Layout",
    "Place",
    "first_difference",
]


class DType(enum.Enum):
    """The type of a tensor in a worker's memory; values are those of `andon.v1.Dtype`."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT64 = 4


class BlockKind(enum.Enum):
    """What part of a model a block is; values are those of `andon.v1.BlockKind`."""

    TRANSFORMER_BLOCK = 1
    LM_HEAD = 2
    FINAL_NORM = 3
    EMBEDDING = 4
    OTHER = 5


@dataclass(frozen=True, slots=True)
class Component:
    """One named tensor of a block."""

    name: str
    shape: tuple[int, ...]
    dtype: DType = DType.FLOAT32

    def __post_init__(self) -> None:
        """Refuses negative dimensions, and names with the separators of the digest's text."""
        if not self.name or any(character in self.name for character in "\n\t"):
            raise ValueError(f"a component's name must be one line of text, not {self.name!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: a dimension is negative in {self.shape}")

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        """Type and shape as people write them: `float32[128, 64]`."""
        return f"{self.dtype.name.lower()}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Block:
    """Components that travel together, one after the other in one flat vector."""

    kind: BlockKind
    name: str
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        """Refuses a name with the separators of the digest's text."""
        if not self.name or any(character in self.name for character in "\n\t"):
            raise ValueError(f"a block's name must be one line of text, not {self.name!r}")

    @property
    def elements(self) -> int:
        """How many numbers the flat vector holds."""
        return sum(component.elements for component in self.components)


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """Elements `offset` up to `offset + count` of block `block`. Chunks sort as they are sent."""

    block: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class Place:
    """One element of a block: the parameter's name, and the index in it."""

    parameter: str
    element: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The blocks of a model, in sending order. A block's number is its index in `blocks`."""

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        """Refuses names that occur twice: evidence could not say which one it means."""
        for what, names in (
            ("block", [block.name for block in self.blocks]),
            ("component", [part.name for block in self.blocks for part in block.components]),
        ):
            twice = [name for name, times in Counter(names).items() if times > 1]
            if twice:
                raise ValueError(f"{what} {twice[0]!r} occurs twice in the layout")

    @cached_property
    def elements(self) -> int:
        """How many numbers a step exchanges."""
        return sum(block.elements for block in self.blocks)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical text of docs/protocol-data.md, section "The layout's digest"."""
        # Names have no tabs or line feeds, so two layouts never have the same text.
        lines = ["andon.layout.v1"]
        for block in self.blocks:
            lines.append(f"block\t{block.kind.name}\t{block.name}")
            lines += [
                f"component\t{part.name}\t{part.dtype.name}\t{','.join(map(str, part.shape))}"
                for part in block.components
            ]
        return hashlib.sha256(("\n".join(lines) + "\n").encode()).digest()

    def chunks(self, chunk_elements: int) -> Iterator[Chunk]:
        """The chunks of all blocks, in order. The last chunk of a block may be shorter."""
        for index in range(len(self.blocks)):
            yield from self.chunks_of(index, chunk_elements)

    def chunks_of(self, block: int, chunk_elements: int) -> Iterator[Chunk]:
        """The chunks of one block, in order."""
        if chunk_elements < 1:
            raise ValueError(f"chunk_elements must be at least 1, not {chunk_elements}")
        elements = self.blocks[block].elements
        for offset in range(0, elements, chunk_elements):
            yield Chunk(block, offset, min(chunk_elements, elements - offset))

    def place(self, block: int, element: int) -> Place:
        """The component and the index of element `element` of block `block`.

        Raises:
            IndexError: no such block or element.
        """
        if not 0 <= block < len(self.blocks):
            raise IndexError(f"the layout has {len(self.blocks)} blocks, no block {block}")
        rest = element
        for component in self.blocks[block].components:
            if 0 <= rest < component.elements:
                return Place(component.name, _unravel(rest, component.shape))
            rest -= component.elements
        raise IndexError(
            f"block {block} has {self.blocks[block].elements} elements, no element {element}"
        )


def _unravel(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        element, position = divmod(element, size)
        index.append(position)
    return tuple(reversed(index))


@dataclass(frozen=True, slots=True)
class Difference:
    """The first component or block in which two layouts differ: as it is here, and there."""

    component: str
    mine: str
    theirs: str

    def __str__(self) -> str:
        """The difference as a clause, without a full stop."""
        return f"{self.component} is {self.mine} here and {self.theirs} there"


def first_difference(mine: Layout, theirs: Layout) -> Difference | None:
    """The first difference between two layouts; None if they are equal.

    Components that differ are named before blocks that do: a person finds them in the model.
    """
    if mine == theirs:
        return None
    ours = {part.name: part for block in mine.blocks for part in block.components}
    others = {part.name: part for block in theirs.blocks for part in block.components}
    for name in [*ours, *(name for name in others if name not in ours)]:
        here, there = ours.get(name), others.get(name)
        if here != there:
            return Difference(name, str(here or "missing"), str(there or "missing"))
    for index in range(max(len(mine.blocks), len(theirs.blocks))):
        here_block = _outline(mine, index)
        there_block = _outline(theirs, index)
        if here_block != there_block:
            return Difference(f"block {index}", here_block, there_block)
    raise AssertionError("layouts differ, yet no component and no block does")


def _outline(layout: Layout, index: int) -> str:
    if index >= len(layout.blocks):
        return "missing"
    block = layout.blocks[index]
    names = ", ".join(component.name for component in block.components)
    return f"{block.kind.name.lower()} {block.name} ({names})"
