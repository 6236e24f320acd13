"""The model's layout: which parameters are exchanged, in which blocks, in which order.

Theory of operation. Backward produces gradients roughly in the reverse order of the modules'
registration, so blocks are formed in that order and then reversed. Every trained parameter belongs
to one block: that of the stack that it is in (a `ModuleList` or `Sequential` of equal children:
transformer blocks), that of its module (embedding, final norm, LM head), or else one of bounded
size together with its neighbours. A tied parameter counts where it was registered first: its
earliest use in forward is the last to add to its gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from andon.protocol.layout import Block, BlockKind, Component, DType, Layout
from andon_trainer.model.wrappers import named_modules, original_of

__all__ = [
    "OTHER_BLOCK_ELEMENTS",
    "ModelPlan",
    "module_prefixes",
    "plan_model",
    "warn_of_rounding",
]

log = logging.getLogger(__name__)

OTHER_BLOCK_ELEMENTS = 2**20
"""The most elements in a block of neighbours; a larger parameter is a block of its own."""

_DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float64: DType.FLOAT64,
}
_HEAD_NAMES = frozenset({"lm_head", "head", "output"})


@dataclass(frozen=True)
class ModelPlan:
    """A layout, and the parameters that its components stand for."""

    layout: Layout
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    """For each block, aligned with its components."""

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The components' names, for each block."""
        return tuple(tuple(part.name for part in block.components) for block in self.layout.blocks)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A trained parameter and the block that it belongs to; OTHER blocks have no name yet."""

    name: str
    parameter: nn.Parameter
    kind: BlockKind
    block: str


def plan_model(modules: Sequence[nn.Module]) -> ModelPlan:
    """Divides the trained parameters of `modules` into blocks, in sending order.

    Frozen and empty parameters are left out; a tied one comes once, under its first name. Names are
    those of `named_parameters`, as if no part was compiled; with several modules they begin with
    `0.`, `1.` and so on.

    Raises:
        ValueError: no parameter is trained, or a parameter's dtype can't be exchanged.
    """
    blocks: list[tuple[Block, tuple[nn.Parameter, ...]]] = []
    seen: set[int] = set()
    for prefix, module in zip(module_prefixes(modules), modules, strict=True):
        claims = list(_Outline(module, prefix).claims(seen))
        for (kind, name), neighbours in groupby(
            claims, key=lambda claim: (claim.kind, claim.block)
        ):
            if name:
                blocks.append(_block(kind, name, list(neighbours)))
            else:
                for piece in _pieces(list(neighbours)):
                    blocks.append(_block(kind, _span(piece), piece))
    if not blocks:
        raise ValueError(
            "there is nothing to train: no module has a parameter with requires_grad; "
            "unfreeze some, or do not prepare this model"
        )
    # Last registered, first to have its gradients: sending overlaps most with backward.
    blocks.reverse()
    return ModelPlan(
        layout=Layout(tuple(block for block, _ in blocks)),
        parameters=tuple(parameters for _, parameters in blocks),
    )


def module_prefixes(modules: Sequence[nn.Module]) -> list[str]:
    """The prefix of each module's names: empty for a single module, else `0.`, `1.` and so on."""
    return [""] if len(modules) == 1 else [f"{index}." for index in range(len(modules))]


