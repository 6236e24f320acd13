"""A mutant is found again after its code has moved, and only what tests should see is changed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mutants.anchors import Change, Site, changes_of, choose, find

SOURCE = '''
class Round:
    """A round."""

    limit: int = 3 < 4

    def full(self, count: int) -> bool:
        """Whether it is."""
        # Enough of them.
        if count < 3 and self.open: return count < 2
        return count < 2

    def __repr__(self) -> str:
        return "full" if 2 < 3 else "open"

def wait(log, left):
    assert 1 < 2
    log.info("%s", 1 < left)
    name = f"{1 < left} left"
    if left < 1:
        raise ValueError(left < 1)
    return name or ("nothing is left" if left < 0 else left < 9)
'''
REFORMATTED = """
def wait(log, left):
    if (
        left
        < 1
    ):
        raise ValueError
    return left < 9


class Round:
    def full(self, count: int, ready: bool) -> bool:
        if (count < 3) and self.open:
            return count < 2
        return (
            count < 2  # As before.
        )
"""


def less_than(source: str) -> Iterator[Site]:
    """Sites of an operator that changes each `<`."""
    comparisons = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Compare)]
    comparisons.sort(key=lambda each: (each.lineno, each.col_offset))
    for index, each in enumerate(comparisons):
        yield Site(operator="less", occurrence=index, line=each.lineno, column=each.col_offset)


def changes(source: str, path: str = "services/a/core/round.py") -> list[Change]:
    return list(changes_of(path, source, less_than(source)))


def test_messages_logs_assertions_and_class_bodies_are_left_alone() -> None:
    found = [(each.function, each.statement, each.nth) for each in changes(SOURCE)]

    assert found == [
        ("Round.full", "if count < 3 and self.open:", 0),
        ("Round.full", "return count < 2", 0),
        ("Round.full", "return count < 2", 1),
        ("wait", "if left < 1:", 0),
    ]


def test_a_change_is_found_in_another_file_and_another_format() -> None:
    now = changes(REFORMATTED, "trainer/b/rounds/ring.py")

    for change in changes(SOURCE):
        found = find(change, now)

        assert found is not None
        assert (found.statement, found.nth) == (change.statement, change.nth)
        assert found.path == "trainer/b/rounds/ring.py"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def full", "def is_full"),
        ("class Round", "class ReducerRound"),
        ("self.open", "self.state.open"),
    ],
)
def test_a_change_is_found_after_one_thing_got_another_name(old: str, new: str) -> None:
    found = find(changes(SOURCE)[0], changes(SOURCE.replace(old, new)))

    assert found is not None
    assert found.statement.startswith("if count < 3 and self.")


def test_of_equal_changes_the_one_in_the_folder_most_alike_is_found() -> None:
    lost = changes(SOURCE)[0]
    elsewhere = [
        changes(SOURCE, f"{folder}/round.py")[0] for folder in ("trainer/b/core", "services/b/core")
    ]

    found = find(lost, elsewhere)

    assert found == elsewhere[1]


def test_a_common_statement_is_not_looked_for_elsewhere() -> None:
    lost = replace(changes(SOURCE)[1], function="Round.empty")

    assert lost.statement == "return count < 2"
    assert find(lost, changes(SOURCE)) is None


def test_a_change_whose_code_is_gone_is_not_found() -> None:
    lost = replace(changes(SOURCE)[0], function="Round.empty", statement="if count < 7:")

    assert find(lost, changes(SOURCE)) is None


def test_a_draw_depends_on_names_alone() -> None:
    first = choose(changes(SOURCE), 6, "seed")
    moved = choose(changes(REFORMATTED, "elsewhere/round.py"), 6, "seed")

    assert len(first) == 2
    assert [each.statement for each in first] == [each.statement for each in moved]
