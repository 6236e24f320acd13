"""The reference pages are complete: every public name, every member of a Line, every command."""

from __future__ import annotations

import re

import griffe
import pytest

from andon_cli.help import write_page
from andon_cli.verbs import VERBS
from unit.project.documents import ROOT


@pytest.fixture(scope="module")
def worker() -> griffe.Object:
    found = griffe.load("andon_trainer", search_paths=[ROOT / "trainer", ROOT / "proto"])
    assert isinstance(found, griffe.Object)
    return found


def written() -> set[str]:
    """What the pages of the API describe."""
    pages = (ROOT / "docs/api").glob("*.md")
    return {name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)}


def test_every_public_name_is_in_the_api(worker: griffe.Object) -> None:
    assert worker.exports is not None
    names = {f"andon_trainer.{name}" for name in worker.exports}

    assert names == {name for name in written() if name.count(".") == 1}


def test_every_public_member_of_a_line_is_in_the_api(worker: griffe.Object) -> None:
    members = {name for name in worker["Line"].all_members if not name.startswith("_")}

    described = {name.rpartition(".")[2] for name in written() if ".Line." in name}
    assert described == members


def test_the_groups_of_settings_are_the_signature_of_a_line_in_its_order(
    worker: griffe.Object,
) -> None:
    made = worker["Line"].all_members["__init__"]
    table = re.findall(r"^\| [a-z ]+ \| (`.*`) \|", (ROOT / "docs/api/line.md").read_text(), re.M)

    grouped = [name for row in table for name in re.findall(r"`(\w+)`", row)]
    assert grouped == [each.name for each in made.parameters if each.name != "self"]


def test_every_command_has_its_section() -> None:
    page = (ROOT / "docs/commands.md").read_text("utf-8")

    for verb in VERBS:
        assert f"\n## `andon {verb}`\n\n<!-- help: {verb} -->\n" in page
        assert f"| [`andon {verb}`](#andon-{verb}) |" in page


def test_the_page_of_settings_is_what_the_schemas_say() -> None:
    worker = ROOT / "trainer/andon_trainer/config.py"

    assert not write_page(ROOT / "docs/settings.md", worker, check=True), "make settings"
