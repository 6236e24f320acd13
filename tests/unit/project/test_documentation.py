"""The documentation is true: what it links to, and what it says to type, exists."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from metrics_tables import process, service, table_of, worker

from andon_cli.help import help_text
from andon_cli.verbs import VERBS
from andon_conformance.config import build_parser as conformance_parser
from andon_coordinator.core.effects import LineState
from andon_coordinator.core.state import TRANSITIONS
from unit.project.documents import ROOT, Document, documents

_PACKAGES = {
    "andon_conformance",
    "andon_server",
    "andon_cli",
    "andon_coordinator",
    "andon_reducer",
    "andon_torch",
    "andon_trainer",
    "andon_grafana",
}
_PATH = re.compile(r"(?:proto|services|trainer|tests|examples|benchmarks|docs)/[\w./*-]+")
_METRIC = re.compile(r"\bandon_[a-z_]*[a-z]\b")
_PARTS_OF_A_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")

DRAWINGS = sorted(path for path in (ROOT / "docs/assets").glob("*.svg") if path.stem != "logo")

every_document = pytest.mark.parametrize(
    "document", documents(), ids=lambda document: str(document.name)
)


def _help_of_conformance() -> str:
    """What `andon conformance` says of itself and of its own commands."""
    parser = conformance_parser()
    verbs = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return "".join(each.format_help() for each in (parser, *verbs[0].choices.values()))


@every_document
def test_every_link_of_a_document_leads_somewhere(document: Document) -> None:
    for link in document.links():
        path, _, anchor = link.partition("#")
        target = (document.path.parent / path).resolve() if path else document.path

        assert target.exists(), f"{document.name} links to {link}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in Document(target).anchors(), f"{document.name}: no heading for {link}"


def test_the_home_page_changes_a_loop_as_the_readme_does() -> None:
    read, home = (
        re.findall(r"^```diff\n.*?^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
        for page in ("README.md", "docs/README.md")
    )

    assert len(read) == 1
    assert home == read


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.stem)
def test_every_drawing_is_shown_has_a_title_and_a_dark_form(drawing: Path) -> None:
    root = ElementTree.parse(drawing).getroot()
    shown = {
        (document.path.parent / link).resolve()
        for document in documents()
        for link in document.links()
    }

    assert drawing in shown
    assert root.findtext("{*}title")
    assert "prefers-color-scheme: dark" in (root.findtext("{*}style") or "")


@every_document
def test_every_file_that_a_document_names_exists(document: Document) -> None:
    for code in document.code():
        if _PATH.fullmatch(code):
            assert list(ROOT.glob(code.rstrip("/"))), f"{document.name} names {code}"


@every_document
def test_every_make_target_that_a_document_names_exists(document: Document) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    for code in document.code():
        call = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*make ([a-z-]+)", code)
        if call:
            assert call.group(1) in targets, f"{document.name} says `{code}`"


@every_document
def test_every_andon_command_that_a_document_names_exists(document: Document) -> None:
    texts = {name: help_text(name, verb, everything=True) for name, verb in VERBS.items()}
    texts["conformance"] = _help_of_conformance()

    for code in document.code():
        call = re.match(r"(?:\$ )?(?:\.venv/bin/)?andon ([a-z]+)((?: .*)?)$", code)
        if not call:
            continue
        verb, rest = call.groups()
        assert verb in texts, f"{document.name} says `{code}`"
        known = texts[verb]
        for flag in re.findall(r" (--[a-z-]+)", re.split(r" \S+\.py| -- ", rest)[0]):
            assert re.search(rf"{flag}\b", known), f"{document.name}: `{code}` has no {flag}"


@every_document
def test_every_metric_that_a_document_names_is_registered(document: Document) -> None:
    registered = {*table_of(process()), *table_of(service()), *table_of(worker())}

    for code in document.code():
        for name in _METRIC.findall(code):
            if name in _PACKAGES:
                continue
            known = name in registered or _PARTS_OF_A_HISTOGRAM.sub("", name) in registered
            assert known, f"{document.name} names the metric {name}"


def test_the_drawing_of_the_states_is_the_table_of_transitions() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")

    drawn = {
        (LineState[before], trigger, LineState[after])
        for before, after, triggers in re.findall(r"^ +([A-Z]+) --> ([A-Z]+): (.+)$", text, re.M)
        for trigger in triggers.split(", ")
    }

    assert drawn == {
        (before, trigger.name.lower().replace("_", " "), after)
        for (before, trigger), after in TRANSITIONS.items()
    }


def test_every_name_in_a_drawing_of_the_architecture_is_in_the_code() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    way = text.split("\n## The path of a gradient\n")[1].split("\n## ")[0]
    drawings = " ".join(re.findall(r"^```mermaid\n(.*?)^```", way, re.M | re.S))
    drawn = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+|\b[a-z]+_[a-z_]+", drawings))
    sources = [
        path for room in ("proto", "services", "trainer") for path in (ROOT / room).rglob("*")
    ]
    code = "".join(path.read_text("utf-8") for path in sources if path.suffix in (".py", ".proto"))

    assert drawn
    for name in drawn:
        assert re.search(rf"\b(?:class|def|message) {name}\b", code), name
