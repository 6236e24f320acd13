"""docs/errors and the protocol say of each reason what the enum says, and name no other."""

from __future__ import annotations

import re

import pytest

from andon.protocol.reasons import Reason
from unit.project.documents import ROOT, protocol

PAGES = ROOT / "docs/errors"
SERVICES = {"coordinator", "reducer", "worker"}

_ROW = re.compile(r"^\| \[(\w+)\]\((\w+)\.md\) \| `(\w+)` \| ([\w, ]+) \| ([\w,. -]+) \|$", re.M)
_CELL = re.compile(r"^\| ([a-z ]+) \| (.+) \|$", re.M)


def again(reason: Reason) -> str:
    if reason.retry_s is None:
        return "no"
    when = f"after {reason.retry_s:g} s" if reason.retry_s else "at once"
    return f"{when}, then with back-off"


def page(reason: Reason) -> str:
    return (PAGES / f"{reason}.md").read_text("utf-8")


def cells(reason: Reason) -> dict[str, str]:
    return dict(_CELL.findall(page(reason)))


def status_codes() -> str:
    return protocol().split("\n### Statuses and reasons\n")[1].split("\n##")[0]


def test_every_page_is_of_a_reason() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*Reason, "README"}


@pytest.mark.parametrize("reason", Reason)
def test_a_page_says_what_the_enum_says(reason: Reason) -> None:
    text, table = page(reason), cells(reason)

    assert text.startswith(f"# {reason}\n")
    assert table["status"] == f"`{reason.code}`"
    assert table["try again"] == again(reason)
    assert set(table["sent by"].split(", ")) <= SERVICES
    assert f"\n{reason.code}: " in text
    assert reason.remedy[1:] in text.split("**What to do.** ")[1]
    parts = re.findall(r"^\*\*(.*?)\*\* ", text, re.M)
    assert parts == ["What happened.", "Whose fault.", "What to do.", "Try again?"]


def test_the_index_is_the_enum_in_its_order() -> None:
    rows = _ROW.findall((PAGES / "README.md").read_text("utf-8"))

    assert rows == [
        (reason, reason, reason.code, cells(reason)["sent by"], again(reason)) for reason in Reason
    ]


def test_the_protocol_names_every_reason_with_its_status() -> None:
    rows = re.findall(r"^\|.*\| ([A-Z_]+) \| ([A-Z_]+) \|.*\|$", status_codes(), re.M)

    assert {reason for _, reason in rows} == {*Reason}
    for code, reason in rows:
        assert code == Reason[reason].code