class _Outline:
    """One model's structure, from which its parameters find their blocks."""

    def __init__(self, root: nn.Module, prefix: str) -> None:
        self._root = root
        self._prefix = prefix
        self._stacked = dict.fromkeys(_stacked_children(root, ""))
        self._vocabularies = {
            module.num_embeddings for module in root.modules() if isinstance(module, nn.Embedding)
        }

    def claims(self, seen: set[int]) -> Iterator[_Claim]:
        """Trained parameters in order of registration, without those in `seen`; adds them to it."""
        # A norm or linear layer is the model's final norm or LM head only behind the stack.
        behind_stack = False
        for path, module in named_modules(self._root):
            child = self._stack_child_of(path)
            behind_stack = behind_stack or child is not None
            for own_name, parameter in module.named_parameters(recurse=False):
                name = self._prefix + (f"{path}.{own_name}" if path else own_name)
                if id(parameter) in seen or not parameter.requires_grad:
                    continue
                seen.add(id(parameter))
                # Its shape is part of the layout, which is sent when the worker joins.
                if is_lazy(parameter):
                    raise ValueError(
                        f"{name} has no shape yet: run one batch through the model before it is "
                        "prepared"
                    )
                if parameter.numel() == 0:
                    continue
                if child is not None:
                    kind, block = BlockKind.TRANSFORMER_BLOCK, self._prefix + child
                else:
                    kind = self._kind(module, path, own_name, behind_stack=behind_stack)
                    block = "" if kind is BlockKind.OTHER else self._prefix + path
                    if kind is BlockKind.EMBEDDING and not isinstance(module, nn.Embedding):
                        block = name
                    elif kind is not BlockKind.OTHER and not block:
                        block = type(module).__name__
                yield _Claim(name, parameter, kind, block)

    def _stack_child_of(self, path: str) -> str | None:
        while path:
            if path in self._stacked:
                return path
            path = path.rpartition(".")[0]
        return None

    def _kind(
        self, module: nn.Module, path: str, own_name: str, *, behind_stack: bool
    ) -> BlockKind:
        if isinstance(module, nn.Embedding):
            return BlockKind.EMBEDDING
        beside = any(isinstance(original_of(child), nn.Embedding) for child in module.children())
        if beside and ("pos" in own_name.lower() or "embed" in own_name.lower()):
            return BlockKind.EMBEDDING
        if behind_stack and "norm" in type(module).__name__.lower():
            return BlockKind.FINAL_NORM
        if behind_stack and isinstance(module, nn.Linear):
            named = path.rpartition(".")[2] in _HEAD_NAMES
            if named or module.out_features in self._vocabularies:
                return BlockKind.LM_HEAD
        return BlockKind.OTHER


def _stacked_children(module: nn.Module, path: str) -> Iterator[str]:
    """Paths of the children of the outermost stacks: runs of two or more equal modules."""
    module = original_of(module)
    # Unlike `named_children`, `_modules` lists a shared layer each time that the stack has it.
    children = [
        (name, original_of(child)) for name, child in module._modules.items() if child is not None
    ]
    in_stack: set[str] = set()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        for signature, group in groupby(children, key=lambda item: _signature(item[1])):
            run = list(group)
            whole = len(run) == len(children)
            composite = any(True for _ in run[0][1].children())
            if len(run) >= 2 and signature[1] and (whole or composite):
                in_stack.update(name for name, _ in run)
    for name, child in children:
        place = f"{path}.{name}" if path else name
        if name in in_stack:
            yield place
        else:
            yield from _stacked_children(child, place)


def _signature(module: nn.Module) -> tuple[type[nn.Module], tuple[str, ...]]:
    return type(module), tuple(name for name, _ in module.named_parameters())


def _pieces(claims: list[_Claim]) -> Iterator[list[_Claim]]:
    """Pieces of neighbours with at most OTHER_BLOCK_ELEMENTS elements, or one larger parameter."""
    piece: list[_Claim] = []
    elements = 0
    for claim in claims:
        if piece and elements + claim.parameter.numel() > OTHER_BLOCK_ELEMENTS:
            yield piece
            piece, elements = [], 0
        piece.append(claim)
        elements += claim.parameter.numel()
    if piece:
        yield piece


def _span(piece: list[_Claim]) -> str:
    first, last = piece[0].name, piece[-1].name
    return first if len(piece) == 1 else f"{first}..{last}"


def _block(
    kind: BlockKind, name: str, claims: list[_Claim]
) -> tuple[Block, tuple[nn.Parameter, ...]]:
    components = tuple(
        Component(claim.name, tuple(claim.parameter.shape), _dtype(claim)) for claim in claims
    )
    return Block(kind, name, components), tuple(claim.parameter for claim in claims)


def warn_of_rounding(layout: Layout) -> None:
    """Warns of float64 parameters: their gradients are exchanged in float32."""
    doubles = [
        part.name
        for block in layout.blocks
        for part in block.components
        if part.dtype is DType.FLOAT64
    ]
    if doubles:
        log.warning(
            "%d parameters are float64, %s first: their gradients are averaged as float32",
            len(doubles),
            doubles[0],
        )


def _dtype(claim: _Claim) -> DType:
    try:
        return _DTYPES[claim.parameter.dtype]
    except KeyError:
        known = ", ".join(str(dtype) for dtype in _DTYPES)
        remedy = f"trained parameters are {known}"
        if claim.parameter.is_complex():
            remedy = (
                "make its real view the parameter, nn.Parameter(torch.view_as_real(value)), and "
                "take torch.view_as_complex of it in forward"
            )
        raise ValueError(
            f"{claim.name} is {claim.parameter.dtype}, whose gradients can't be exchanged: {remedy}"
        ) from None
