"""Names a mutant by the code around it, and finds it again after that code has moved.

Line numbers and folders change with every move. So a change is named by its file's name, the
qualified name of its function, the operator, and the statement, written by `ast.unparse`: neither
the format nor the comments matter.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import basename

__all__ = ["Change", "Site", "Statements", "changes_of", "choose", "find"]

_LOGS = re.compile(r"(^|\.|_)(log|logger|warnings)\.\w+$")
_UNSEEN = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.Assert, ast.Raise, ast.Import, ast.ImportFrom, ast.Match),
)
_ELSEWHERE = re.compile(r"__(repr|str)__$|^Cuda")  # Words, and what needs a GPU.


@dataclass(frozen=True, slots=True)
class Site:
    """A place where an operator can change a file: its line from 1, its column from 0."""

    operator: str
    occurrence: int
    """Among the operator's sites in the file."""
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Change:
    """A site's name."""

    path: str
    """Of the file, from the repository's root; only its last part counts as the name."""
    function: str
    operator: str
    statement: str
    nth: int
    """Among the operator's changes of equal statements of that function."""
    place: int
    """Among the operator's changes of that function."""
    occurrence: int

    @property
    def file(self) -> str:
        """The file's name, without its folder."""
        return basename(self.path)


class Statements:
    """The statements of the functions in a file, except those whose change no test should find."""

    def __init__(self, source: str) -> None:
        self._lines = source.splitlines()
        self._found: list[tuple[tuple[int, int], tuple[int, int], str, ast.AST]] = []
        self._walk(ast.parse(source), "", in_function=False)
        self._found.sort(key=lambda each: each[0])
        self._starts = [each[0] for each in self._found]

    def _walk(self, node: ast.AST, within: str, *, in_function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            name, inside = within, in_function
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                self._found.append((_start(child), _end(child), within * in_function, child))
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{within}.{child.name}".lstrip(".")
                inside = not isinstance(child, ast.ClassDef)
            self._walk(child, name, in_function=inside)

    def around(self, line: int, column: int) -> tuple[str, str] | None:
        """The function and the text of the innermost statement; None if it is to be left alone."""
        at = line, len(self._lines[line - 1][:column].encode())
        for index in range(bisect_right(self._starts, at) - 1, -1, -1):
            _, end, function, node = self._found[index]
            if at < end:
                break
        else:
            return None
        if not function or _ELSEWHERE.search(function) or _is_left_alone(node, at):
            return None
        return function, text_of(node)


def text_of(node: ast.AST) -> str:
    """A statement's own code, without the statements in it."""
    alone = copy.copy(node)
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(getattr(alone, name, None), list):
            setattr(alone, name, [ast.Pass()] if name == "body" else [])
    return ast.unparse(alone).removesuffix("\n    pass").strip()


def _is_left_alone(statement: ast.AST, at: tuple[int, int]) -> bool:
    """Whether the place is in an annotation, a message, a log's arguments or the like."""
    if isinstance(statement, _UNSEEN):
        return True
    for node in ast.walk(statement):
        spared: ast.AST = node
        if isinstance(node, ast.Call):
            if not _LOGS.search(ast.unparse(node.func)):
                continue
        elif isinstance(node, ast.BoolOp | ast.IfExp):
            if not any(map(_is_text, ast.iter_child_nodes(node))):
                continue
        elif isinstance(node, ast.JoinedStr):
            pass
        elif isinstance(node, ast.AnnAssign):
            spared = node.annotation
        else:
            continue
        if _start(spared) <= at < _end(spared):
            return True
    return False


def _is_text(node: ast.AST) -> bool:
    words = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    return words or isinstance(node, ast.JoinedStr)


def _start(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _end(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)


def changes_of(path: str, source: str, sites: Iterable[Site]) -> Iterator[Change]:
    """Names the sites of one file."""
    statements = Statements(source)
    equal: Counter[tuple[str, str, str]] = Counter()
    places: Counter[tuple[str, str]] = Counter()
    for site in sites:
        found = statements.around(site.line, site.column)
        if found is not None:
            function, statement = found
            key = function, site.operator, statement
            yield Change(
                path=path,
                function=function,
                operator=site.operator,
                statement=statement,
                nth=equal[key],
                place=places[key[:2]],
                occurrence=site.occurrence,
            )
            equal[key] += 1
            places[key[:2]] += 1


def choose(changes: Sequence[Change], count: int, seed: str) -> list[Change]:
    """So many changes: two of a function at most, one of a statement, and of many operators.

    A change's place in the draw depends on its name and the seed alone.
    """

    def drawn(change: Change) -> bytes:
        name = seed, change.file, change.function, change.operator, change.statement, change.nth
        return hashlib.sha256(repr(name).encode()).digest()

    chosen: list[Change] = []
    taken: Counter[object] = Counter()
    for change in sorted(changes, key=drawn):
        family = change.operator.partition("_")[0]
        limits: dict[object, int] = {
            (change.path, change.function): 2,
            (change.path, change.function, change.statement): 1,
            change.path: math.ceil(count / 4),
            family: math.ceil(count / 5),
        }
        if len(chosen) < count and all(taken[key] < most for key, most in limits.items()):
            chosen.append(change)
            taken.update(limits.keys())
    return chosen


_Name = Callable[[Change], object]
# From the whole name to what is left of it after the file, the class or the function got another.
_NAMES: tuple[_Name, ...] = (
    lambda it: (it.file, it.function, it.operator, it.statement),
    lambda it: (it.function, it.operator, it.statement),
    lambda it: (it.function.rpartition(".")[2], it.operator, it.statement),
)
# Much code may have these names, so they count only where one change has them.
_WEAK_NAMES: tuple[_Name, ...] = (
    lambda it: (it.file, it.operator, it.statement),
    lambda it: (it.operator, it.statement),
    lambda it: (it.file, it.function, it.operator, it.place),
    lambda it: (it.function, it.operator, it.place),
)


def find(lost: Change, changes: Sequence[Change]) -> Change | None:
    """The change of that name, wherever its code is now; None if nothing is like it.

    A statement that was worded anew is found by its place among those of its function.
    """
    for name in (*_NAMES, *_WEAK_NAMES):
        alike = [each for each in changes if name(each) == name(lost)]
        if not alike or (name in _WEAK_NAMES and len(alike) > 1):
            continue
        parts = set(lost.path.split("/"))  # Of several files the one whose folder is most alike.
        path = max(
            {each.path for each in alike}, key=lambda it: (len(parts & set(it.split("/"))), it)
        )
        alike = [each for each in alike if each.path == path]
        return next((each for each in alike if each.nth == lost.nth), alike[-1])
    return None
