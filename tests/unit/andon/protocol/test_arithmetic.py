from __future__ import annotations

import pytest

from andon.protocol.arithmetic import check, difference, in_order, is_one, remedy


def test_the_first_name_that_differs_is_named_with_both_values() -> None:
    mine = in_order({"torch": "2.0", "MKL_CBWR": "AVX2", "numpy": "1"})
    theirs = in_order({"torch": "2.1", "numpy": "1"})

    assert difference(mine, theirs) == ("MKL_CBWR", "AVX2", "unset")
    assert difference(mine, mine) is None


def test_who_states_nothing_has_an_arithmetic_of_its_own() -> None:
    stated = in_order({"threads": "1"})

    assert is_one(stated, stated)
    assert not is_one(stated, in_order({"threads": "2"}))
    assert not is_one((), ())


@pytest.mark.parametrize(
    ("name", "wanted", "says"),
    [
        ("threads", "1", "OMP_NUM_THREADS=1"),
        ("MKL_CBWR", "AVX2", "MKL_CBWR=AVX2"),
        ("MKL_CBWR", "unset", "take MKL_CBWR out"),
        ("torch", "2.1", "torch 2.1"),
        ("processor", "x", "machine"),
        ("matmul precision", "highest", "matmul precision"),
    ],
)
def test_a_remedy_says_how_to_get_the_lines_value(name: str, wanted: str, says: str) -> None:
    assert says in remedy(name, wanted)


@pytest.mark.parametrize(
    "items",
    [
        (("b", ""), ("a", "")),
        (("a", ""), ("a", "")),
        (("", "x"),),
        (("a", "\n"),),
        (("a", "x" * 1000),),
        tuple((f"{each:04}", "") for each in range(257)),
    ],
)
def test_names_rise_and_nothing_is_too_large(items: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(ValueError, match=r"must rise|can't be stated|limit"):
        check(items)
