"""The small defects that are put into the code: some of cosmic-ray's operators, and one more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from mutants.anchors import Site

__all__ = ["mutated", "sites"]

_COMPARISONS = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Is_IsNot IsNot_Is"
_BINARY = "Add_Sub Sub_Add Mul_FloorDiv FloorDiv_Mul Div_Mul Mod_Add BitAnd_BitOr BitOr_BitAnd"
_NAMES = [
    *(f"ReplaceComparisonOperator_{each}" for each in _COMPARISONS.split()),
    *(f"ReplaceBinaryOperator_{each}" for each in _BINARY.split()),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ReplaceUnaryOperator_Delete_Not"),
    *("AddNot", "NumberReplacer", "ExceptionReplacer", "ZeroIterationForLoop"),
]


class StatementRemover:
    """Leaves out a call whose result nobody takes, or an assignment to a field or an element."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """As cosmic-ray's operators do it."""
        if node.parent is None or node.parent.type != "simple_stmt":
            return
        assigns = node.type == "expr_stmt" and getattr(node.children[1], "value", "").endswith("=")
        if node.type == "atom_expr" or (assigns and node.children[0].type == "atom_expr"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """`pass` in its place."""
        prefix = node.get_first_leaf().prefix
        return parso.python.tree.Keyword("pass", node.start_pos, prefix)


_OPERATORS = {name: get_operator(f"core/{name}")() for name in _NAMES} | {
    "StatementRemover": StatementRemover()
}


def sites(source: str) -> Iterator[Site]:
    """All places of a file that an operator can change, operator after operator."""
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in _OPERATORS.items():
        occurrences = count()
        for node in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                yield Site(operator=name, occurrence=next(occurrences), line=line, column=column)


def mutated(source: str, operator: str, occurrence: int) -> str:
    """The file's code with that change."""
    code = mutate_code(source, _OPERATORS[operator], occurrence)
    assert code is not None, f"{operator} has no occurrence {occurrence} here"
    return str(code)
